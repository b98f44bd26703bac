"""What TRL is asked to compute of policy and distillation losses, and NexRL's own numbers for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nexrl.algorithms.aggregation import token_weights
from nexrl.algorithms.losses import LOSSES
from tests.certify.certify_losses import torch_loss
from tests.certify.loss_cases import LossCase

Array = npt.NDArray[Any]
Graded = tuple[float, list[Array]]

LENGTHS = (5, 1, 8, 3)
WIDTH = 8
VOCABULARY = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One line of the table."""

    name: str
    """NexRL's name, with what goes beside it."""
    trl: str
    """TRL's."""
    request: Mapping[str, Any]
    """For bench/trl_losses.py."""
    ours: Callable[[], Graded]
    """Loss and gradients, in the order of the request's live tensors."""
    ours_accounted: Callable[[], Graded] | None = None
    """The same with the cause of a difference taken into account."""
    cause: str = "none"
    """Of the difference, in words."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rows [R, WIDTH] and their flat trained tokens."""

    logprobs: Array
    proximal: Array
    reference: Array
    advantages: Array
    mask: Array = field(
        default_factory=lambda: (np.arange(WIDTH) < np.array(LENGTHS)[:, None]).astype(np.int64)
    )

    def flat(self, padded: Array) -> Array:
        """[n] trained tokens of a padded array."""
        flat: Array = padded[self.mask != 0]
        return flat


def make_batch() -> Batch:
    """Four rows whose ratios leave the clips on both sides."""
    rng = np.random.default_rng(3)
    logprobs = -rng.gamma(2.0, 0.7, (len(LENGTHS), WIDTH)) - 0.01
    proximal = logprobs + rng.normal(0.0, 0.4, logprobs.shape)
    reference = logprobs + rng.normal(0.0, 0.4, logprobs.shape)
    return Batch(logprobs, proximal, reference, np.array([1.2, -0.7, -1.5, 0.4]))


# --- policy losses --------------------------------------------------------------------------------


def policy_loss(
    batch: Batch, name: str, aggregation: str, settings: Mapping[str, Any]
) -> Callable[[], Graded]:
    """A loss with its denominator, as the trainer puts them together."""

    def evaluate_loss() -> Graded:
        definition = LOSSES[name]
        lengths = np.array(LENGTHS)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        weights = token_weights(
            lengths, np.arange(len(lengths)), aggregation, max_response_tokens=8
        )
        inputs = {
            "weight": weights[rows],
            "advantage": batch.advantages[rows],
            "proximal_logprobs": batch.flat(batch.proximal),
        }
        if settings.get("kl_coefficient"):
            inputs["reference_logprobs"] = batch.flat(batch.reference)
        if definition.level == "row":
            inputs["row"] = rows
        case = LossCase(
            label="",
            lengths=LENGTHS,
            outputs={"logprobs": batch.flat(batch.logprobs)},
            inputs=inputs,
            settings=definition.resolve(settings),
        )
        loss, gradients = torch_loss(definition, case, torch.float64)
        padded = np.zeros(batch.mask.shape)
        padded[batch.mask != 0] = gradients["logprobs"]
        return loss, [padded]

    return evaluate_loss


def _policy(
    batch: Batch,
    name: str,
    aggregation: str,
    trl: str,
    *,
    settings: Mapping[str, Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    accounted: Mapping[str, Any] | None = None,
    label: str = "",
    cause: str = "none",
) -> Comparison:
    clips = {"clip_low": 0.2, "clip_high": 0.28} if name in ("ppo", "gspo", "luspo") else {}
    own = {**clips, **(settings or {})}
    return Comparison(
        name=label or f"{name}, {aggregation}",
        trl=trl,
        request={
            "function": "grpo",
            "gmpo": name == "gmpo",
            "live": {"logprobs": batch.logprobs.tolist()},
            "mask": batch.mask.tolist(),
            "advantages": batch.advantages.tolist(),
            "proximal": batch.proximal.tolist(),
            "reference": batch.reference.tolist(),
            "attributes": dict(attributes or {}),
            "args": dict(args or {}),
        },
        ours=policy_loss(batch, name, aggregation, own),
        ours_accounted=policy_loss(batch, name, aggregation, {**own, **accounted})
        if accounted
        else None,
        cause=cause,
    )


def policy_comparisons(batch: Batch) -> list[Comparison]:
    """GRPOTrainer's loss types, importance levels and KL term."""
    mean, tokens = "sequence_mean_token_mean", "token_mean"
    sequence = {"importance_sampling_level": "sequence"}
    kl = {"kl_coefficient": 0.3}
    return [
        _policy(batch, "ppo", mean, "GRPO grpo"),
        _policy(batch, "ppo", tokens, "GRPO dapo", attributes={"loss_type": "dapo"}),
        _policy(batch, "ppo", tokens, "GRPO bnpo", attributes={"loss_type": "bnpo"}),
        _policy(batch, "ppo", "constant", "GRPO dr_grpo", attributes={"loss_type": "dr_grpo"}),
        _policy(
            batch,
            "ppo",
            mean,
            "GRPO grpo, delta 1.4",
            settings={"dual_clip": 1.4},
            args={"delta": 1.4},
            label="ppo, dual_clip 1.4",
        ),
        _policy(
            batch,
            "cispo",
            tokens,
            "GRPO cispo, epsilon_high 1.5",
            settings={"clip_high": 1.5},
            accounted={"clip_high": 0.5},
            attributes={"loss_type": "cispo", "epsilon_high": 1.5},
            cause="TRL's epsilon_high is the cap itself, clip_high its distance from 1 (as in the paper)",
        ),
        _policy(batch, "gspo", mean, "GRPO grpo, sequence level", attributes=sequence),
        _policy(
            batch,
            "luspo",
            "sequence_mean_token_sum",
            "GRPO luspo, sequence level",
            attributes={**sequence, "loss_type": "luspo"},
        ),
        _policy(
            batch,
            "sapo",
            mean,
            "GRPO sapo",
            attributes={"loss_type": "sapo"},
            cause="TRL holds the temperatures in float32",
        ),
        _policy(batch, "vespo", tokens, "GRPO vespo", attributes={"loss_type": "vespo"}),
        _policy(batch, "gmpo", mean, "GMPO", attributes={"epsilon_low": 0.4, "epsilon_high": 0.4}),
        _policy(
            batch,
            "ppo",
            tokens,
            "GRPO dapo, beta 0.3",
            settings={**kl, "kl_estimator": "k3"},
            attributes={"loss_type": "dapo", "beta": 0.3},
            label="ppo + kl k3",
            cause="off-policy NexRL weighs the penalty by sg(rho); TRL does not. Equal on policy",
        ),
        _policy(
            batch,
            "ppo",
            tokens,
            "GRPO dapo, beta 0.3, use_bias_correction_kl",
            settings={**kl, "kl_estimator": "k3"},
            accounted={"kl_estimator": "k3+"},
            attributes={"loss_type": "dapo", "beta": 0.3},
            args={"use_bias_correction_kl": True},
            label="ppo + kl k3",
            cause="TRL lets the gradient pass through rho: d(rho k3) = rho d, which is what k3+ gives",
        ),
    ]


# --- distillation ---------------------------------------------------------------------------------


def distillation_comparisons() -> list[Comparison]:
    """GKDTrainer over a whole vocabulary, all of it candidates: the bucket of others is empty."""
    rng = np.random.default_rng(4)
    logits, teacher = rng.normal(size=(2, 5, VOCABULARY))
    pairs: tuple[tuple[str, float, dict[str, float]], ...] = (
        ("forward_kl_top_k", 0.0, {}),
        ("jsd_top_k", 0.3, {"beta": 0.3}),
        ("reverse_kl_top_k", 1.0, {}),
    )
    return [
        Comparison(
            name=f"{name}, K = V",
            trl=f"GKD generalized_jsd_loss, beta {beta:g}",
            request={
                "function": "jsd",
                "live": {"logits": logits.tolist()},
                "teacher": teacher.tolist(),
                "beta": beta,
            },
            ours=_distillation(name, settings, logits, teacher),
        )
        for name, beta, settings in pairs
    ]


def _distillation(
    name: str, settings: Mapping[str, float], logits: Array, teacher: Array
) -> Callable[[], Graded]:
    def ours() -> Graded:
        definition = LOSSES[name]
        live = torch.tensor(logits).requires_grad_()
        known = torch.log_softmax(torch.tensor(teacher), -1)
        inputs = {"weight": torch.ones(len(logits)), "teacher_candidate_logprobs": known}
        outputs = {"candidate_logprobs": torch.log_softmax(live, -1)}
        loss = definition.term(outputs, inputs, definition.resolve(settings)).sum()
        loss.backward()
        assert live.grad is not None
        return float(loss.detach()), [live.grad.numpy()]

    return ours
