"""The command line as people write it."""

from __future__ import annotations

import pytest

from nexrl.cli.main import main, parse


@pytest.mark.parametrize(
    "text",
    [
        "plan recipe/x --provenance trainer.num_steps=3",
        "plan recipe/x trainer.num_steps=3 --provenance",
        "plan --provenance recipe/x trainer.num_steps=3",
        "plan --job-path recipe/x trainer.num_steps=3",
        "launch recipe/x trainer.num_steps=3 --resume",
        "serve inference --model m trainer.num_steps=3 --port 5",
    ],
)
def test_an_override_may_stand_before_or_after_options(text: str) -> None:
    args = parse(text.split())
    given = [*args.overrides, *([str(args.recipe)] if getattr(args, "recipe", None) else [])]
    assert "trainer.num_steps=3" in given


@pytest.mark.parametrize("text", ["plan recipe/x --provenence", "store show run a=b", "plan x y"])
def test_a_misspelt_option_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = None
    try:
        code = main(text.split())
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert capsys.readouterr().err
