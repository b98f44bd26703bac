"""Tokens per second of the builtin engine over HTTP, against `transformers` on the same model.

    python bench/engine.py [--model FOLDER] [--rounds 3] [--json] [--compare] [--deterministic]

The work: requests of uneven length, 32 at a time. `generate` takes them in static batches of 32,
each as long as its longest member; the engine takes a new one whenever one ends. Rounds alternate
within one run, and only tokens that were asked for count. `--compare` adds the continuous batching
that ships with transformers, `--deterministic` the engine in deterministic mode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nexrl.services.inference.client import HttpInferenceService
from nexrl.testing.tiny_models import make_tiny_model
from nexrl.types import Prompt, Sampling

CONCURRENCY = 32
Work = list[tuple[Prompt, int]]
"""(prompt, tokens to draw)"""


def make_work(num_requests: int, vocab: int, longest: int) -> Work:
    """Prompts of 4 to 24 tokens; lengths log-normal, as answers of a policy are."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.5, 0.9, num_requests), 4, longest).astype(int)
    return [
        (Prompt(token_ids=rng.integers(3, vocab, rng.integers(4, 25)).astype(np.int32)), int(n))
        for n in lengths
    ]


def without_end_token(folder: Path) -> Path:
    """Nothing ends a draw but its limit, so that every engine does the same work."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = folder / name
        settings = json.loads(path.read_text())
        settings.update({k: None for k in ("eos_token_id", "eos_token") if k in settings})
        path.write_text(json.dumps(settings))
    return folder


class StaticBatches:
    """`model.generate` over left-padded batches."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def run(self, work: Work) -> None:
        for first in range(0, len(work), CONCURRENCY):
            self._run_batch(work[first : first + CONCURRENCY])

    def _run_batch(self, batch: Work) -> None:
        width = max(len(p.token_ids) for p, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, (prompt, _) in enumerate(batch):
            ids[i, width - len(prompt.token_ids) :] = torch.from_numpy(prompt.token_ids)
            mask[i, width - len(prompt.token_ids) :] = 1
        longest = max(n for _, n in batch)
        self.model.generate(
            ids, attention_mask=mask, max_new_tokens=longest, do_sample=True, eos_token_id=None,
            pad_token_id=0, top_k=0,
        )  # fmt: skip


class TransformersContinuous:
    """`generate_batch`, the continuous batching of transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, work: Work) -> None:
        from transformers import GenerationConfig

        for first in range(0, len(work), CONCURRENCY):
            batch = work[first : first + CONCURRENCY]
            self.model.generate_batch(
                [p.token_ids.tolist() for p, _ in batch],
                generation_config=GenerationConfig(
                    max_new_tokens=max(n for _, n in batch), do_sample=True, pad_token_id=0
                ),
            )


class Server:
    """Our server as a child process, and our client of it."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, *, deterministic: bool) -> None:
        service = {"dtype": arguments.dtype, "max_batch": CONCURRENCY}
        if arguments.threads:
            service["num_threads"] = arguments.threads
        self._settings = {
            "model_folder": str(folder), "service": service, "deterministic": deterministic
        }  # fmt: skip

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "nexrl.services.inference.server",
            json.dumps(self._settings),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        ready = json.loads(await asyncio.wait_for(self._process.stdout.readline(), 180))
        self._service = HttpInferenceService(f"http://127.0.0.1:{ready['port']}")

    async def run(self, work: Work) -> None:
        room = asyncio.Semaphore(CONCURRENCY)

        async def one(prompt: Prompt, num_tokens: int) -> None:
            async with room:
                sampling = Sampling(max_tokens=num_tokens)
                (completion,) = await self._service.generate(prompt, sampling=sampling)
            assert len(completion.token_ids) == num_tokens

        await asyncio.gather(*(one(*item) for item in work))

    async def stop(self) -> None:
        await self._service.aclose()
        self._process.terminate()
        await self._process.wait()


async def measure(arguments: argparse.Namespace, folder: Path, vocab: int) -> dict[str, Any]:
    work = make_work(arguments.requests, vocab, arguments.longest)
    num_tokens = sum(n for _, n in work)
    static = StaticBatches(folder, arguments.dtype)
    cores = os.cpu_count() or 1
    servers = {"engine_http": Server(folder, arguments, deterministic=False)}
    if arguments.deterministic:
        servers["engine_http_deterministic"] = Server(folder, arguments, deterministic=True)
    local: dict[str, tuple[int, Callable[[Work], None]]] = {
        f"generate_{n}_threads": (n, static.run) for n in {1, arguments.threads or cores}
    }
    if arguments.compare:
        local["transformers_continuous"] = (cores, TransformersContinuous(static.model).run)
    rates: dict[str, list[float]] = {name: [] for name in [*local, *servers]}
    for server in servers.values():
        await server.start()
    try:
        for number in range(arguments.rounds + 1):
            for name, (threads, run) in local.items():
                torch.set_num_threads(threads)
                started = time.perf_counter()
                run(work if number else work[:CONCURRENCY])
                rates[name].append(num_tokens / (time.perf_counter() - started))
            for name, server in servers.items():
                started = time.perf_counter()
                await server.run(work if number else work[:CONCURRENCY])
                rates[name].append(num_tokens / (time.perf_counter() - started))
    finally:
        for server in servers.values():
            await server.stop()
    return report({name: values[1:] for name, values in rates.items()}, num_tokens)


def report(rates: dict[str, Sequence[float]], num_tokens: int) -> dict[str, Any]:
    """Medians over the rounds, and ratios to the better thread count of `generate`."""
    median = {name: statistics.median(values) for name, values in rates.items()}
    best = max(v for name, v in median.items() if name.startswith("generate_"))
    result: dict[str, Any] = {
        "concurrency": CONCURRENCY,
        "tokens_per_round": num_tokens,
        "tokens_per_s": {name: round(v, 1) for name, v in median.items()},
        "ratio_to_generate": round(median["engine_http"] / best, 2),
    }
    if "engine_http_deterministic" in median:
        cost = median["engine_http"] / median["engine_http_deterministic"]
        result["deterministic_cost"] = round(cost, 2)
    if "transformers_continuous" in median:
        ratio = median["engine_http"] / median["transformers_continuous"]
        result["ratio_to_transformers_continuous"] = round(ratio, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="Hugging Face folder; default: the 0.86M tiny model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, help="CPU threads of both; default: each its best")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=200, help="tokens of the longest answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments.model or make_tiny_model(Path(scratch), max_positions=512))
        if arguments.model is None:
            folder = without_end_token(folder)
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        result = asyncio.run(measure(arguments, folder, vocab))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result["tokens_per_s"].items():
        print(f"{name:28} {value:10.1f} tokens/s")
    print(f"engine over HTTP / generate  {result['ratio_to_generate']:10.2f} x")
    for name in ("deterministic_cost", "ratio_to_transformers_continuous"):
        if name in result:
            print(f"{name:28} {result[name]:10.2f} x")


if __name__ == "__main__":
    main()
