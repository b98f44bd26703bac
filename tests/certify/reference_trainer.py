"""A whole batch once more: trajectories to the weights after it, in plain loops over float64.

The model is a bigram table: logprob of a token = log softmax(table[token before] / temperature).
What a trainer composes (shaping, KL in the reward, advantages, denominators, correction, loss, its
regularisers, the critic) is composed here from the references of the parts, one optimizer step after
another. Nothing comes from `nexrl` but the records of trajectories and of advantage inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nexrl.algorithms.advantage_definition import AdvantageInputs, AdvantageSettings
from nexrl.types import Trajectory, TrajectoryStatus
from tests.certify.hand_defaults import ADVANTAGE_DEFAULTS, LOSS_DEFAULTS
from tests.certify.loss_cases import Array
from tests.certify.reference_advantages import REFERENCES
from tests.certify.reference_compositions import Composition
from tests.certify.reference_divergences import correction, kl, token_weight
from tests.certify.reference_losses import graded, prepared_reference
from tests.certify.reference_rules import shaped
from tests.certify.trained_batches import LONGEST, log_softmax

NOT_JUDGED_BY_REWARD = ("distill",)
NO_VERSION = 1 << 30
"""Of a row that does not say: it counts as fresh."""


@dataclass(slots=True, kw_only=True)
class Token:
    """One trained token."""

    owner: int
    """Its trajectory among those that are judged."""
    row: int
    """Its row, counted over the batch."""
    before: int
    """Id of the token before it."""
    id: int
    """Its id."""
    temperature: float
    """Of its row."""
    behavior: float
    """Logprob as the engine reported it."""
    known: bool
    """Whether the engine reported one; where it did not, it is the policy's own."""
    teacher: float
    """The teacher's, in the row's column."""
    version: int
    """Of the weights that drew its row."""
    place: int
    """Position among the trained tokens of its row."""
    proximal: float = 0.0
    """Logprob that ratios start from."""
    reference: float = 0.0
    """Logprob under the frozen reference."""
    advantage: float = 0.0
    """What it is told."""
    target: float = 0.0
    """Return that the critic learns."""
    old_value: float = 0.0
    """The critic's value before the batch."""
    weight: float = 0.0
    """1 / denominator of its optimizer step."""
    correction: float = 1.0
    """Off-policy weight of its policy term."""
    masked: bool = False
    """Whether the correction zeroes it."""


@dataclass(slots=True, kw_only=True)
class StepSeen:
    """One optimizer step as it was made."""

    tokens: list[Token]
    """Those trained."""
    outputs: dict[str, Array]
    """By name, at the weights that the step started from."""
    inputs: dict[str, Any]
    """By name."""
    settings: dict[str, Any]
    """Complete, with what the step found beforehand."""
    loss: float
    """What was minimised."""
    norm: float
    """Of the policy's gradient."""
    values: Array
    """[n] of the critic; empty without one."""
    critic_loss: float = 0.0
    """What the critic minimised."""
    critic_norm: float = 0.0
    """Of its gradient."""


@dataclass(slots=True, kw_only=True)
class Trained:
    """What a batch leaves."""

    tables: dict[str, Array]
    """By policy, after it."""
    start: dict[str, Array]
    """The same before it."""
    tokens: list[Token] = field(default_factory=list)
    """All that were trained."""
    steps: list[StepSeen] = field(default_factory=list)
    """In order."""
    judged: list[Trajectory] = field(default_factory=list)
    """Trajectories that took part."""
    given: list[float] = field(default_factory=list)
    """Their rewards."""
    shaped: list[float] = field(default_factory=list)
    """The same after shaping."""
    kept: list[bool] = field(default_factory=list)
    """Which of them are in the loss."""
    lengths: list[int] = field(default_factory=list)
    """Their trained tokens."""
    advantages: list[float] = field(default_factory=list)
    """Of those kept: of trajectories, or of tokens where tokens are judged."""


def train(
    plan: Composition,
    batch: Sequence[Trajectory],
    tables: dict[str, Array],
    *,
    num_steps: int = 1,
    lr: float,
    critic_lr: float,
    policy_waits: bool = False,
) -> Trained:
    """The batch after `plan`; `tables` of actor, reference, critic and teacher as it begins.

    `policy_waits`: the critic alone is trained.
    """
    asks_reward = plan.advantage not in NOT_JUDGED_BY_REWARD and plan.loss != "reverse_kl_top_k"
    judged = [t for t in batch if t.reward is not None or not asks_reward]
    done = Trained(
        tables={name: table.copy() for name, table in tables.items()}, start=tables, judged=judged
    )
    tokens = _tokens(judged, tables, recomputed=plan.recomputed or plan.correction is not None)
    done.lengths = [sum(token.owner == i for token in tokens) for i in range(len(judged))]
    _judge(plan, done, tokens, tables)
    done.tokens = [token for token in tokens if done.kept[token.owner]]
    parts = _steps(judged, num_steps)
    for part in parts:
        _weigh([t for t in done.tokens if t.owner in part], plan.aggregation)
    if plan.correction is not None:
        _correct(done.tokens, plan.correction)
    for part in parts:
        own = [t for t in done.tokens if t.owner in part]
        if own:
            done.steps.append(_step(plan, own, done.tables, (lr, critic_lr), policy_waits))
    return done


# --- what is known before the first step ------------------------------------------------------------


def _tokens(
    judged: Sequence[Trajectory], tables: dict[str, Array], *, recomputed: bool
) -> list[Token]:
    found, number = [], 0
    for owner, trajectory in enumerate(judged):
        for row in trajectory.rows:
            for t in range(1, len(row.token_ids)):
                if not row.loss_mask[t]:
                    continue
                before, own = int(row.token_ids[t - 1]), int(row.token_ids[t])
                heat = row.temperature
                now = float(log_softmax(tables["actor"][before], heat)[own])
                known = row.behavior_logprobs is not None
                behavior = now if row.behavior_logprobs is None else float(row.behavior_logprobs[t])
                found.append(
                    Token(
                        owner=owner,
                        row=number,
                        before=before,
                        id=own,
                        temperature=heat,
                        behavior=behavior,
                        known=known,
                        version=row.versions[0].version.number if row.versions else NO_VERSION,
                        place=int(row.loss_mask[1:t].sum()),
                        teacher=float(row.columns["teacher_logprobs"].values[t]),
                        proximal=now if recomputed else behavior,
                        reference=float(log_softmax(tables["reference"][before], heat)[own]),
                        old_value=float(tables["critic"][before]) if "critic" in tables else 0.0,
                    )
                )
            number += 1
    return found


def _judge(plan: Composition, done: Trained, tokens: list[Token], tables: dict[str, Array]) -> None:
    """Rewards, shaping, advantages, and who stays in the loss."""
    rules = {"overlong_cache": None, "overlong_penalty": 1.0, "length_penalty": 0.0, **plan.shaping}
    done.given = [float(t.reward or 0.0) for t in done.judged]
    done.shaped = [
        shaped(
            reward,
            length,
            longest=LONGEST,
            cache=rules["overlong_cache"],
            overlong_penalty=rules["overlong_penalty"],
            length_penalty=rules["length_penalty"],
        )
        for reward, length in zip(done.given, done.lengths, strict=True)
    ]
    cut = [t.status is TrajectoryStatus.TRUNCATED for t in done.judged]
    done.kept = [not (rules.get("mask_truncated") and out) for out in cut]
    settings = AdvantageSettings(**{**ADVANTAGE_DEFAULTS, **plan.judged})
    found = REFERENCES[plan.advantage](_advantage_inputs(plan, done, tokens), settings)
    for place, token in enumerate(tokens):
        token.advantage = (
            found.tokens[place] if found.trajectories is None else found.trajectories[token.owner]
        )
        if found.returns is not None:
            token.target = found.returns[place]
    if found.trajectories is None:
        done.advantages = [t.advantage for t in tokens if done.kept[t.owner]]
    else:
        done.advantages = [
            a for a, stays in zip(found.trajectories, done.kept, strict=True) if stays
        ]


def _advantage_inputs(plan: Composition, done: Trained, tokens: list[Token]) -> AdvantageInputs:
    keys = list(dict.fromkeys(t.group_id for t in done.judged))
    penalties = None
    if plan.kl is not None and plan.kl[2] == "reward":
        coefficient, estimator, _ = plan.kl
        penalties = np.array(
            [-coefficient * kl(estimator, t.proximal, t.reference)[0] for t in tokens]
        )
    turns: dict[str, list[Any]] = {"rewards": [], "lengths": [], "anchors": []}
    counts, anchors = [], dict[tuple[str, str], int]()
    for trajectory in done.judged:
        own = [turn for row in trajectory.rows for turn in row.turns]
        counts.append(len(own))
        for turn in own:
            key = (trajectory.group_id, turn.anchor)
            turns["rewards"].append(turn.reward or 0.0)
            turns["lengths"].append(turn.end - turn.start)
            turns["anchors"].append(anchors.setdefault(key, len(anchors)) if turn.anchor else -1)
    parts = {
        name: np.array([t.reward_parts[name] for t in done.judged]) for name in ("answer", "format")
    }
    if done.shaped != done.given:
        parts["shaping"] = np.array(done.shaped) - np.array(done.given)
    return AdvantageInputs(
        rewards=np.array(done.shaped),
        groups=np.array([keys.index(t.group_id) for t in done.judged]),
        lengths=np.array(done.lengths),
        token_rewards=penalties,
        values=np.array([t.old_value for t in tokens]),
        turn_rewards=np.array(turns["rewards"]),
        turn_lengths=np.array(turns["lengths"]),
        turn_counts=np.array(counts),
        turn_anchors=np.array(turns["anchors"]),
        reward_parts=parts,
        greedy_rewards=np.array([float(t.extra["greedy_reward"]) for t in done.judged]),
        behavior_logprobs=np.array([t.behavior for t in tokens]),
        teacher_logprobs=np.array([t.teacher for t in tokens]),
    )


def _steps(judged: Sequence[Trajectory], num_steps: int) -> list[set[int]]:
    """Trajectories of each optimizer step: whole items, in order, as many a step as can be."""
    items = list(dict.fromkeys(t.item_id for t in judged))
    return [
        {
            i
            for i, t in enumerate(judged)
            if items.index(t.item_id) * num_steps // len(items) == step
        }
        for step in range(num_steps)
    ]


def _weigh(tokens: list[Token], method: str) -> None:
    rows = list(dict.fromkeys(token.row for token in tokens))
    counts = [sum(token.row == row for token in tokens) for row in rows]
    owner_of = {token.row: token.owner for token in tokens}
    owners = [owner_of[row] for row in rows]
    for token in tokens:
        token.weight = token_weight(method, rows.index(token.row), counts, owners, LONGEST)


def _correct(tokens: list[Token], rule: tuple[str, str, float | None, float | None]) -> None:
    level, action, low, high = rule
    logs = [token.proximal - token.behavior for token in tokens]
    weights, masked = correction(
        logs,
        [token.row for token in tokens],
        level,
        action,
        0.0 if low is None else low,
        math.inf if high is None else high,
    )
    for token, weight, out in zip(tokens, weights, masked, strict=True):
        token.correction, token.masked = weight, out


# --- one optimizer step -----------------------------------------------------------------------------


def _step(
    plan: Composition,
    tokens: list[Token],
    tables: dict[str, Array],
    rates: tuple[float, float],
    policy_waits: bool,
) -> StepSeen:
    """`rates`: learning rates of the policy and of the critic."""
    outputs, inputs = _columns(plan, tokens, tables)
    settings = {**LOSS_DEFAULTS[plan.loss], **plan.settings, "entropy_coefficient": plan.entropy}
    if plan.kl is not None and plan.kl[2] == "loss":
        settings |= {"kl_coefficient": plan.kl[0], "kl_estimator": plan.kl[1]}
    for key, value in prepared_reference(plan.loss, outputs, inputs, settings).items():
        if key == "selected":
            inputs[key] = np.array(value, np.float64)
        else:
            settings[key] = value
    found = graded(plan.loss, outputs, inputs, settings)
    gradient = _by_table(tokens, found.gradients, tables["actor"], inputs)
    seen = StepSeen(
        tokens=tokens,
        outputs=outputs,
        inputs=inputs,
        settings=settings,
        loss=found.loss,
        norm=float(np.sqrt((gradient**2).sum())),
        values=np.zeros(0),
    )
    if not policy_waits:
        tables["actor"] -= rates[0] * gradient
    if plan.critic_clip is not None:
        _critic_step(plan.critic_clip, tokens, tables, rates[1], seen)
    return seen


def _columns(
    plan: Composition, tokens: list[Token], tables: dict[str, Array]
) -> tuple[dict[str, Array], dict[str, Any]]:
    logs = [log_softmax(tables["actor"][t.before], t.temperature) for t in tokens]
    pairs = list(zip(tokens, logs, strict=True))
    outputs: dict[str, Array] = {"logprobs": np.array([log[t.id] for t, log in pairs])}
    outputs["entropy"] = np.array([-(np.exp(log) * log).sum() for log in logs])
    inputs: dict[str, Any] = {
        "weight": np.array([t.weight for t in tokens]),
        "advantage": np.array([t.advantage for t in tokens]),
        "proximal_logprobs": np.array([t.proximal for t in tokens]),
        "behavior_logprobs": np.array([t.behavior for t in tokens]),
        "reference_logprobs": np.array([t.reference for t in tokens]),
        "correction": np.array([t.correction for t in tokens]),
        "row": np.array([t.row for t in tokens]),
        "selected": np.zeros(len(tokens)),
    }
    if plan.top_k:
        teachers = [log_softmax(tables["teacher"][t.before], t.temperature) for t in tokens]
        ids = [np.argsort(-x)[: plan.top_k] for x in teachers]
        inputs["candidate_ids"] = np.array(ids)
        inputs["teacher_candidate_logprobs"] = np.array(
            [x[i] for x, i in zip(teachers, ids, strict=True)]
        )
        outputs["candidate_logprobs"] = np.array([log[i] for log, i in zip(logs, ids, strict=True)])
    return outputs, inputs


def _by_table(
    tokens: list[Token], gradients: dict[str, Array], table: Array, inputs: dict[str, Any]
) -> Array:
    """[V, V] by the logits: d logprob_y = onehot(y) - p, d H = -p (log p + H), over temperature."""
    total = np.zeros_like(table)
    for place, token in enumerate(tokens):
        logs = log_softmax(table[token.before], token.temperature)
        chances = np.exp(logs)
        by_logits = -gradients["logprobs"][place] * chances
        by_logits[token.id] += gradients["logprobs"][place]
        value = -(chances * logs).sum()
        by_logits += gradients["entropy"][place] * -chances * (logs + value)
        if "candidate_ids" in inputs:
            slopes = gradients["candidate_logprobs"][place]
            by_logits -= slopes.sum() * chances
            by_logits[inputs["candidate_ids"][place]] += slopes
        total[token.before] += by_logits / token.temperature
    return total


def _critic_step(
    clip: float, tokens: list[Token], tables: dict[str, Array], lr: float, seen: StepSeen
) -> None:
    table = tables["critic"]
    seen.values = np.array([table[t.before] for t in tokens])
    inputs = {
        "weight": seen.inputs["weight"],
        "returns": np.array([t.target for t in tokens]),
        "old_values": np.array([t.old_value for t in tokens]),
    }
    found = graded("value", {"values": seen.values}, inputs, {"clip": clip})
    gradient = np.zeros_like(table)
    for token, slope in zip(tokens, found.gradients["values"], strict=True):
        gradient[token.before] += slope
    seen.critic_loss = found.loss
    seen.critic_norm = float(np.sqrt((gradient**2).sum()))
    tables["critic"] = table - lr * gradient
