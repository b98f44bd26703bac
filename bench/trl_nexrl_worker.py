"""The NexRL side of the comparison with TRL: a whole `nexrl launch`. Prints one JSON line.

python bench/trl_nexrl_worker.py FOLDER SETTINGS_JSON in_process|process
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from nexrl.launch.run import launch

CHARS = "0123456789+-=? "


def make_inputs(folder: Path) -> None:
    """A random Qwen2 (4 layers, hidden 128, about 0.83M parameters), its tokenizer, 64 prompts."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", *CHARS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(vocabulary),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    rng = random.Random(0)
    prompts = [f"{rng.randrange(10, 100)}+{rng.randrange(10, 100)}=" for _ in range(64)]
    (folder / "prompts.json").write_text(json.dumps(prompts))


def prompts(path: str) -> list[dict[str, str]]:
    """Data factory."""
    return [{"prompt": p} for p in json.loads(Path(path).read_text())]


def reward(completion: str, **_: Any) -> float:
    """Share of even digits, as on the other side."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))


def main() -> None:
    folder, settings, placement = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    recipe = folder / f"recipe-{placement}"
    recipe.mkdir(exist_ok=True)
    here = Path(__file__).resolve()
    config: dict[str, Any] = {
        "experiment_name": "trl-side-by-side",
        "data": {
            "sources": [
                {"factory": f"{here}:prompts", "arguments": {"path": str(folder / "prompts.json")}}
            ],
            "batch_size": settings["groups"],
            "rollout_repeat_n": settings["repeat"],
        },
        "rollout_worker": {
            "reward": f"{here}:reward",
            "sampling": {"max_tokens": settings["max_new"]},
        },
        "trainer": {
            "num_steps": settings["steps"],
            "optimizer": {"lr": settings["lr"]},
            "algorithm": {"preset": "grpo", "kl": {"coefficient": 0.0}},
        },
        "service": {
            "train_service": {"model_path": str(folder / "model"), "placement": placement},
            "inference_service": {"placement": placement},
        },
        "launch": {"run_root": str(folder / "runs")},
        "runtime_monitor": {"live": "off"},
    }
    (recipe / "rl_train.yaml").write_text(json.dumps(config))
    code = launch(recipe, [], resume=None)
    if code:
        sys.exit(code)
    [metrics] = sorted(
        (folder / "runs").glob("*/*/metrics.jsonl"), key=lambda p: p.stat().st_mtime
    )[-1:]
    steps = [r for line in metrics.open() if (r := json.loads(line))["axis"] == "step"]
    seconds = steps[-1]["wall_s"] - steps[1]["wall_s"]
    rate = settings["groups"] * settings["repeat"] * (len(steps) - 2) / seconds
    shares = {
        k: round(sum(s["metrics"].get(k, 0) for s in steps[2:]) / seconds, 3)
        for k in steps[-1]["metrics"]
        if k.startswith(("time/", "sync/")) and k.endswith(("_s", "train", "sync", "rollout_wait"))
    }
    print(json.dumps({"trajectories_per_s": rate, "steps": len(steps), "seconds_share": shares}))


if __name__ == "__main__":
    main()
