"""What TRL is asked to compute of preference losses, and NexRL's own numbers for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from tests.certify.certify_preference import evaluate
from tests.certify.trl_requests import LENGTHS, Batch, Comparison, Graded


def preference_comparisons(batch: Batch) -> list[Comparison]:
    """DPOTrainer, KTOTrainer, CPOTrainer, ORPOTrainer, RewardTrainer on rows 0, 1 against 2, 3."""
    return [
        _dpo(batch, "dpo", ["sigmoid"], [1.0], {"beta": 0.4}),
        _dpo(batch, "hinge", ["hinge"], [1.0], {"beta": 0.4}),
        _dpo(
            batch,
            "ipo",
            ["ipo"],
            [1.0],
            {"beta": 0.4},
            per_token=True,
            cause="TRL divides each log ratio by its response's length, as the authors of IPO told it; eq. 17 as printed has sums",
        ),
        _dpo(
            batch,
            "dpo",
            ["sigmoid", "sft"],
            [1.0, 0.3],
            {"beta": 0.4, "sft_coefficient": 0.3},
            even=True,
            cause="TRL's cross entropy is a mean over all chosen tokens, NexRL's a mean over responses; equal where lengths are",
        ),
        _kto(),
        _simpo(),
        _orpo(),
        _reward(),
    ]


def _dpo(
    batch: Batch,
    name: str,
    types: Sequence[str],
    weights: Sequence[float],
    settings: Mapping[str, float],
    *,
    per_token: bool = False,
    even: bool = False,
    cause: str = "none",
) -> Comparison:
    sums = (batch.reference * batch.mask).sum(1)
    definition = PREFERENCE_LOSSES[name]

    def ours(*, divide: bool = False, mean_tokens: bool = False) -> Graded:
        lengths = np.array(LENGTHS, np.float64)
        own = (batch.logprobs * batch.mask).sum(1)
        scale = lengths if divide else np.ones(4)
        inputs = {
            "chosen_logprobs": own[:2] / scale[:2],
            "rejected_logprobs": own[2:] / scale[2:],
            "reference_chosen_logprobs": sums[:2] / scale[:2],
            "reference_rejected_logprobs": sums[2:] / scale[2:],
            "chosen_lengths": np.full(2, lengths[:2].mean()) if mean_tokens else lengths[:2],
        }
        kept = {
            k: v for k, v in inputs.items() if k in (*definition.required, *definition.optional)
        }
        losses, gradients = evaluate(definition, kept, settings, torch.float64)
        rows = np.concatenate([gradients["chosen_logprobs"], gradients["rejected_logprobs"]])
        per_row = rows / scale / len(losses)
        return float(losses.mean()), [per_row[:, None] * batch.mask]

    accounted: Callable[[], Graded] | None = None
    if per_token:
        accounted = lambda: ours(divide=True)  # noqa: E731
    if even:
        accounted = lambda: ours(mean_tokens=True)  # noqa: E731
    return Comparison(
        name=f"{name} + cross entropy" if even else name,
        trl=f"DPO {' + '.join(types)}",
        request={
            "function": "dpo",
            "live": {"logprobs": batch.logprobs.tolist()},
            "mask": batch.mask.tolist(),
            "reference_sums": sums.tolist(),
            "attributes": {
                "loss_types": list(types),
                "loss_weights": list(weights),
                "beta": settings["beta"],
            },
        },
        ours=ours,
        ours_accounted=accounted,
        cause=cause,
    )


def _kto() -> Comparison:
    logprobs = np.array([-3.0, -5.0, -2.0, -7.0])
    reference = np.array([-3.5, -4.0, -2.2, -6.0])
    desirable = np.array([True, False, False, True])
    mismatched = np.array([0.3, -0.1, 0.5, 0.2])
    settings = {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.8}

    def ours() -> Graded:
        inputs = {
            "logprobs": logprobs,
            "reference_logprobs": reference,
            "desirable": desirable,
            "z0": np.array(max(0.0, mismatched.mean())),
        }
        losses, gradients = evaluate(PREFERENCE_LOSSES["kto"], inputs, settings, torch.float64)
        return float(losses.mean()), [gradients["logprobs"] / len(losses)]

    return Comparison(
        name="kto",
        trl="KTO kto",
        request={
            "function": "kto",
            "live": {"logprobs": logprobs.tolist()},
            "reference_sums": reference.tolist(),
            "desirable": desirable.tolist(),
            "mismatched": mismatched.tolist(),
            "attributes": settings,
        },
        ours=ours,
    )


CHOSEN_MEANS = np.array([-0.4, -1.2, -0.9])
REJECTED_MEANS = np.array([-0.8, -0.7, -2.0])


def _on_means(
    name: str, settings: Mapping[str, float], *, without_imitation: bool = False
) -> Graded:
    """A loss of mean logprobs, on responses of one token, so that sums are means."""
    ones = np.ones(3)
    inputs = {
        "chosen_logprobs": CHOSEN_MEANS,
        "rejected_logprobs": REJECTED_MEANS,
        "chosen_lengths": ones,
        "rejected_lengths": ones,
    }
    losses, gradients = evaluate(PREFERENCE_LOSSES[name], inputs, settings, torch.float64)
    chosen, rejected = gradients["chosen_logprobs"] / 3, gradients["rejected_logprobs"] / 3
    if without_imitation:
        losses, chosen = losses + CHOSEN_MEANS, chosen + 1.0 / 3
    return float(losses.mean()), [chosen, rejected]


def _means_request(function: str, attributes: Mapping[str, float]) -> dict[str, Any]:
    live = {"chosen": CHOSEN_MEANS.tolist(), "rejected": REJECTED_MEANS.tolist()}
    return {"function": function, "live": live, "attributes": attributes}


def _simpo() -> Comparison:
    return Comparison(
        name="simpo",
        trl="CPO simpo, simpo_gamma 0.8",
        request=_means_request("simpo", {"beta": 2.0, "simpo_gamma": 0.8}),
        ours=lambda: _on_means("simpo", {"beta": 2.0, "margin": 0.8}),
    )


def _orpo() -> Comparison:
    settings = {"odds_coefficient": 0.5}
    return Comparison(
        name="orpo",
        trl="ORPO odds_ratio_loss, beta 0.5",
        request=_means_request("orpo", {"beta": 0.5}),
        ours=lambda: _on_means("orpo", settings),
        ours_accounted=lambda: _on_means("orpo", settings, without_imitation=True),
        cause="this TRL function is the odds-ratio part alone, in float32; its cross entropy is a mean over tokens, NexRL's over responses",
    )


def _reward() -> Comparison:
    margin = np.array([0.5, 0.0, 0.2])

    def ours() -> Graded:
        inputs = {
            "chosen_scores": CHOSEN_MEANS,
            "rejected_scores": REJECTED_MEANS,
            "margin": margin,
        }
        losses, g = evaluate(PREFERENCE_LOSSES["reward_model"], inputs, {}, torch.float64)
        return float(losses.mean()), [g["chosen_scores"] / 3, g["rejected_scores"] / 3]

    request = {**_means_request("reward_model", {}), "margin": margin.tolist()}
    return Comparison(name="reward_model", trl="Reward", request=request, ours=ours)
