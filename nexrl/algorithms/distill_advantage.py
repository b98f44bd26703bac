"""The advantage of on-policy distillation: a teacher judges each token that the student drew."""

from __future__ import annotations

import numpy as np

from nexrl.algorithms.advantage_definition import (
    AdvantageDefinition,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
)
from nexrl.algorithms.group_advantages import standardised
from nexrl.algorithms.groups import GroupStatistics, group_statistics
from nexrl.algorithms.segments import working_dtype
from nexrl.errors import ConfigError


def _distill(
    inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings
) -> Advantages:
    """-beta (behavior - teacher) + task_coefficient x grpo

    [M] per token: minus the sampled reverse KL of student to teacher, without a return over later
    tokens; beta is `distill_coefficient`. The task part is that of grpo on rewards, exactly 0 in
    groups without signal. Token rewards are added where they are.
    On-policy distillation, Lu et al. 2025; reverse KL of the student's own draws: MiniLLM, Gu et al.
    2024; GKD, Agarwal et al. 2024.
    """
    teacher, behavior = inputs.teacher_logprobs, inputs.behavior_logprobs
    dtype = working_dtype(teacher, behavior, inputs.token_rewards)
    advantages = np.subtract(teacher, behavior, dtype=dtype)
    advantages *= settings.distill_coefficient
    if inputs.token_rewards is not None:
        advantages += inputs.token_rewards
    if settings.task_coefficient:
        if inputs.lengths is None:
            raise ConfigError(
                "trainer.algorithm.advantage.task_coefficient > 0 needs lengths, the trained tokens "
                "of each trajectory"
            )
        task = standardised(group_statistics(inputs.rewards, inputs.groups), settings.std)
        advantages += np.repeat((settings.task_coefficient * task).astype(dtype), inputs.lengths)
    return Advantages(per_token=advantages)


DISTILL_ADVANTAGE = AdvantageDefinition(
    name="distill",
    group_relative=False,
    estimate=_distill,
    needs=("behavior_logprobs", "teacher_logprobs"),
    folds_token_rewards=False,
)
