"""What a named loss is: inputs, settings, a per-token term, and the terms that are added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nexrl.algorithms.array_namespace import constant, log_difference, namespace
from nexrl.algorithms.kl import KL_ESTIMATORS, KL_IN_LOSS
from nexrl.errors import ConfigError, InvariantError

Setting = float | int | str | bool | None
Settings = Mapping[str, Setting]
Inputs = Mapping[str, Any]
Outputs = Mapping[str, Any]
PolicyTerm = Callable[[Outputs, Inputs, Settings], Any]
Clips = Callable[[Outputs, Inputs, Settings], tuple[Any, Any]]

REGULARISERS: Settings = {"kl_coefficient": 0.0, "kl_estimator": "k3", "entropy_coefficient": 0.0}
POLICY_OPTIONAL: tuple[str, ...] = ("reference_logprobs", "correction")
POLICY_REQUIRED: tuple[str, ...] = ("weight", "advantage", "proximal_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """What `prepare` adds to a step before its first chunk is sent."""

    inputs: Inputs = field(default_factory=dict)
    """[n] further per-token inputs."""
    settings: Settings = field(default_factory=dict)
    """Settings that replace those configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDefinition:
    """One named loss: its inputs, its settings and its per-token term."""

    name: str
    """Name in `LossSpec.name`."""
    required: tuple[str, ...]
    """Per-token inputs [n] that a chunk must carry; always contains `weight`."""
    optional: tuple[str, ...] = ()
    """Per-token inputs [n] that are used when present."""
    config: Settings = field(default_factory=dict)
    """Settings with their defaults; any other key is refused."""
    bounded: bool
    """Whether the loss limits how far the ratio may pull (a trust region)."""
    term_of: PolicyTerm
    """(outputs, inputs, settings) -> [n] term without KL and entropy, minimised."""
    needs: tuple[str, ...] = ("logprobs",)
    """Outputs of the model that the term uses: logprobs, values, candidate_logprobs, entropy."""
    level: Literal["token", "row"] = "token"
    """`row`: the term of a token depends on the other trained tokens of its row; `inputs` then has
    `row`, [n] the number of each token's row from 0, which the service adds itself."""
    aggregation: str | None = None
    """The only aggregation that the loss is defined for; None when any will do."""
    prepare: Callable[[Outputs, Inputs, Settings], PreparedStep] | None = None
    """(outputs, inputs, settings) of all trained tokens of an optimizer step, at the weights it
    starts from, on numpy -> what the step needs to know beforehand; costs a forward pass."""
    prepares: tuple[str, ...] = ()
    """Those of `required` that `prepare` adds; nobody else needs to know them."""
    ratio_of: Callable[[Outputs, Inputs], Any] | None = None
    """(outputs, inputs) -> [n] the ratio that the loss clips or weighs by, where it is not the
    token's rho: metrics report it."""
    clips: Clips | None = None
    """(outputs, inputs, settings) -> [n] flags: tokens whose gradient the loss's lower and its
    upper bound remove, or cap; None when it has no bound."""
    check: Callable[[Settings], None] | None = None
    """Raises ConfigError when resolved settings are out of range."""
    experimental: bool = False
    """Built from its paper and little used so far; listed with (x)."""

    def resolve(self, config: Settings) -> dict[str, Setting]:
        """Defaults overlaid with `config`; ConfigError on an unknown key or a refused value."""
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
                f"{estimator!r} (the gradient of k1 is zero in expectation: use it in the reward, "
                "or k1+, which has the value of k1 and the gradient of k2)"
            )
        if self.check is not None:
            self.check(settings)
        return settings

    def check_inputs(self, names: Iterable[str], config: Settings) -> None:
        """ConfigError when an input is missing, or is one that the loss does not know."""
        present, required = set(names), self._needed(self.resolve(config))
        if missing := sorted(required - present):
            raise ConfigError(f"loss {self.name!r} needs the inputs {missing}")
        if unknown := sorted(present - required - set(self.optional)):
            accepted = sorted({*self.required, *self.optional})
            raise ConfigError(
                f"loss {self.name!r} does not use the inputs {unknown} (accepted: {accepted})"
            )

    def _needed(self, settings: Settings) -> set[str]:
        """Inputs that the loss cannot do without."""
        added = {"reference_logprobs"} if settings.get("kl_coefficient") else set()
        return {*self.required, *added}

    def outputs(self, config: Settings) -> tuple[str, ...]:
        """Outputs of the model that `term` must be given."""
        settings = self.resolve(config)
        added = {"logprobs": "kl_coefficient", "entropy": "entropy_coefficient"}
        extra = (name for name, key in added.items() if settings.get(key))
        return (*self.needs, *(name for name in extra if name not in self.needs))

    def parts(self, outputs: Outputs, inputs: Inputs, config: Settings) -> dict[str, Any]:
        """The additive terms [n] by name (policy, kl, entropy), with their coefficients.

        Every output and input is [n], those of K candidates [n, K]: numpy arrays or torch tensors.
        InvariantError when one is missing, or has another shape and would be broadcast.
        """
        settings = self.resolve(config)
        self._refuse_malformed(outputs, inputs, settings)
        policy = self.term_of(outputs, inputs, settings)
        if "correction" in inputs:
            policy = inputs["correction"] * policy
        parts = {"policy": policy}
        if settings.get("kl_coefficient"):
            estimator = KL_ESTIMATORS[str(settings["kl_estimator"])]
            divergence = estimator(outputs["logprobs"], inputs["reference_logprobs"])
            if "proximal_logprobs" in inputs:
                ratio = policy_ratio(outputs["logprobs"], inputs)
                divergence = constant(ratio) * divergence
            parts["kl"] = number(settings, "kl_coefficient") * divergence
        if settings.get("entropy_coefficient"):
            parts["entropy"] = -number(settings, "entropy_coefficient") * outputs["entropy"]
        return parts

    def term(self, outputs: Outputs, inputs: Inputs, config: Settings) -> Any:
        """[n] what is minimised, before the multiplication by `weight`."""
        parts = self.parts(outputs, inputs, config)
        total = parts.pop("policy")
        for part in parts.values():
            total = total + part
        return total

    def _refuse_malformed(self, outputs: Outputs, inputs: Inputs, settings: Settings) -> None:
        needed = self._needed(settings) - {"weight", "candidate_ids"}  # read by the service alone
        if self.level == "row":
            needed.add("row")
        for kind, given, names in (
            ("outputs", outputs, self.outputs(settings)),
            ("inputs", inputs, needed),
        ):
            if missing := sorted({*names} - {*given}):
                raise InvariantError(
                    f"loss {self.name!r} needs the {kind} {missing}, got {sorted(given)}"
                )
        shapes = {
            name: tuple(array.shape)
            for name, array in (*outputs.items(), *inputs.items())
            if "candidate" not in name
        }
        if len({*shapes.values()}) > 1:
            raise InvariantError(f"loss {self.name!r}: arrays differ in shape: {shapes}")


def policy_ratio(logprobs: Any, inputs: Inputs) -> Any:
    """[n] rho = exp(logprob - proximal logprob), its log within +-MAX_LOG_DIFFERENCE."""
    difference = log_difference(logprobs, inputs["proximal_logprobs"])
    return namespace(difference).exp(difference)


def number(settings: Settings, key: str) -> float:
    """The setting as a number; ConfigError when it is none."""
    value = settings[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"loss setting {key} must be a number, got {value!r}")
    return float(value)
