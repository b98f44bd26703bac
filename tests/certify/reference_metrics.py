"""Metrics of a batch once more, from what the reference of the whole batch saw: plain numbers.

Each by the unit that `METRIC_UNITS` states. A clip counts where the reference's own gradient says so:
a token with an advantage and no slope, on the side to which its ratio left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from nexrl.types import Trajectory, TrajectoryStatus
from tests.certify.reference_compositions import Composition, Offline
from tests.certify.reference_divergences import kl
from tests.certify.reference_losses import graded
from tests.certify.reference_offline import Entry, Read, facts_of
from tests.certify.reference_policy import value
from tests.certify.reference_rules import without_signal
from tests.certify.reference_trainer import StepSeen, Token, Trained

Found = dict[str, float]

MEAN_RATIO = ("gspo", "gspo_token", "luspo")
"""Losses that clip a row's mean ratio."""
PRODUCT_RATIO = ("vespo", "topr", "kimi")
"""Losses that weigh by a row's whole ratio."""
POSITIONS = {"to_64": (0, 64), "to_512": (64, 512), "to_4096": (512, 4096)}


def mean(numbers: Sequence[float]) -> float:
    """Of at least one number."""
    return math.fsum(numbers) / len(numbers)


def deviation(numbers: Sequence[float]) -> float:
    """Population standard deviation."""
    centre = mean(numbers)
    return math.sqrt(mean([(x - centre) ** 2 for x in numbers]))


# --- sampled batches ------------------------------------------------------------------------------


def sampled_metrics(
    plan: Composition,
    done: Trained,
    batch: Sequence[Trajectory],
    *,
    version: int,
    policy_waits: bool,
    lr: float,
) -> Found:
    """Everything that a batch logs."""
    found = {"reward/abstained": float(len(batch) - len(done.judged))}
    found["train/trajectories"] = float(len(batch))
    found |= _lengths(done)
    found |= _judgement(done)
    found |= _engine(plan, done, version=version, policy_waits=policy_waits)
    if plan.correction is not None:
        found |= _correction(done.tokens)
    if not policy_waits:
        found |= _steps(plan, done, lr)
        found |= _policy(plan, done)
    if plan.critic_clip is not None:
        found |= _critic(plan.critic_clip, done)
    return found


def _lengths(done: Trained) -> Found:
    kept = [i for i, stays in enumerate(done.kept) if stays]
    lengths = [float(done.lengths[i]) for i in kept]
    cut = [done.judged[i].status is TrajectoryStatus.TRUNCATED for i in kept]
    return {
        "response_length/mean": mean(lengths),
        "response_length/min": min(lengths),
        "response_length/max": max(lengths),
        "response_length/truncated_share": mean([float(x) for x in cut]),
    }


def _judgement(done: Trained) -> Found:
    found = {
        "advantage/mean": mean(done.advantages),
        "advantage/std": deviation(done.advantages),
        "advantage/max_abs": max(abs(a) for a in done.advantages),
        "advantage/positive_share": mean([float(a > 0) for a in done.advantages]),
    }
    if any(t.reward is None for t in done.judged):
        return found
    kept = [i for i, stays in enumerate(done.kept) if stays]
    rewards = [done.given[i] for i in kept]
    groups = _by_group(done, kept, done.given)
    found |= {
        "reward/trained_mean": mean(rewards),
        "reward/trained_std": deviation(rewards),
        "reward/trained_min": min(rewards),
        "reward/trained_max": max(rewards),
        "reward/group_std": mean([deviation(g) for g in groups]),
    }
    if len(kept) < len(done.kept) or done.shaped != done.given:
        groups = _by_group(done, list(range(len(done.kept))), done.shaped)
        found["reward/shaped_mean"] = mean([done.shaped[i] for i in kept])
        found["reward/masked"] = float(len(done.kept) - len(kept))
    found["group/constant_share"] = mean([float(without_signal(g)) for g in groups])
    found["group/size_mean"] = mean([float(len(g)) for g in groups])
    return found


def _by_group(done: Trained, members: list[int], rewards: list[float]) -> list[list[float]]:
    groups: dict[str, list[float]] = {}
    for i in members:
        groups.setdefault(done.judged[i].group_id, []).append(rewards[i])
    return list(groups.values())


def _engine(plan: Composition, done: Trained, *, version: int, policy_waits: bool) -> Found:
    """Only under the weights that the batch began with do trainer and engine speak of one policy:
    all tokens where the trainer asked it beforehand, else those of the first step."""
    compared = [(token, token.proximal) for token in done.tokens]
    if plan.correction is None and not plan.recomputed:
        if policy_waits:
            return {}
        first = done.steps[0]
        compared = list(zip(first.tokens, first.outputs["logprobs"].tolist(), strict=True))
    unknown = [float(not token.known) for token in done.tokens]
    compared = [pair for pair in compared if pair[0].known]
    distances = [abs(now - token.behavior) for token, now in compared]
    found = {
        "mismatch/unknown_share": mean(unknown),
        "mismatch/abs_mean": mean(distances),
        "mismatch/max": max(distances),
        "mismatch/kl": mean([kl("k3", token.behavior, now)[0] for token, now in compared]),
    }
    parts = {"stale_abs_mean": [token.version < version for token, _ in compared]}
    for name, (low, high) in {**POSITIONS, "from_4096": (4096, 1 << 40)}.items():
        parts[f"abs_mean_{name}"] = [low <= token.place < high for token, _ in compared]
    for name, inside in parts.items():
        if any(inside):
            own = [d for d, is_in in zip(distances, inside, strict=True) if is_in]
            found[f"mismatch/{name}"] = mean(own)
    return found


def _correction(tokens: Sequence[Token]) -> Found:
    weights = [token.correction for token in tokens]
    squares = math.fsum(c * c for c in weights)
    return {
        "correction/ess": math.fsum(weights) ** 2 / squares / len(weights),
        "correction/masked_share": mean([float(token.masked) for token in tokens]),
    }


def _steps(plan: Composition, done: Trained, lr: float) -> Found:
    parts = [_parts(plan, step) for step in done.steps]
    found = {f"loss/{name}": mean([part[name] for part in parts]) for name in parts[0]}
    if plan.loss == "bapo":
        for name in ("clip_low", "clip_high"):
            found[f"loss/{name}"] = mean([float(step.settings[name]) for step in done.steps])
    return {
        **found,
        "loss/total": mean([step.loss for step in done.steps]),
        "grad_norm": mean([step.norm for step in done.steps]),
        "lr": lr,
        "optimizer/skipped": 0.0,
        "train/tokens": float(len(done.tokens)),
    }


def _parts(plan: Composition, step: StepSeen) -> Found:
    """policy, kl and entropy of a step, each a weighted sum."""
    alone = {**step.settings, "kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    found = {"policy": graded(plan.loss, step.outputs, step.inputs, alone).loss}
    if plan.kl is not None and plan.kl[2] == "loss":
        with_kl = {**step.settings, "entropy_coefficient": 0.0}
        total = graded(plan.loss, step.outputs, step.inputs, with_kl).loss
        found["kl"] = total - found["policy"]
    if plan.entropy:
        products = step.inputs["weight"] * step.outputs["entropy"]
        found["entropy"] = -plan.entropy * math.fsum(products.tolist())
    return found


def _policy(plan: Composition, done: Trained) -> Found:
    tokens = [token for step in done.steps for token in step.tokens]
    logprobs = [x for step in done.steps for x in step.outputs["logprobs"].tolist()]
    pairs = list(zip(tokens, logprobs, strict=True))
    ratios = _ratios(plan.loss, done.steps)
    found = {
        "ratio/mean": mean(ratios),
        "ratio/max": max(ratios),
        "kl/proximal": mean([kl("k3", token.proximal, now)[0] for token, now in pairs]),
    }
    if plan.loss in _SIDES:
        sides = [side for step in done.steps for side in _clipped(plan.loss, step)]
        found["ratio/clip_share_low"] = mean([float(side == "low") for side in sides])
        found["ratio/clip_share_high"] = mean([float(side == "high") for side in sides])
    if plan.kl is not None:
        _, name, placement = plan.kl
        if placement == "reward":
            pairs = [(token, token.proximal) for token in done.tokens]
        found[f"kl/{name}"] = mean([kl(name, now, token.reference)[0] for token, now in pairs])
    if plan.entropy or plan.held_at is not None:
        found["entropy"] = mean([x for s in done.steps for x in s.outputs["entropy"].tolist()])
    if plan.held_at is not None:
        found["entropy/coefficient"] = plan.entropy
    return found


def _ratios(loss: str, steps: Sequence[StepSeen]) -> list[float]:
    """By the loss's own rule, at the weights that each step started from."""
    found = []
    for step in steps:
        logs = (step.outputs["logprobs"] - step.inputs["proximal_logprobs"]).tolist()
        for place, row in enumerate(step.inputs["row"].tolist()):
            own = [
                x
                for x, other in zip(logs, step.inputs["row"].tolist(), strict=True)
                if other == row
            ]
            log = logs[place]
            if loss in MEAN_RATIO:
                log = mean(own)
            elif loss in PRODUCT_RATIO:
                log = math.fsum(own)
            found.append(math.exp(log))
    return found


def _removed(loss: str, step: StepSeen) -> Iterator[str]:
    """Tokens whose term has no slope although they have an advantage, by the side of their ratio."""
    for place, ratio in enumerate(_ratios(loss, [step])):
        only = {key: np.asarray(array)[[place]] for key, array in step.inputs.items()}
        only |= {"correction": np.ones(1), "weight": np.ones(1)}
        outputs = {key: array[[place]] for key, array in step.outputs.items()}
        if loss in MEAN_RATIO:
            # A row of one token with the row's own ratio.
            outputs["logprobs"] = only["proximal_logprobs"] + math.log(ratio)
        settings = {**step.settings, "kl_coefficient": 0.0, "entropy_coefficient": 0.0}
        slope = graded(loss, outputs, only, settings).gradients["logprobs"][0]
        out = slope == 0.0 and only["advantage"][0] != 0.0 and not only["selected"][0]
        yield ("low" if ratio < 1.0 else "high") if out else ""


def _capped(loss: str, step: StepSeen) -> Iterator[str]:
    """cispo and topr keep a gradient and cap its weight, topr where it unlearns."""
    for ratio, advantage in zip(
        _ratios(loss, [step]), step.inputs["advantage"].tolist(), strict=True
    ):
        above = ratio > 1.0 + step.settings["clip_high"]
        yield "high" if above and (loss == "cispo" or advantage < 0) else ""


def _dppo(loss: str, step: StepSeen) -> Iterator[str]:
    """By the difference of probabilities."""
    now, drawn = step.outputs["logprobs"], step.inputs["behavior_logprobs"]
    for moved, side in zip(
        (np.exp(now) - np.exp(drawn)).tolist(), _removed(loss, step), strict=True
    ):
        yield ("low" if moved < 0 else "high") if side else ""


def _gmpo(loss: str, step: StepSeen) -> Iterator[str]:
    """The token's own log ratio, cut where its advantage would carry it further."""
    logs = (step.outputs["logprobs"] - step.inputs["proximal_logprobs"]).tolist()
    for log, advantage in zip(logs, step.inputs["advantage"].tolist(), strict=True):
        if advantage > 0 and log > step.settings["clip_high"]:
            yield "high"
        elif advantage < 0 and log < -step.settings["clip_low"]:
            yield "low"
        else:
            yield ""


_SIDES: Mapping[str, Callable[[str, StepSeen], Iterator[str]]] = {
    **dict.fromkeys(("ppo", "bapo", "clip_cov", *MEAN_RATIO), _removed),
    "cispo": _capped,
    "topr": _capped,
    "dppo": _dppo,
    "gmpo": _gmpo,
}
"""Losses with a bound, and who is beyond it."""


def _clipped(loss: str, step: StepSeen) -> list[str]:
    return list(_SIDES[loss](loss, step))


def _critic(clip: float, done: Trained) -> Found:
    tokens = [token for step in done.steps for token in step.tokens]
    values = [x for step in done.steps for x in step.values.tolist()]
    targets = [token.target for token in tokens]
    misses = [token.target - token.old_value for token in tokens]
    removed = []
    for token, now in zip(tokens, values, strict=True):
        entry = {"values": now, "returns": token.target, "old_values": token.old_value}
        removed.append(float(value(entry, {"clip": clip})[1] == 0.0 and now != token.target))
    return {
        "values/mean": mean([token.old_value for token in tokens]),
        "values/return_mean": mean(targets),
        "values/explained_variance": 1.0 - deviation(misses) ** 2 / deviation(targets) ** 2,
        "values/clip_share": mean(removed),
        "values/loss": mean([step.critic_loss for step in done.steps]),
        "values/grad_norm": mean([step.critic_norm for step in done.steps]),
    }


# --- batches that are read ------------------------------------------------------------------------


def read_metrics(plan: Offline, done: Read, *, lr: float) -> Found:
    """Everything that a batch logs."""
    lengths = [float(n) for n in done.lengths]
    entries = [entry for step in done.steps for entry in step]
    found = {
        "response_length/mean": mean(lengths),
        "response_length/min": min(lengths),
        "response_length/max": max(lengths),
        "response_length/truncated_share": 0.0,
        "grad_norm": mean(done.norms),
        "lr": lr,
        "optimizer/skipped": 0.0,
        "train/trajectories": float(len(lengths)),
        "train/tokens": float(sum(len(t) for e in entries for t in e.tokens.values())),
    }
    if plan.loss == "cross_entropy":
        tokens = [sum(len(t) for e in step for t in e.tokens.values()) for step in done.steps]
        sums = [math.fsum(entry.graded[0] for entry in step) for step in done.steps]
        found["loss/total"] = mean([s / n for s, n in zip(sums, tokens, strict=True)])
        return {**found, "nll/token": math.fsum(sums) / sum(tokens)}
    losses = [mean([entry.graded[0] for entry in step]) for step in done.steps]
    found["loss/total"] = mean(losses)
    imitated = _imitation(plan, done)
    found[f"loss/{plan.loss}"] = found["loss/total"] - imitated
    if plan.loss == "orpo":
        found["loss/imitation"] = imitated
    prefix = plan.loss if plan.loss == "process_reward_model" else "preference"
    found |= {f"{prefix}/{name}": x for name, x in _preference(plan, entries, done).items()}
    if plan.loss == "kto":
        found["kto/z0"] = mean(facts_of(entries, "z0"))
    return found


def _imitation(plan: Offline, done: Read) -> float:
    """Cross entropy per token of chosen responses: all of them count alike, whatever their length."""
    if plan.loss != "orpo":
        return 0.0
    return mean(
        [
            mean([-e.live["chosen_logprobs"] / e.facts["chosen_lengths"] for e in step])
            for step in done.steps
        ]
    )


def _reward(plan: Offline, entry: Entry, side: str, settings: Mapping[str, float]) -> float:
    if plan.loss.endswith("reward_model"):
        return entry.live[f"{side}scores"]
    total = entry.live[f"{side}logprobs"]
    if plan.loss in ("simpo", "orpo"):
        return total / entry.facts[f"{side}lengths"] * settings.get("beta", 1.0)
    return settings["beta"] * (total - entry.facts[f"reference_{side}logprobs"])


def _preference(plan: Offline, entries: list[Entry], done: Read) -> Found:
    settings = done.settings
    if plan.loss not in ("kto", "process_reward_model"):
        chosen, rejected = (
            [_reward(plan, entry, side, settings) for entry in entries]
            for side in ("chosen_", "rejected_")
        )
        found = {
            "accuracy": mean([float(w > x) for w, x in zip(chosen, rejected, strict=True)]),
            "margin": mean(chosen) - mean(rejected),
        }
        sides = {"chosen": entries, "rejected": entries}
    else:
        fact = "desirable" if plan.loss == "kto" else "labels"
        sides = {
            "chosen": [e for e in entries if e.facts[fact] > 0.5],
            "rejected": [e for e in entries if e.facts[fact] <= 0.5],
        }
        chosen, rejected = (
            [_reward(plan, entry, "", settings) for entry in sides[side]]
            for side in ("chosen", "rejected")
        )
        if plan.loss == "kto":
            accuracy = mean([float(w > x) for w in chosen for x in rejected])
        else:
            accuracy = mean([float(x > 0) for x in chosen] + [float(x < 0) for x in rejected])
        found = {"accuracy": accuracy, "margin": mean(chosen) - mean(rejected)}
    found |= {"reward_chosen": mean(chosen), "reward_rejected": mean(rejected)}
    if not plan.loss.endswith("reward_model"):
        for side, own in sides.items():
            key = "logprobs" if plan.loss == "kto" else f"{side}_logprobs"
            found[f"logprob_{side}"] = mean([entry.live[key] for entry in own])
    return found
