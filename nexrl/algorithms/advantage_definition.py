"""What estimators of advantages are given and what they return.

Per-token arrays hold trained tokens only, M of them, ordered by trajectory, then row, then
position: prompts and observations are not in them, so what steps over time skips observations
instead of treating them as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.groups import Float64Array, GroupStatistics, IndexArray
from nexrl.algorithms.segments import segment_sums
from nexrl.errors import InvariantError

StdKind = Literal["sample", "population", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may use of T trajectories with U turns and M trained tokens.

    Only `rewards` and `groups` are always there; an estimator's `needs` names the others.
    """

    rewards: Float64Array
    """[T] scalar rewards; a trajectory without one is not among them (FR-070)."""
    groups: IndexArray
    """[T] index of the baseline group, see `group_index`."""
    lengths: IndexArray | None = None
    """[T] trained tokens of each trajectory over all its rows; they sum to M."""
    token_rewards: Any = None
    """[M] further reward at each trained token (a KL penalty, dense rewards); None is all 0.
    Estimators of trajectories add its sum to `rewards`; those of tokens keep it where it is, those
    of turns in its turn. gdpo and pass_at_k, which do not judge `rewards`, say what they do."""
    values: Any = None
    """[M] critic value of the state before each trained token."""
    turn_rewards: Float64Array | None = None
    """[U] reward of each turn, ordered by trajectory, then time. `rewards` is not part of it: that
    is earned beside these, at the end of the last turn."""
    turn_lengths: IndexArray | None = None
    """[U] trained tokens of each turn; they sum to M."""
    turn_counts: IndexArray | None = None
    """[T] turns of each trajectory; they sum to U."""
    turn_anchors: IndexArray | None = None
    """[U] index of the anchor state that the turn started from; equal in different trajectories of
    a group when they were in the same state; -1 where unknown."""
    reward_parts: Mapping[str, Float64Array] = field(default_factory=dict)
    """[T] named components of the reward, before weighting."""
    greedy_rewards: Float64Array | None = None
    """[T] reward of the greedy completion of the same draw."""
    behavior_logprobs: Any = None
    """[M] logprobs of the trained tokens under the policy that drew them."""
    teacher_logprobs: Any = None
    """[M] logprobs of the same tokens under the teacher."""

    def __post_init__(self) -> None:
        num = len(self.rewards)
        _check_length("rewards", self.rewards, num, num)
        if self.token_rewards is not None and self.lengths is None:
            raise InvariantError("advantages: token_rewards are given without lengths")
        num_tokens = None if self.lengths is None else int(self.lengths.sum())
        num_turns = None if self.turn_counts is None else int(self.turn_counts.sum())
        for expected, names in (
            (num, ("groups", "lengths", "turn_counts", "greedy_rewards")),
            (num_tokens, ("token_rewards", "values", "behavior_logprobs", "teacher_logprobs")),
            (num_turns, ("turn_rewards", "turn_lengths", "turn_anchors")),
        ):
            for name in names:
                _check_length(name, getattr(self, name), expected, num)
        for name, part in self.reward_parts.items():
            _check_length(f"reward part {name!r}", part, num, num)
        self._check_turn_lengths()
        if not np.isfinite(self.rewards).all():
            raise InvariantError("advantages: a reward is not finite")

    def _check_turn_lengths(self) -> None:
        if self.turn_lengths is None or self.turn_counts is None or self.lengths is None:
            return
        of_turns = segment_sums(self.turn_lengths, self.turn_counts)
        if (of_turns != self.lengths).any():
            first = int(np.argmax(of_turns != self.lengths))
            raise InvariantError(
                f"advantages: the turns of trajectory {first} of {len(self.rewards)} have "
                f"{of_turns[first]:g} trained tokens, the trajectory has {self.lengths[first]}"
            )

    def total_rewards(self) -> Float64Array:
        """[T] `rewards` with the sum of each trajectory's `token_rewards`."""
        if self.token_rewards is None or self.lengths is None:
            return self.rewards
        return self.rewards + segment_sums(self.token_rewards, self.lengths)


def _check_length(name: str, array: Any, expected: int | None, num: int) -> None:
    if array is None or expected is None:
        return
    if np.ndim(array) != 1:
        raise InvariantError(
            f"advantages: {name} has shape {tuple(np.shape(array))}, expected ({expected},)"
        )
    if len(array) != expected:
        raise InvariantError(
            f"advantages: {name} has {len(array)} entries, expected {expected} for "
            f"{num} trajectories"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """Settings of estimators; each says whose it is. Configuration: `trainer.algorithm.advantage`."""

    std: StdKind = "sample"
    """grpo, gigpo, and the task part of distill: standard deviation that is divided by."""
    gamma: float = 1.0
    """gae, reinforce_pp, step_returns, gigpo: discount per token (per turn in the last two)."""
    gae_lambda: float = 1.0
    """gae: lambda of the policy's advantages."""
    critic_lambda: float | None = None
    """gae: lambda of the critic's targets; None is `gae_lambda` (decoupled in VAPO)."""
    length_adaptive: float | None = None
    """gae: alpha of lambda = 1 - 1 / (alpha x length), at least 0, in place of `gae_lambda` for the
    policy's advantages; VAPO 2025; None is off."""
    whiten: bool = True
    """gae, reinforce_pp, reinforce_pp_baseline, gdpo: whiten over the batch."""
    pass_k: int = 2
    """pass_at_k: k; a group of no more than k gets 0."""
    success_reward: float = 1.0
    """pass_at_k: a trajectory is correct when its reward is at least this."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """gdpo: weight of each reward part; a part not named weighs 1."""
    baseline: Literal["none", "batch", "moving"] = "none"
    """reinforce: what is subtracted from the reward."""
    moving_baseline: float | None = None
    """reinforce: present value of the moving baseline, kept by the trainer; None at first, when the
    batch's own mean stands in for it. `moved_baseline` gives the next value."""
    step_weight: float = 1.0
    """gigpo: weight of the turn-level advantage beside the trajectory-level one."""
    distill_coefficient: float = 1.0
    """distill: beta."""
    task_coefficient: float = 0.0
    """distill: weight of the task advantage (grpo) that is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """What an estimator found."""

    per_trajectory: Float64Array | None = None
    """[T] when one number holds for all tokens of a trajectory; None otherwise."""
    per_token: Any = None
    """[M] float array when tokens differ; None otherwise. Exactly one of the two is given."""
    returns: Any = None
    """[M] what a critic shall learn; only from estimators that use one."""
    silent: npt.NDArray[np.bool_] | None = None
    """[T] trajectories whose group carries no signal, from a group-relative estimator that does not
    judge total rewards; None where the spread of total rewards decides."""

    def spread(self, lengths: IndexArray, dtype: npt.DTypeLike = np.float64) -> Any:
        """[M] advantage of each trained token, as `dtype`."""
        if self.per_token is not None:
            return np.asarray(self.per_token, dtype)
        return np.repeat(np.asarray(self.per_trajectory, dtype), lengths)


Estimator = Callable[[AdvantageInputs, GroupStatistics, AdvantageSettings], Advantages]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageDefinition:
    """One estimator."""

    name: str
    """Name in `trainer.algorithm.advantage`."""
    group_relative: bool
    """Whether groups without signal get exactly 0."""
    estimate: Estimator
    """(inputs, statistics of the total rewards, settings) -> advantages, before the zero rule. The
    docstring's first line is its formula."""
    needs: tuple[str, ...] = ()
    """Fields of AdvantageInputs that must not be None or empty."""
    folds_token_rewards: bool = True
    """Whether `estimate` gets `token_rewards` as part of `rewards`, as estimators of trajectories
    want it, and not as they are."""
