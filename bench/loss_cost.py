"""What each named loss costs beside the model: its own forward and backward, as a share.

The model's share is forward and backward of the tiny arithmetic model over one micro-batch, with the
plainest objective there is, the sum of logprobs. The loss's is its term, with KL and entropy where it
has them, from outputs that are leaves: forward and backward without the model. Two shapes: rows of the
arithmetic recipe (10 tokens, 4 trained) and dense rows (64 tokens, all trained). Median of repeats.

    python bench/loss_cost.py [--tokens 2048] [--repeats 30] [--threads 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from nexrl.algorithms.losses import LOSSES
from nexrl.testing.loss_inputs import make_loss_case
from nexrl.testing.tiny_models import make_tiny_model

SHAPES = {"recipe": (10, 4), "dense": (64, 63)}
"""Tokens of a row, and how many of them are trained."""


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call after three that warm up."""
    seconds = []
    for i in range(repeats + 3):
        start = time.perf_counter()
        work()
        if i >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def model_s(model: torch.nn.Module, rows: int, length: int, trained: int, repeats: int) -> float:
    """Seconds of the model's forward and backward for the logprobs of the trained tokens."""
    token_ids = torch.randint(3, 13, (rows, length))

    def work() -> None:
        logits = model(token_ids).logits[:, -trained - 1 : -1]
        targets = token_ids[:, -trained:, None]
        logprobs = torch.log_softmax(logits, -1).gather(-1, targets)
        model.zero_grad(set_to_none=True)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    return median_s(work, repeats)


def loss_s(name: str, rows: int, trained: int, repeats: int) -> float:
    """Seconds of the loss's own forward and backward in float32."""
    case = make_loss_case(name, rows=(trained,) * rows)

    def tensor(array: object) -> torch.Tensor:
        found = torch.as_tensor(array)
        return found.float() if found.is_floating_point() else found

    outputs = {name: tensor(array).requires_grad_() for name, array in case.outputs.items()}
    inputs = {name: tensor(array) for name, array in case.inputs.items()}
    regularised = "kl_coefficient" in case.loss.config
    config = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01} if regularised else {}

    def work() -> None:
        for output in outputs.values():
            output.grad = None
        (case.loss.term(outputs, inputs, config) * inputs["weight"]).sum().backward()

    return median_s(work, repeats)


def measure(tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """By shape: `model_ms`, and for each loss its share of it."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(make_tiny_model(Path(folder) / "model"))
        for shape, (length, trained) in SHAPES.items():
            rows = max(1, tokens // length)
            model_time = model_s(model, rows, length, trained, repeats)
            shares = {n: loss_s(n, rows, trained, repeats) / model_time for n in LOSSES}
            found[shape] = {"model_ms": 1000 * model_time, **shares}
    return found


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the micro-batch")
    parser.add_argument("--repeats", type=int, default=30, help="measured repeats")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = measure(args.tokens, args.repeats)
    if args.json:
        print(json.dumps(found))
        return
    print("loss".ljust(22) + "".join(shape.rjust(10) for shape in found))
    print("model, ms".ljust(22) + "".join(f"{v['model_ms']:10.1f}" for v in found.values()))
    for name in LOSSES:
        print(name.ljust(22) + "".join(f"{v[name]:10.2%}" for v in found.values()))


if __name__ == "__main__":
    main()
