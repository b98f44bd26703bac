"""The task that all examples train on: write even digits. A few thousand parameters, seconds."""

from pathlib import Path

from nexrl.services.reward.signature import instant
from nexrl.testing.tiny_models import make_tiny_model

EVEN = set("02468")


def make_model(folder: Path, seed: int) -> None:
    """A model of one layer with random weights, one token for each character."""
    make_tiny_model(folder, seed=seed, hidden=32, layers=1, heads=2, intermediate=64)


def make_preview(folder: Path) -> None:
    """Tokenizer and configuration for `nexrl plan`."""
    make_model(folder, 0)


make_model.tokenizer = make_preview


def prompts(seed: int = 0) -> list[dict[str, str]]:
    """What is asked does not matter here; each prompt is an item of its own."""
    return [{"prompt": f"{a}+{b}="} for a in range(16) for b in range(16)]


@instant
def even_digits(completion: str, **_: object) -> dict[str, float]:
    """Share of even digits among the four characters, and whether it stopped before the end."""
    even = sum(character in EVEN for character in completion) / 4
    return {"even": even, "stopped": 0.1 * (len(completion) < 4)}
