"""The model of this recipe: 0.86M parameters, random weights, one token for each character."""

from pathlib import Path

from nexrl.testing.tiny_models import make_tiny_model


def make_model(folder: Path, seed: int) -> None:
    """Write a Hugging Face model folder."""
    make_tiny_model(folder, seed=seed, vocab="arithmetic", max_positions=64)


def make_preview(folder: Path) -> None:
    """Tokenizer and configuration for `nexrl plan`; the weights come along, they are that small."""
    make_model(folder, 0)


make_model.tokenizer = make_preview
