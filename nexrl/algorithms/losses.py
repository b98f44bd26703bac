"""Named per-token losses: what a train service minimises.

A service computes `(definition.term(logprobs, inputs, config, entropy) * weight).sum()` and its
gradient: a plain sum over tokens, so any split into chunks, micro-batches or ranks gives the same
gradient. The trainer owns every denominator through `weight`, which multiplies all additive terms
alike: policy, KL and entropy. The same functions run on numpy for metrics and tests.

Formulas, with rho = exp(logprob - proximal logprob) and A the advantage, per token:

    cross_entropy        -logprob
    reinforce            -A logprob
    importance_sampling  -rho A                                      (unbounded)
    ppo                  max(-rho A, -clip(rho, 1 - low, 1 + high) A)
                         with dual_clip c > 1 and A < 0: the smaller of that and -c A
    + kl_coefficient     * sg(rho) * k(logprob, reference logprob)   (k2 or k3)
    - entropy_coefficient * entropy

Sources: PPO, Schulman et al. 2017, eq. 7; dual clip, Ye et al. 2019, eq. 5; separate upper clip,
DAPO 2025, eq. 8; off-policy weight of the KL term, DeepSeek-V3.2 2025, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nexrl.algorithms.array_namespace import constant, log_difference, namespace
from nexrl.algorithms.kl import KL_ESTIMATORS, KL_IN_LOSS
from nexrl.errors import ConfigError

Setting = float | int | str | bool | None
Settings = Mapping[str, Setting]
Inputs = Mapping[str, Any]
PolicyTerm = Callable[[Any, Inputs, Settings], Any]

REGULARISERS: Settings = {"kl_coefficient": 0.0, "kl_estimator": "k3", "entropy_coefficient": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDefinition:
    """One named loss: its inputs, its settings and its per-token term."""

    name: str
    """Name in `LossSpec.name`."""
    required: tuple[str, ...]
    """Per-token inputs [N] that a chunk must carry; always contains `weight`."""
    optional: tuple[str, ...] = ()
    """Per-token inputs [N] that are used when present."""
    config: Settings = field(default_factory=dict)
    """Settings with their defaults; any other key is refused."""
    bounded: bool
    """Whether the loss limits how far the ratio may pull (a trust region)."""
    policy_term: PolicyTerm
    """(logprobs, inputs, settings) -> [N] policy term without KL and entropy, minimised."""

    def resolve(self, config: Settings) -> dict[str, Setting]:
        """Defaults overlaid with `config`; ConfigError on an unknown key or estimator."""
        unknown = sorted(set(config) - set(self.config))
        if unknown:
            raise ConfigError(
                f"loss {self.name!r} has no setting {unknown} (accepted: {sorted(self.config)})"
            )
        settings = {**self.config, **config}
        estimator = settings.get("kl_estimator", KL_IN_LOSS[0])
        if estimator not in KL_IN_LOSS:
            raise ConfigError(
                f"loss {self.name!r}: kl_estimator must be one of {list(KL_IN_LOSS)}, got "
                f"{estimator!r} (the gradient of k1 is zero in expectation)"
            )
        return settings

    def check_inputs(self, names: Iterable[str], config: Settings) -> None:
        """ConfigError when an input is missing, or is one that the loss does not know."""
        present, settings = set(names), self.resolve(config)
        required = set(self.required)
        if settings.get("kl_coefficient"):
            required.add("reference_logprobs")
        if missing := sorted(required - present):
            raise ConfigError(f"loss {self.name!r} needs the inputs {missing}")
        if unknown := sorted(present - required - set(self.optional)):
            accepted = sorted({*self.required, *self.optional})
            raise ConfigError(
                f"loss {self.name!r} does not use the inputs {unknown} (accepted: {accepted})"
            )

    def needs_entropy(self, config: Settings) -> bool:
        """Whether `term` must be given the entropy of each position's distribution."""
        return bool(self.resolve(config).get("entropy_coefficient"))

    def parts(
        self, logprobs: Any, inputs: Inputs, config: Settings, entropy: Any = None
    ) -> dict[str, Any]:
        """The additive terms [N] by name (policy, kl, entropy), with their coefficients.

        `logprobs`, `entropy` and every input are [N], numpy arrays or torch tensors.
        """
        settings = self.resolve(config)
        policy = self.policy_term(logprobs, inputs, settings)
        if "correction" in inputs:
            policy = inputs["correction"] * policy
        parts = {"policy": policy}
        if settings.get("kl_coefficient"):
            estimator = KL_ESTIMATORS[str(settings["kl_estimator"])]
            divergence = estimator(logprobs, inputs["reference_logprobs"])
            if "proximal_logprobs" in inputs:
                divergence = constant(_ratio(logprobs, inputs)) * divergence
            parts["kl"] = _number(settings, "kl_coefficient") * divergence
        if settings.get("entropy_coefficient"):
            parts["entropy"] = -_number(settings, "entropy_coefficient") * entropy
        return parts

    def term(self, logprobs: Any, inputs: Inputs, config: Settings, entropy: Any = None) -> Any:
        """[N] what is minimised, before the multiplication by `weight`."""
        parts = self.parts(logprobs, inputs, config, entropy)
        total = parts.pop("policy")
        for part in parts.values():
            total = total + part
        return total


def _ratio(logprobs: Any, inputs: Inputs) -> Any:
    difference = log_difference(logprobs, inputs["proximal_logprobs"])
    return namespace(difference).exp(difference)


def _cross_entropy(logprobs: Any, inputs: Inputs, settings: Settings) -> Any:
    return -logprobs


def _reinforce(logprobs: Any, inputs: Inputs, settings: Settings) -> Any:
    return -inputs["advantage"] * logprobs


def _importance_sampling(logprobs: Any, inputs: Inputs, settings: Settings) -> Any:
    return -_ratio(logprobs, inputs) * inputs["advantage"]


def _ppo(logprobs: Any, inputs: Inputs, settings: Settings) -> Any:
    xp, advantage = namespace(logprobs), inputs["advantage"]
    ratio = _ratio(logprobs, inputs)
    low, high = 1.0 - _number(settings, "clip_low"), 1.0 + _number(settings, "clip_high")
    term = xp.maximum(-ratio * advantage, -xp.clip(ratio, low, high) * advantage)
    if settings["dual_clip"] is not None:
        bound = -_number(settings, "dual_clip") * advantage
        term = xp.where(advantage < 0, xp.minimum(term, bound), term)
    return term


def _number(settings: Settings, key: str) -> float:
    value = settings[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"loss setting {key} must be a number, got {value!r}")
    return float(value)


_POLICY_OPTIONAL = ("reference_logprobs", "correction")

LOSSES: Mapping[str, LossDefinition] = {
    definition.name: definition
    for definition in (
        LossDefinition(
            name="cross_entropy", required=("weight",), bounded=True, policy_term=_cross_entropy
        ),
        LossDefinition(
            name="reinforce",
            required=("weight", "advantage"),
            optional=(*_POLICY_OPTIONAL, "proximal_logprobs"),
            config=REGULARISERS,
            bounded=False,
            policy_term=_reinforce,
        ),
        LossDefinition(
            name="importance_sampling",
            required=("weight", "advantage", "proximal_logprobs"),
            optional=_POLICY_OPTIONAL,
            config=REGULARISERS,
            bounded=False,
            policy_term=_importance_sampling,
        ),
        LossDefinition(
            name="ppo",
            required=("weight", "advantage", "proximal_logprobs"),
            optional=_POLICY_OPTIONAL,
            config={**REGULARISERS, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
            bounded=True,
            policy_term=_ppo,
        ),
    )
}


def loss_definition(name: str) -> LossDefinition:
    """The loss of that name; ConfigError that lists the known ones."""
    if name not in LOSSES:
        raise ConfigError(f"no loss is named {name!r} (accepted: {sorted(LOSSES)})")
    return LOSSES[name]
