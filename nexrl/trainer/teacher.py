"""The teacher of distillation: what is asked of it, and the columns that this makes.

teacher.path            -> policy `teacher` on the train service, frozen -> forward
no path                 -> the rows' own column `teacher_logprobs`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nexrl.config.schema_algorithm import TeacherConfig
from nexrl.errors import ConfigError
from nexrl.types import CANDIDATE_IDS, Array, ModelSpec

TEACHER = "teacher"
TEACHER_LOGPROBS = "teacher_logprobs"
TEACHER_CANDIDATE_LOGPROBS = "teacher_candidate_logprobs"


class Teacher:
    """Whether the estimator or the loss wants a teacher, and where its logprobs come from."""

    def __init__(
        self,
        config: TeacherConfig,
        *,
        needs: Sequence[str],
        optional: Sequence[str] = (),
        recipe_dir: Path,
    ) -> None:
        """`needs` are what estimator and loss ask for, `optional` what the loss takes when a
        teacher is configured, as a recipe's own loss does."""
        candidates = TEACHER_CANDIDATE_LOGPROBS in needs
        offered = config.path is not None and TEACHER_LOGPROBS in optional
        self.wanted = candidates or offered or TEACHER_LOGPROBS in needs
        """Whether anything asks for it."""
        self.spec: ModelSpec | None = None
        """What to host on the train service; None when the rows bring its logprobs, or none wants
        them."""
        self._top_k = config.top_k if candidates else 0
        if candidates and (config.path is None or not config.top_k):
            raise ConfigError(
                "trainer.algorithm.loss.name: this loss compares the teacher's most likely tokens, "
                "which needs trainer.algorithm.teacher.path and top_k >= 1, got path "
                f"{config.path!r} and top_k {config.top_k}"
            )
        if self.wanted and config.path is not None:
            path = str(_folder(config.path, recipe_dir))
            self.spec = ModelSpec(policy=TEACHER, path=path, trainable=False)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What its forward pass is asked for."""
        if not self._top_k:
            return ("logprobs",)
        return ("logprobs", f"top_ids:{self._top_k}", f"top_logprobs:{self._top_k}")

    def columns(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """The forward pass's outputs as [N] and [N, K] columns, by the names that losses use."""
        found: dict[str, Array] = {TEACHER_LOGPROBS: outputs["logprobs"]}
        if self._top_k:
            found[CANDIDATE_IDS] = outputs[f"top_ids:{self._top_k}"].astype(np.int32, copy=False)
            found[TEACHER_CANDIDATE_LOGPROBS] = outputs[f"top_logprobs:{self._top_k}"]
        return found


def _folder(path: str, recipe_dir: Path) -> Path:
    """As with service.train_service.model_path: from the working directory, then the recipe's."""
    tried = [Path(path).expanduser(), recipe_dir / path]
    for folder in tried:
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise ConfigError(
        f"trainer.algorithm.teacher.path: no config.json in {' or '.join(map(str, tried))}"
    )
