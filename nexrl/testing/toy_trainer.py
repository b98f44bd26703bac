"""Trainers over the toy train service: on-policy trajectories of its bigram policy, in a line.

For tests of trainers, of advantages and losses in a trainer's hands, and of recipes' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nexrl.config.schema import TrainerConfig
from nexrl.testing.makers import make_tracker
from nexrl.testing.toy_train_service import ToyTrainService, bigram_logprobs
from nexrl.trainer.policy_gradient import PolicyGradientTrainer
from nexrl.trainer.trainer import Trainer, TrainerContext
from nexrl.types import Column, RowChunk, TokenRow, Trajectory, Turn

LOOSE: Mapping[str, Any] = {"lr": 0.5, "grad_clip_norm": 0.0}
"""A step large enough to see, without clipping."""


def make_toy_trainer(
    service: ToyTrainService | None = None,
    *,
    kind: type[Trainer] = PolicyGradientTrainer,
    on_policy_only: bool = True,
    recipe_dir: Path | None = None,
    **settings: Any,
) -> Any:
    """A trainer whose `trainer` section is `settings`; its tracker records."""
    settings.setdefault("optimizer", LOOSE)
    fields: dict[str, Any] = {} if recipe_dir is None else {"recipe_dir": recipe_dir}
    context = TrainerContext(
        train_service=service or ToyTrainService(),
        config=TrainerConfig(**settings),
        tracker=make_tracker(),
        max_response_tokens=8,
        on_policy_only=on_policy_only,
        **fields,
    )
    return kind(context)


def drawn_row(
    service: ToyTrainService,
    ids: Sequence[int],
    *,
    prompt: int = 1,
    temperature: float = 1.0,
    turns: tuple[Turn, ...] = (),
    teacher_logprobs: Sequence[float] | None = None,
) -> TokenRow:
    """A row with the logprobs of the service's present weights; all behind the prompt is trained."""
    chunk = RowChunk.from_rows([np.array(ids, np.int32)], temperature=temperature)
    sampled = np.arange(len(ids)) >= prompt
    columns = {}
    if teacher_logprobs is not None:
        columns["teacher_logprobs"] = Column(values=np.array(teacher_logprobs, np.float32))
    return TokenRow(
        token_ids=chunk.token_ids,
        loss_mask=sampled,
        sampled=sampled,
        behavior_logprobs=bigram_logprobs(service.tables["actor"], chunk) * sampled,
        temperature=temperature,
        turns=turns,
        columns=columns,
    )


def drawn(
    service: ToyTrainService, num_groups: int = 4, size: int = 3, **fields: Any
) -> list[Trajectory]:
    """On-policy trajectories of uneven length, rewards 0 and 1 within each group. `fields` are
    those of every `Trajectory`."""
    generator = np.random.default_rng(5)
    made = []
    for group in range(num_groups):
        for member in range(size):
            ids = generator.integers(0, service.vocab_size, 3 + (group + member) % 4)
            made.append(
                Trajectory(
                    rows=(drawn_row(service, ids.tolist()),),
                    **{
                        "reward": float(member % 2),
                        "group_id": f"i{group}/0",
                        "item_id": f"i{group}",
                        "trajectory_id": f"t{group}.{member}",
                        **fields,
                    },
                )
            )
    return made
