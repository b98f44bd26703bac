"""One rank of `test_ranks.py`: gradient of its own rows, then a sum over all ranks.

Started once for each rank; the test holds the store at which ranks meet. For each folder of an
optimizer step it reads the chunks of its micro-steps from `share<rank>.npz` and writes the summed
gradient to `sum<rank>.npy`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed

from nexrl.types import LossSpec, RowChunk
from tests.certify.certify_service import gradient_of, loaded_models

DEADLINE = timedelta(seconds=120)
"""Of every meeting; a rank that waits longer ends with an error. Ranks start far apart on a busy
machine."""


def read_share(path: Path) -> Iterator[RowChunk]:
    """The chunks of a share, one for each micro-step."""
    with np.load(path) as arrays:
        for step in range(int(arrays["num_steps"])):
            own = {
                name.partition("/")[2]: arrays[name]
                for name in arrays.files
                if name.startswith(f"{step}/")
            }
            lengths, ids = own.pop("lengths"), own.pop("token_ids")
            yield RowChunk(lengths=lengths, token_ids=ids, inputs=own)


def write_share(path: Path, chunks: list[RowChunk]) -> None:
    """What `read_share` reads."""
    arrays = {"num_steps": np.array(len(chunks))}
    for step, chunk in enumerate(chunks):
        own = {"lengths": chunk.lengths, "token_ids": chunk.token_ids, **chunk.inputs}
        arrays |= {f"{step}/{name}": array for name, array in own.items()}
    np.savez(path, **arrays)  # type: ignore[arg-type]


def main() -> int:
    """Exit status: 0 when the sum is written."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rank", "ranks", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=Path, nargs="+", required=True)
    parser.add_argument("--leave", action="store_true", help="end before the gradients meet")
    asked = parser.parse_args()
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", asked.port, is_master=False, timeout=DEADLINE
    )
    distributed.init_process_group(
        "gloo", store=store, rank=asked.rank, world_size=asked.ranks, timeout=DEADLINE
    )
    if asked.leave:
        return 3
    model = loaded_models(asked.model).lm
    for folder in asked.steps:
        loss = LossSpec(**json.loads((folder / "loss.json").read_text()))
        chunks = list(read_share(folder / f"share{asked.rank}.npz"))
        gradient = torch.from_numpy(gradient_of(model, chunks, loss))
        distributed.all_reduce(gradient, distributed.ReduceOp.SUM)
        np.save(folder / f"sum{asked.rank}.npy", gradient.numpy())
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
