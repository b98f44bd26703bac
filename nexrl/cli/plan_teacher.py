"""What a plan sees of the teacher of a distillation: its folder, its vocabulary, its size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nexrl.config.rule import is_rl
from nexrl.config.schema import RunConfig
from nexrl.errors import ConfigError
from nexrl.trainer.teacher import TEACHER_LOGPROBS, Teacher

KEY = "trainer.algorithm.teacher.path"


def teacher_folder(config: RunConfig, *, recipe_dir: Path) -> Path | None:
    """The folder of the stage's teacher; ConfigError when it is none, None without a teacher."""
    settings = config.trainer.algorithm.teacher
    if not is_rl(config) or settings.path is None:
        return None
    spec = Teacher(settings, needs=(TEACHER_LOGPROBS,), recipe_dir=recipe_dir).spec
    assert spec is not None and spec.path is not None  # noqa: PT018 - one fact: it is configured
    return Path(spec.path)


def check_vocabulary(teacher: Path, student: Path) -> None:
    """ConfigError when the two tokenizers give a token different ids, or have different tokens.

    Distillation compares logprobs id by id; a folder without a tokenizer is taken at its word.
    """
    theirs, ours = _vocabulary(teacher), _vocabulary(student)
    if theirs is None or ours is None or theirs == ours:
        return
    token, number = next((t, i) for t, i in (theirs.items() ^ ours.items()))
    where = "the teacher's" if theirs.get(token) == number else "the policy's"
    raise ConfigError(
        f"{KEY}: the tokenizer of {teacher} ({len(theirs)} tokens) differs from that of the policy "
        f"({len(ours)} tokens), for example in {token!r}, which is {number} in {where} only; "
        "accepted: a teacher with the policy's own tokenizer, since both are compared id by id"
    )


def _vocabulary(folder: Path) -> Mapping[str, int] | None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    found: Mapping[str, int] = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    return found
