"""GrpoTrainer: policy gradient with group-relative advantages, built from `nexrl.algorithms`.

    rewards -> advantages per trajectory -> columns per token -> forward_backward, optim_step
                      |                        ^
                 baseline groups       behavior, proximal and reference logprobs

Consumes a batch's trajectories, calls the train service, returns metrics. Everything per token is
whole-array numpy; metrics are computed here from returned logprobs, so that they are the same for
any split into chunks.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from nexrl.algorithms.advantages import (
    AdvantageInputs,
    Float64Array,
    compute_advantages,
    group_index,
)
from nexrl.algorithms.losses import Setting, loss_definition
from nexrl.algorithms.metrics import (
    MetricSums,
    add_mismatch,
    add_ratio,
    add_reference_kl,
    length_metrics,
    reward_metrics,
)
from nexrl.errors import InvariantError, NexRLError
from nexrl.trainer.batched_trainer import BatchedTrainer, Outcome, step_metrics
from nexrl.trainer.batching import RowTable, flatten
from nexrl.trainer.trainer import TrainerContext
from nexrl.types import FloatArray, LossSpec, ModelSpec, Trajectory, TrajectoryStatus

REFERENCE = "reference"
MANY_CONSTANT_GROUPS = 0.6
"""Share of groups without signal beyond which most rollouts are wasted."""
ADVICE_AFTER_BATCHES = 10
"""Batches in a row before advice is given, so that one unlucky batch does not."""


class GrpoTrainer(BatchedTrainer):
    """Advantage estimator, policy loss, KL and entropy as configured under `trainer.algorithm`.

    Invariant: a trajectory of zero advantage stays in the batch and in its denominator; one
    without a reward is in neither. Rows without engine logprobs are trained only in `sync` mode,
    with the proximal policy in their place.
    """

    needs: ClassVar[tuple[str, ...]] = ("reward",)

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        algorithm = self.config.algorithm
        self._loss = loss_definition(algorithm.loss.name)
        wanted: dict[str, Setting] = {
            "clip_low": algorithm.loss.clip_low,
            "clip_high": algorithm.loss.clip_high,
            "kl_coefficient": algorithm.kl.coefficient,
            "kl_estimator": algorithm.kl.estimator,
            "entropy_coefficient": algorithm.entropy_coefficient,
        }
        self._settings = {k: v for k, v in wanted.items() if k in self._loss.config}
        self._outputs: tuple[str, ...] = ("logprobs",)
        if self._loss.needs_entropy(self._settings):
            self._outputs = ("logprobs", "entropy")
        self._constant_streak = 0
        self._zero_loss_explained = False

    @property
    def frozen_policies(self) -> tuple[str, ...]:
        """The reference, when there is a KL term."""
        return (REFERENCE,) if self.config.algorithm.kl.coefficient else ()

    async def setup(self) -> None:
        """Freeze a copy of the policy as reference, as the stage begins; a resume keeps the old."""
        if not self.frozen_policies:
            return
        if self._restored:
            await self._require_restored_reference()
            return
        await self.train_service.create(
            ModelSpec(policy=REFERENCE, copy_of=self.policy, trainable=False)
        )

    async def _require_restored_reference(self) -> None:
        try:
            await self.train_service.info(REFERENCE)
        except NexRLError as error:
            raise InvariantError(
                "resuming with trainer.algorithm.kl.coefficient > 0 needs the reference policy of "
                f"the checkpoint, and the train service has none: {error}"
            ) from error

    async def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """One batch; metrics by the names and units of `algorithms.metrics.METRIC_UNITS`."""
        scored = [t for t in trajectories if t.reward is not None]
        table = flatten(scored)
        rewards = _advantage_inputs(scored, table)
        algorithm = self.config.algorithm
        advantages = compute_advantages(algorithm.advantage, rewards, std=algorithm.std)
        metrics = {
            **reward_metrics(rewards, advantages),
            "reward/abstained": float(len(trajectories) - len(scored)),
        }
        if rewards.lengths is not None:
            truncated = np.array([t.status is TrajectoryStatus.TRUNCATED for t in scored])
            metrics.update(length_metrics(rewards.lengths, truncated))
        if table.num_rows:
            metrics.update(await self._train_table(table, scored, advantages))
        self._advise(metrics)
        return metrics

    async def _train_table(
        self, table: RowTable, trajectories: list[Trajectory], advantages: Float64Array
    ) -> dict[str, float]:
        self._refuse_untrainable(table, trajectories)
        plans = self.plan_steps(table, trajectories)
        advantage = table.spread(advantages[table.trajectories]) * table.mask
        columns: dict[str, FloatArray] = {
            "weight": self.weight_column(table, plans),
            "advantage": advantage.astype(np.float32),
        }
        columns.update(await self._frozen_columns(table))
        known = set(self._loss.required) | set(self._loss.optional)
        outcome = await self.run_steps(
            table,
            plans,
            {name: column for name, column in columns.items() if name in known},
            LossSpec(name=self._loss.name, config=self._settings),
            outputs=self._outputs,
        )
        return {
            **step_metrics(outcome),
            **self._loss_metrics(outcome, columns),
            **self._token_metrics(table, outcome, columns),
        }

    def _refuse_untrainable(self, table: RowTable, trajectories: list[Trajectory]) -> None:
        for t in trajectories:
            if any(row.logprob_kind == "truncated" for row in t.rows):
                raise InvariantError(
                    f"trajectory {t.trajectory_id!r} was drawn with top_p < 1 or top_k: its "
                    "logprobs are of another distribution than the one trained (accepted: "
                    "rollout_worker.sampling.top_p: 1 and top_k: null)"
                )
        if not self._context.on_policy_only and not table.known.all():
            owner = trajectories[int(table.trajectories[np.argmin(table.known)])]
            raise InvariantError(
                f"trajectory {owner.trajectory_id!r} has no usable engine logprobs, which only "
                "weight.mode: sync can do without"
            )

    async def _frozen_columns(self, table: RowTable) -> dict[str, FloatArray]:
        """Proximal and reference logprobs, fixed before the first optimizer step."""
        every = np.arange(table.num_rows)
        recompute = every if self.config.algorithm.recompute_proximal else every[~table.known]
        proximal = table.behavior_logprobs
        if len(recompute):
            again = np.zeros(table.num_rows, np.bool_)
            again[recompute] = True
            recomputed = await self.forward_column(self.policy, table, recompute)
            proximal = np.where(table.spread(again), recomputed, proximal)
        columns = {"proximal_logprobs": proximal}
        if self.frozen_policies:
            columns["reference_logprobs"] = await self.forward_column(REFERENCE, table, every)
        return columns

    def _loss_metrics(self, outcome: Outcome, columns: dict[str, FloatArray]) -> dict[str, float]:
        """loss/policy, loss/kl and loss/entropy apart from the total (FR-040)."""
        sums: dict[str, list[float]] = {}
        for step in outcome.applied:
            at = step.plan.positions
            parts = self._loss.parts(
                outcome.columns["logprobs"][at].astype(np.float64),
                {name: column[at].astype(np.float64) for name, column in columns.items()},
                self._settings,
                outcome.columns["entropy"][at] if "entropy" in outcome.columns else None,
            )
            for name, part in parts.items():
                sums.setdefault(name, []).append(float(np.dot(part, columns["weight"][at])))
        return {f"loss/{name}": float(np.mean(values)) for name, values in sums.items()}

    def _token_metrics(
        self, table: RowTable, outcome: Outcome, columns: dict[str, FloatArray]
    ) -> dict[str, float]:
        """ratio/*, kl/*, entropy and mismatch/* over trained tokens."""
        sums, mask = MetricSums(), table.mask
        algorithm = self.config.algorithm
        logprobs = outcome.columns["logprobs"].astype(np.float64)
        add_ratio(
            sums,
            logprobs[mask],
            columns["proximal_logprobs"][mask],
            columns["advantage"][mask],
            clip_low=algorithm.loss.clip_low,
            clip_high=algorithm.loss.clip_high,
        )
        if self.frozen_policies:
            reference = columns["reference_logprobs"][mask]
            add_reference_kl(sums, logprobs[mask], reference, algorithm.kl.estimator)
        if "entropy" in outcome.columns:
            sums.add_mean("entropy", outcome.columns["entropy"][mask])
        known = table.spread(table.known)
        sums.add_mean("mismatch/unknown_share", ~known[mask])
        # Only at the weights the batch began with do trainer and engine speak of one policy.
        compared, at_start = mask & known, columns["proximal_logprobs"].astype(np.float64)
        if not algorithm.recompute_proximal:
            first = np.zeros(table.num_tokens, np.bool_)
            first[outcome.steps[0].plan.positions] = True
            compared, at_start = compared & first, logprobs
        stale = (table.oldest_versions >= 0) & (table.oldest_versions < self.version)
        add_mismatch(
            sums,
            at_start[compared],
            table.behavior_logprobs[compared],
            table.spread(stale)[compared],
        )
        return sums.result()

    def _advise(self, metrics: dict[str, float]) -> None:
        """Lines for people about what is often taken for a fault (FR-055, FR-056)."""
        share = metrics.get("group/constant_share", 0.0)
        self._constant_streak = self._constant_streak + 1 if share > MANY_CONSTANT_GROUPS else 0
        if self._constant_streak >= ADVICE_AFTER_BATCHES:
            self.tracker.warn(
                f"group/constant_share has been above {MANY_CONSTANT_GROUPS:.0%} for "
                f"{self._constant_streak} batches: most groups carry no signal. Raise "
                "data.rollout_repeat_n, choose other data, or filter with "
                "trajectory_pool.dynamic_sampling"
            )
            self._constant_streak = 0
        loss, norm = metrics.get("loss/policy", 1.0), metrics.get("grad_norm", 0.0)
        if abs(loss) < 1e-6 < norm and not self._zero_loss_explained:
            self._zero_loss_explained = True
            self.tracker.warn(
                f"loss/policy is 0 while grad_norm is {norm:.3g}: expected. On policy the ratio is "
                "1 and advantages sum to 0 within a group; only the gradient carries the signal"
            )


def _advantage_inputs(trajectories: list[Trajectory], table: RowTable) -> AdvantageInputs:
    """Rewards, baseline groups and lengths; every trajectory counts once however many rows."""
    for t in trajectories:
        if not t.group_id:
            raise InvariantError(
                f"trajectory {t.trajectory_id!r} (item {t.item_id!r}) has no group_id, so it "
                "cannot be compared with others"
            )
    return AdvantageInputs(
        rewards=np.array([t.reward for t in trajectories], np.float64),
        groups=group_index(t.group_id for t in trajectories),
        lengths=np.bincount(table.trajectories, table.num_trained, len(trajectories)).astype(
            np.int64
        ),
    )
