"""PolicyGradientTrainer: reinforcement learning composed of the parts in `nexrl.algorithms`.

    scored trajectories -> shaped rewards -> frozen columns by `forward` -> advantages -> weights
      -> correction -> optimizer steps (policy, and critic beside it) -> metrics

Any advantage works with any loss, correction, aggregation, KL placement and entropy term, as
`trainer.algorithm` says. Consumes a batch's trajectories, calls the train service, returns metrics.
Everything per token is whole-array numpy; metrics are computed here from returned outputs, so that
they are the same for any split into chunks.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nexrl.algorithms.advantage_definition import AdvantageInputs
from nexrl.algorithms.baseline_advantages import moved_baseline
from nexrl.algorithms.corrections import correction_weights
from nexrl.algorithms.groups import IndexArray
from nexrl.algorithms.kl import KL_ESTIMATORS
from nexrl.algorithms.metrics import MetricSums, add_correction, add_mismatch, length_metrics
from nexrl.algorithms.shaping import shape_rewards, trained_after_masking
from nexrl.errors import InvariantError
from nexrl.trainer.advantage_columns import (
    GREEDY_REWARD,
    AdvantageEstimator,
    advantage_inputs,
    judgement_metrics,
    row_column,
)
from nexrl.trainer.advice import Advice
from nexrl.trainer.batched_trainer import BatchedTrainer, StepPlan, in_flight
from nexrl.trainer.batching import RowTable, describe, flatten
from nexrl.trainer.critic import CRITIC, Critic
from nexrl.trainer.policy_steps import EntropyBonus, PolicyLoss, PolicySteps
from nexrl.trainer.teacher import TEACHER, TEACHER_LOGPROBS, Teacher
from nexrl.trainer.trainer import TrainerContext
from nexrl.types import Array, BoolArray, FloatArray, ModelSpec, Trajectory, TrajectoryStatus

REFERENCE = "reference"
SHAPING_PART = "shaping"
"""Name of the reward part that `trainer.algorithm.shaping` makes, for gdpo and its part_weights."""
POSITION_BOUNDS = (64, 512, 4096)
"""mismatch/abs_mean by position among a row's trained tokens: a drift that grows with length shows
here and hardly in the mean (FR-091)."""


class PolicyGradientTrainer(BatchedTrainer):
    """Advantage estimator, policy loss, correction, KL and entropy as `trainer.algorithm` says.

    Invariant: a trajectory of zero advantage, and a token that a correction zeroes, stay in the
    batch and in its denominator; a trajectory without a reward, or that is masked for having been
    truncated, is not in it. Rows without engine logprobs are trained only in `sync` mode, with the
    proximal policy in their place.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        algorithm = self.config.algorithm
        self._loss = PolicyLoss(algorithm, context.recipe_dir)
        self._estimator = AdvantageEstimator(algorithm.advantage, context.recipe_dir)
        self._teacher = Teacher(
            algorithm.teacher,
            needs=(*self._estimator.needs, *self._loss.definition.required),
            optional=self._loss.definition.optional,
            recipe_dir=context.recipe_dir,
        )
        self._critic = (
            Critic(algorithm.critic, self.config.optimizer, policy=self.policy)
            if "values" in self._estimator.needs
            else None
        )
        self._entropy = EntropyBonus(algorithm.entropy)
        self._moving_baseline: float | None = None
        self._advice = Advice(self.tracker)
        self._needs_reward = self._loss.uses_advantage and self._estimator.uses_reward
        self.needs = (
            *(("reward",) if self._needs_reward else ()),
            *((GREEDY_REWARD,) if "greedy_rewards" in self._estimator.needs else ()),
            *((TEACHER,) if self._teacher.wanted and self._teacher.spec is None else ()),
        )

    # --- what a checkpoint holds ------------------------------------------------------------------

    @property
    def further_policies(self) -> tuple[ModelSpec, ...]:
        """The reference, when there is a KL term, and the critic of `gae`."""
        reference = ModelSpec(policy=REFERENCE, copy_of=self.policy, trainable=False)
        return (
            *((reference,) if self.config.algorithm.kl.coefficient else ()),
            *((self._critic.spec,) if self._critic is not None else ()),
        )

    async def setup(self) -> None:
        """Make the reference, the critic and the teacher as the stage begins; a resume keeps the
        checkpoint's. The teacher never changes, so it is read from its folder each time."""
        await super().setup()
        if self._teacher.spec is None:
            return
        teacher = await self.train_service.create(self._teacher.spec)
        student = await self.train_service.info(self.policy)
        if teacher.vocab_size != student.vocab_size:
            self.tracker.warn(
                f"trainer.algorithm.teacher.path: the teacher's vocabulary has {teacher.vocab_size} "
                f"ids, the policy's {student.vocab_size}. Distillation compares token ids, so both "
                "must have one tokenizer; only the padding behind it may differ"
            )

    async def teardown(self) -> None:
        """Drop the teacher, too."""
        await super().teardown()
        if self._teacher.spec is not None:
            await self.train_service.drop(self._teacher.spec.policy)

    def state_dict(self) -> dict[str, Any]:
        """Counters, the moving baseline, the adaptive entropy coefficient."""
        state = {
            **super().state_dict(),
            "entropy_coefficient": self._entropy.coefficient,
            "moving_baseline": self._moving_baseline,
        }
        if self._critic is not None:
            state["critic"] = {"num_batches": self._critic.num_batches}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; what the configuration fixes now is not restored."""
        super().load_state_dict(state)
        if self._entropy.adaptive and "entropy_coefficient" in state:
            self._entropy.coefficient = float(state["entropy_coefficient"])
        self._moving_baseline = state.get("moving_baseline")
        if self._critic is not None and "critic" in state:
            self._critic.num_batches = int(state["critic"]["num_batches"])

    @property
    def num_scheduled_steps(self) -> int:
        """The batches of the critic's warm-up make no step of the policy."""
        if self._critic is None:
            return super().num_scheduled_steps
        warmup = self.config.algorithm.critic.warmup_batches
        return super().num_scheduled_steps - warmup * self.config.num_optimizer_steps

    # --- one batch --------------------------------------------------------------------------------

    async def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """One batch; metrics by the names and units of `algorithms.metrics.METRIC_UNITS`."""
        scored = [t for t in trajectories if t.reward is not None or not self._needs_reward]
        if not scored:
            return {"reward/abstained": float(len(trajectories))}
        table = flatten(scored)
        self._refuse_untrainable(table, scored)
        columns = await self._frozen_columns(table, scored)
        inputs = advantage_inputs(scored, table, columns, needs=self._estimator.needs)
        lengths = table.trained_lengths(len(scored))
        truncated = np.array([t.status is TrajectoryStatus.TRUNCATED for t in scored], np.bool_)
        shaped = self._shaped(inputs, lengths)
        found = self._estimator.estimate(shaped, moving_baseline=self._moving_baseline)
        self._moving_baseline = moved_baseline(self._moving_baseline, shaped)
        columns["advantage"] = table.place(found.spread(lengths))
        if found.returns is not None:
            columns["returns"] = table.place(found.returns)
        kept = trained_after_masking(
            truncated, mask_truncated=self.config.algorithm.shaping.mask_truncated
        )
        metrics = {
            **judgement_metrics(scored, inputs, shaped, found, kept),
            **length_metrics(lengths[kept], truncated[kept]),
            "reward/abstained": float(len(trajectories) - len(scored)),
        }
        chosen = kept[table.trajectories]
        trained, tokens = table.select(chosen), table.spread(chosen)
        if trained.num_rows:
            columns = {name: column[tokens] for name, column in columns.items()}
            metrics.update(await self._train_table(trained, scored, columns))
        self._advice.about(metrics)
        return metrics

    async def _train_table(
        self, table: RowTable, trajectories: Sequence[Trajectory], columns: dict[str, Array]
    ) -> dict[str, float]:
        """The policy's steps and, beside them, the critic's on the same rows."""
        plans = self.plan_steps(table, trajectories)
        columns["weight"] = self.weight_column(table, plans)
        sums = MetricSums()
        if self._recomputed(table).all():
            everywhere, proximal = table.mask, columns["proximal_logprobs"]
            _add_engine_metrics(sums, table, proximal, everywhere, version=self.version)
        if self.config.algorithm.correction.action != "none":
            columns["correction"] = self._correction(table, columns, sums)
        calls: list[Coroutine[Any, Any, dict[str, float]]] = []
        if self._critic is None or not self._critic.warming_up:
            calls.append(self._train_policy(table, plans, columns, sums))
        if self._critic is not None:
            calls.append(self._critic.train(self, table, plans, columns))
        metrics = {name: value for found in await in_flight(calls) for name, value in found.items()}
        return {**metrics, **sums.result()}

    async def _train_policy(
        self,
        table: RowTable,
        plans: Sequence[StepPlan],
        columns: Mapping[str, Array],
        sums: MetricSums,
    ) -> dict[str, float]:
        steps = PolicySteps(self, self._loss, self._entropy, table, columns, sums)
        outcome = await steps.run(plans)
        metrics = steps.metrics(outcome)
        if not self._recomputed(table).all():
            first = np.zeros(table.num_tokens, np.bool_)
            first[plans[0].positions] = True
            logprobs = outcome.columns["logprobs"]
            _add_engine_metrics(sums, table, logprobs, first, version=self.version)
        if self._entropy.adaptive:
            metrics["entropy/coefficient"] = self._entropy.coefficient
            entropy = outcome.columns["entropy"][table.mask]
            self._entropy.update(float(entropy.mean(dtype=np.float64)))
        return metrics

    # --- what is known before the first step ------------------------------------------------------

    async def _frozen_columns(
        self, table: RowTable, trajectories: Sequence[Trajectory]
    ) -> dict[str, Array]:
        """[N] proximal, behavior, reference and teacher logprobs, values, and the KL penalty as a
        reward: what stays as it is for the whole batch. All forward passes are under way at once."""
        algorithm, every = self.config.algorithm, np.arange(table.num_rows)
        again = self._recomputed(table)
        calls: dict[str, Coroutine[Any, Any, dict[str, Array]]] = {
            "policy": self.forward_outputs(self.policy, table, np.flatnonzero(again), ("logprobs",))
        }
        if algorithm.kl.coefficient:
            calls["reference"] = self.forward_outputs(REFERENCE, table, every, ("logprobs",))
        if self._critic is not None:
            calls["critic"] = self.forward_outputs(CRITIC, table, every, ("values",))
        if self._teacher.spec is not None:
            calls["teacher"] = self.forward_outputs(TEACHER, table, every, self._teacher.outputs)
        found = dict(zip(calls, await in_flight(list(calls.values())), strict=True))
        fresh = found["policy"]["logprobs"]
        columns: dict[str, Array] = {
            "proximal_logprobs": np.where(table.spread(again), fresh, table.behavior_logprobs),
            # What drew a row without engine logprobs is the policy itself: the mode is `sync`.
            "behavior_logprobs": np.where(
                table.spread(table.known), table.behavior_logprobs, fresh
            ),
        }
        if "reference" in found:
            columns["reference_logprobs"] = found["reference"]["logprobs"]
        if "critic" in found:
            columns["values"] = found["critic"]["values"]
        if "teacher" in found:
            columns.update(self._teacher.columns(found["teacher"]))
        elif self._teacher.wanted:
            columns[TEACHER_LOGPROBS] = row_column(table, trajectories, TEACHER_LOGPROBS)
        if algorithm.kl.coefficient and algorithm.kl.placement == "reward":
            divergence = KL_ESTIMATORS[algorithm.kl.estimator](
                columns["proximal_logprobs"].astype(np.float64),
                columns["reference_logprobs"].astype(np.float64),
            )
            columns["token_rewards"] = -algorithm.kl.coefficient * divergence
        return columns

    def _recomputed(self, table: RowTable) -> BoolArray:
        """[R] rows whose proximal logprobs are recomputed instead of taken from the engine."""
        algorithm = self.config.algorithm
        if algorithm.recompute_proximal or algorithm.correction.action != "none":
            return np.ones(table.num_rows, np.bool_)
        return ~table.known

    def _shaped(self, inputs: AdvantageInputs, lengths: IndexArray) -> AdvantageInputs:
        """Rewards after shaping; what it changed is a reward part of its own beside the others."""
        shaping = self.config.algorithm.shaping
        rewards = shape_rewards(
            inputs.rewards,
            lengths,
            max_response_tokens=self._context.max_response_tokens,
            overlong_cache=shaping.overlong_cache,
            overlong_penalty=shaping.overlong_penalty,
            length_penalty=shaping.length_penalty,
        )
        parts = inputs.reward_parts
        if parts and not np.array_equal(rewards, inputs.rewards):
            parts = {**parts, SHAPING_PART: rewards - inputs.rewards}
        return replace(inputs, rewards=rewards, reward_parts=parts)

    def _correction(
        self, table: RowTable, columns: Mapping[str, Array], sums: MetricSums
    ) -> FloatArray:
        """[N] off-policy weights of the policy term; correction/* goes into `sums`."""
        settings = self.config.algorithm.correction
        at = np.flatnonzero(table.mask)
        weights, masked = correction_weights(
            columns["proximal_logprobs"][at],
            columns["behavior_logprobs"][at],
            table.owners(at),
            level=settings.level,
            action=settings.action,
            low=settings.low,
            high=settings.high,
        )
        add_correction(sums, weights, masked)
        return table.place(weights)

    def _refuse_untrainable(self, table: RowTable, trajectories: Sequence[Trajectory]) -> None:
        for t in trajectories:
            if any(row.logprob_kind == "truncated" for row in t.rows):
                raise InvariantError(
                    f"{describe(t)} was drawn with top_p < 1 or top_k: its logprobs are of another "
                    "distribution than the one trained (accepted: "
                    "rollout_worker.sampling.top_p: 1 and top_k: null)"
                )
        if not self._context.on_policy_only and not table.known.all():
            owner = trajectories[int(table.trajectories[np.argmin(table.known)])]
            raise InvariantError(
                f"{describe(owner)} has no usable engine logprobs, which only weight.mode: sync can "
                "do without"
            )


def _add_engine_metrics(
    sums: MetricSums,
    table: RowTable,
    at_start: Array,
    compared: BoolArray,
    *,
    version: int,
) -> None:
    """mismatch/*: `at_start` [N] logprobs under the weights that the batch began with, known where
    `compared` [N]. Only there do trainer and engine speak of one policy."""
    known = table.spread(table.known)
    sums.add_mean("mismatch/unknown_share", ~known[table.mask])
    at = np.flatnonzero(compared & known & table.mask)
    trained, behavior = at_start[at].astype(np.float64), table.behavior_logprobs[at]
    stale = (table.oldest_versions >= 0) & (table.oldest_versions < version)
    add_mismatch(sums, trained, behavior, table.spread(stale)[at])
    counts = np.cumsum(table.mask)
    before = table.spread(counts[table.starts] - table.mask[table.starts])
    positions, distances = (counts - 1 - before)[at], np.abs(trained - behavior)
    lower = 0
    for upper in (*POSITION_BOUNDS, None):
        inside = (positions >= lower) & (positions < (upper or np.inf))
        name = f"from_{lower}" if upper is None else f"to_{upper}"
        sums.add_mean(f"mismatch/abs_mean_{name}", distances[inside])
        lower = upper or lower
