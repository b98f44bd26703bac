"""Named per-token losses: what a train service minimises.

A service computes `(definition.term(outputs, inputs, config) * weight).sum()` and its
gradient: a plain sum over tokens, so any split into chunks, micro-batches or ranks gives the same
gradient. The trainer owns every denominator through `weight`, which multiplies all additive terms
alike: policy, KL and entropy. The same functions run on numpy for metrics and tests.

    term = correction * policy term                                   (correction: see corrections.py)
           + kl_coefficient * sg(rho) * k(logprob, reference logprob)   (k2, k3, k1+ or k3+)
           - entropy_coefficient * entropy

rho = exp(logprob - proximal logprob); sg: no gradient. The weight rho of the KL term makes it right
off-policy. DeepSeek-V3.2 2025 has rho k3 with a gradient through rho, in all rho d by the logprob:
that is sg(rho) x k3+. The policy terms, each with formula and source:

    policy_losses.py        reinforce, importance_sampling, ppo, bapo, cispo, dppo
    sequence_losses.py      gspo, gspo_token, luspo, gmpo
    experimental_losses.py  sapo, vespo, topr, kimi, clip_cov, kl_cov
    value_losses.py         value (the critic)
    distillation_losses.py  reverse_kl, reverse_kl_top_k, forward_kl_top_k, jsd_top_k
    here                    cross_entropy: -logprob
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nexrl.algorithms.distillation_losses import DISTILLATION_LOSSES
from nexrl.algorithms.experimental_losses import EXPERIMENTAL_LOSSES
from nexrl.algorithms.loss_definition import Inputs, LossDefinition, Outputs, Settings
from nexrl.algorithms.policy_losses import POLICY_LOSSES
from nexrl.algorithms.sequence_losses import SEQUENCE_LOSSES
from nexrl.algorithms.value_losses import VALUE_LOSSES
from nexrl.errors import ConfigError


def cross_entropy(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """[n] -logprob: supervised training on the loss mask."""
    return -outputs["logprobs"]


LOSSES: Mapping[str, LossDefinition] = {
    definition.name: definition
    for definition in (
        LossDefinition(
            name="cross_entropy", required=("weight",), bounded=True, term_of=cross_entropy
        ),
        *POLICY_LOSSES,
        *SEQUENCE_LOSSES,
        *EXPERIMENTAL_LOSSES,
        *VALUE_LOSSES,
        *DISTILLATION_LOSSES,
    )
}


def find_loss(name: str) -> LossDefinition:
    """The loss of that name; ConfigError that lists the known ones."""
    if name not in LOSSES:
        raise ConfigError(f"no loss is named {name!r} (accepted: {sorted(LOSSES)})")
    return LOSSES[name]
