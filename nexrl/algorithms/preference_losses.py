"""Losses on preferred and rejected responses, labelled responses and judged steps.

    forward -> sums over a response's tokens [P] -> loss of each pair [P] -> mean over the step

P counts pairs (dpo, ipo, hinge, simpo, orpo, reward_model), labelled responses (kto) or step ends
(process_reward_model). The trainer minimises the mean over the P of a whole optimizer step, so
any split into chunks gives the same gradient. Written once for numpy and torch: losses, and the
rewards that accuracy and margins are read from.

Words: w is the chosen and l the rejected response, logp the sum of a response's token logprobs
under the policy, ref the same under the frozen reference, d = logp - ref, |y| its tokens, s the
score of a row, sigma the logistic function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nexrl.algorithms.array_namespace import constant, namespace
from nexrl.errors import ConfigError, InvariantError

Inputs = Mapping[str, Any]
Settings = Mapping[str, float]

MIN_CERTAINTY_GAP = 1e-6
"""orpo: a mean logprob counts as at most minus this. The odds of a certain response are infinite;
beyond the bound the gradient is 0 instead."""

PREFERENCE_INPUTS: Mapping[str, str] = {
    "chosen_logprobs": "[P] float, sum of the chosen response's token logprobs under the policy",
    "rejected_logprobs": "[P] float, the same of the rejected response",
    "chosen_lengths": "[P] number of trained tokens of the chosen response, at least 1",
    "rejected_lengths": "[P] the same of the rejected response",
    "reference_chosen_logprobs": "[P] float, sum of the chosen response's logprobs under the "
    "reference",
    "reference_rejected_logprobs": "[P] float, the same of the rejected response",
    "logprobs": "[P] float, sum of a labelled response's logprobs under the policy",
    "reference_logprobs": "[P] float, the same under the reference",
    "desirable": "[P] bool, the label",
    "z0": "scalar array or [P], reference point of the optimizer step, at least 0; no gradient",
    "chosen_scores": "[P] float, score of prompt and chosen response",
    "rejected_scores": "[P] float, score of prompt and rejected response",
    "margin": "[P] float, difference in score that the pair shall have at least",
    "scores": "[P] float, score (logit) at each step end",
    "labels": "[P] in [0, 1], whether the step is right",
}
"""What each input of a loss is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """One objective on offline data."""

    name: str
    """As in `trainer.algorithm`."""
    rows: Literal["pair", "labelled", "process"]
    """What one entry of the loss is: a pair, a labelled response, or a step end."""
    required: tuple[str, ...]
    """Inputs, by the names of PREFERENCE_INPUTS."""
    optional: tuple[str, ...] = ()
    """Inputs that are used when present, or that a setting asks for."""
    config: Settings = field(default_factory=dict)
    """Settings with their defaults, by the names of `trainer.algorithm.preference`."""
    formula: str
    """Loss of one entry; the objective is its mean over the optimizer step."""
    source: str
    """Paper, year, equation."""
    term: Callable[[Inputs, Settings], Any]
    """(inputs, all settings) -> [P], without the cross entropy that is added."""
    reward: Callable[[Inputs, str, Settings], Any]
    """(inputs, prefix of the side, all settings) -> [P] reward of that side's responses."""
    imitates: bool = False
    """Whether cross entropy on the chosen response is part of the loss whatever sft_coefficient."""

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the policy is needed."""
        return any(name.startswith("reference_") for name in self.required)

    @property
    def needs_scores(self) -> bool:
        """Whether the model has a value head: it gives scores, not logprobs."""
        return any(name.endswith("scores") for name in self.required)

    @property
    def sides(self) -> tuple[str, ...]:
        """Prefixes of the inputs of each response: two for a pair, one empty one otherwise."""
        return ("chosen_", "rejected_") if self.rows == "pair" else ("",)

    def resolve(self, settings: Settings) -> dict[str, float]:
        """Defaults overlaid with `settings`; ConfigError on one that the loss does not have."""
        if unknown := sorted(set(settings) - set(self.config)):
            raise ConfigError(
                f"preference loss {self.name!r} has no setting {unknown} (accepted: "
                f"{sorted(self.config)})"
            )
        return {**self.config, **settings}

    def parts(self, inputs: Inputs, settings: Settings) -> dict[str, Any]:
        """[P] additive terms by name: `preference`, and `imitation` where there is cross entropy
        on chosen responses, per token and with its coefficient.

        Raises InvariantError when an input is missing, or has another shape and would be broadcast.
        """
        resolved = self.resolve(settings)
        coefficient = 1.0 if self.imitates else resolved.get("sft_coefficient", 0.0)
        required = {*self.required, *(["chosen_lengths"] if coefficient else [])}
        if missing := sorted(required - set(inputs)):
            raise InvariantError(f"preference loss {self.name!r} needs the inputs {missing}")
        shapes = {name: tuple(inputs[name].shape) for name in inputs if name != "z0"}
        if len({*shapes.values()}) > 1:
            raise InvariantError(f"preference loss {self.name!r}: inputs differ in shape: {shapes}")
        parts = {"preference": self.term(inputs, resolved)}
        if coefficient:
            parts["imitation"] = -coefficient * _mean_logprob(inputs, "chosen_", resolved)
        return parts

    def loss(self, inputs: Inputs, settings: Settings) -> Any:
        """[P] loss of each entry, minimised: the sum of its parts; numpy arrays or torch tensors."""
        return sum(self.parts(inputs, settings).values())

    def rewards(self, inputs: Inputs, settings: Settings) -> dict[str, Any]:
        """[P] reward by side prefix: implicit (beta d and the like) or explicit (the score).

        A pair is told apart rightly when the reward of the chosen response is the larger one.
        """
        resolved = self.resolve(settings)
        return {side: self.reward(inputs, side, resolved) for side in self.sides}


def minus_log_sigmoid(values: Any) -> Any:
    """-log sigma(x) = log(1 + exp(-x)), finite with a finite gradient at any x."""
    xp = namespace(values)
    return xp.logaddexp(xp.zeros_like(values), -values)


def log_odds(mean_logprobs: Any) -> Any:
    """log(p / (1 - p)) of p = exp(mean logprob): x - log(1 - exp(x)), by expm1 where x is near 0."""
    xp = namespace(mean_logprobs)
    values = xp.clip(mean_logprobs, None, -MIN_CERTAINTY_GAP)
    return values - xp.log(-xp.expm1(values))


def _sigmoid(values: Any) -> Any:
    return namespace(values).exp(-minus_log_sigmoid(values))


# --- rewards ----------------------------------------------------------------------------------


def _implicit_reward(inputs: Inputs, side: str, settings: Settings) -> Any:
    return settings["beta"] * (inputs[f"{side}logprobs"] - inputs[f"reference_{side}logprobs"])


def _mean_logprob(inputs: Inputs, side: str, settings: Settings) -> Any:
    return inputs[f"{side}logprobs"] / inputs[f"{side}lengths"]


def _scaled_mean_logprob(inputs: Inputs, side: str, settings: Settings) -> Any:
    return settings["beta"] * _mean_logprob(inputs, side, settings)


def _score(inputs: Inputs, side: str, settings: Settings) -> Any:
    return inputs[f"{side}scores"]


# --- losses -----------------------------------------------------------------------------------


def _difference(reward: Callable[[Inputs, str, Settings], Any]) -> Callable[..., Any]:
    """[P] reward of chosen - reward of rejected."""
    return lambda inputs, settings: (
        reward(inputs, "chosen_", settings) - reward(inputs, "rejected_", settings)
    )


_implicit_margin = _difference(_implicit_reward)
_length_normalised_margin = _difference(_scaled_mean_logprob)


def _dpo(inputs: Inputs, settings: Settings) -> Any:
    margin, smoothing = _implicit_margin(inputs, settings), settings["label_smoothing"]
    loss = minus_log_sigmoid(margin)
    if smoothing:
        loss = (1.0 - smoothing) * loss + smoothing * minus_log_sigmoid(-margin)
    return loss


def _ipo(inputs: Inputs, settings: Settings) -> Any:
    gap = _implicit_margin(inputs, settings) / settings["beta"] - 0.5 / settings["beta"]
    return gap**2


def _hinge(inputs: Inputs, settings: Settings) -> Any:
    short = 1.0 - _implicit_margin(inputs, settings)
    return namespace(short).clip(short, 0.0, None)


def _simpo(inputs: Inputs, settings: Settings) -> Any:
    return minus_log_sigmoid(_length_normalised_margin(inputs, settings) - settings["margin"])


def _orpo(inputs: Inputs, settings: Settings) -> Any:
    chosen, rejected = (_mean_logprob(inputs, s, settings) for s in ("chosen_", "rejected_"))
    return settings["odds_coefficient"] * minus_log_sigmoid(log_odds(chosen) - log_odds(rejected))


def _kto(inputs: Inputs, settings: Settings) -> Any:
    reward = _implicit_reward(inputs, "", settings)
    above = reward - settings["beta"] * constant(inputs["z0"])
    return namespace(reward).where(
        inputs["desirable"],
        settings["desirable_weight"] * _sigmoid(-above),
        settings["undesirable_weight"] * _sigmoid(above),
    )


def _reward_model(inputs: Inputs, settings: Settings) -> Any:
    margin = inputs["margin"] if "margin" in inputs else settings["margin"]
    return minus_log_sigmoid(inputs["chosen_scores"] - inputs["rejected_scores"] - margin)


def _process_reward_model(inputs: Inputs, settings: Settings) -> Any:
    scores, labels = inputs["scores"], inputs["labels"]
    return labels * minus_log_sigmoid(scores) + (1.0 - labels) * minus_log_sigmoid(-scores)


# --- the table --------------------------------------------------------------------------------

_PAIR = ("chosen_logprobs", "rejected_logprobs")
_REFERENCE_PAIR = (*_PAIR, "reference_chosen_logprobs", "reference_rejected_logprobs")
_LENGTHS = ("chosen_lengths", "rejected_lengths")
_IMITATION = " - sft_coefficient logp_w / |w|"

PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = {
    loss.name: loss
    for loss in (
        PreferenceLoss(
            name="dpo",
            rows="pair",
            required=_REFERENCE_PAIR,
            optional=("chosen_lengths",),
            config={"beta": 0.1, "label_smoothing": 0.0, "sft_coefficient": 0.0},
            formula="-(1 - e) log sigma(beta (d_w - d_l)) - e log sigma(-beta (d_w - d_l))"
            + _IMITATION
            + ", e = label_smoothing",
            source="Rafailov et al. 2023, eq. 7; smoothing (conservative DPO): Mitchell 2023, eq. 3; "
            "cross entropy: Pang et al. 2024, per token of the response",
            term=_dpo,
            reward=_implicit_reward,
        ),
        PreferenceLoss(
            name="ipo",
            rows="pair",
            required=_REFERENCE_PAIR,
            optional=("chosen_lengths",),
            config={"beta": 0.1, "sft_coefficient": 0.0},
            formula="(d_w - d_l - 1 / (2 beta))^2" + _IMITATION,
            source="Azar et al. 2023, eq. 17 with tau = beta: sums over the response, as h there is "
            "a ratio of probabilities of whole responses; some implementations take means",
            term=_ipo,
            reward=_implicit_reward,
        ),
        PreferenceLoss(
            name="hinge",
            rows="pair",
            required=_REFERENCE_PAIR,
            optional=("chosen_lengths",),
            config={"beta": 0.1, "sft_coefficient": 0.0},
            formula="max(0, 1 - beta (d_w - d_l))" + _IMITATION,
            source="Liu et al. 2023 (RSO), hinge-norm with gamma = beta; after SLiC, Zhao et al. 2023",
            term=_hinge,
            reward=_implicit_reward,
        ),
        PreferenceLoss(
            name="simpo",
            rows="pair",
            required=(*_PAIR, *_LENGTHS),
            config={"beta": 0.1, "margin": 0.0, "sft_coefficient": 0.0},
            formula="-log sigma(beta logp_w / |w| - beta logp_l / |l| - margin)" + _IMITATION,
            source="Meng et al. 2024, eq. 6 with gamma = margin",
            term=_simpo,
            reward=_scaled_mean_logprob,
        ),
        PreferenceLoss(
            name="orpo",
            rows="pair",
            required=(*_PAIR, *_LENGTHS),
            config={"odds_coefficient": 0.1},
            formula="-logp_w / |w| - odds_coefficient log sigma(log odds_w - log odds_l), "
            "odds = p / (1 - p), p = exp(logp / |y|)",
            source="Hong et al. 2024, eqs. 4, 6 and 7",
            term=_orpo,
            reward=_mean_logprob,
            imitates=True,
        ),
        PreferenceLoss(
            name="kto",
            rows="labelled",
            required=("logprobs", "reference_logprobs", "desirable", "z0"),
            config={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
            formula="desirable: desirable_weight (1 - sigma(beta (d - z0))); undesirable: "
            "undesirable_weight (1 - sigma(beta (z0 - d))); z0 = max(0, mean d of mismatched "
            "pairs), no gradient",
            source="Ethayarajh et al. 2024, eq. 8 of its latest version",
            term=_kto,
            reward=_implicit_reward,
        ),
        PreferenceLoss(
            name="reward_model",
            rows="pair",
            required=("chosen_scores", "rejected_scores"),
            optional=("margin",),
            config={"margin": 0.0},
            formula="-log sigma(s_w - s_l - margin)",
            source="Bradley and Terry 1952; Ouyang et al. 2022, eq. 1; margin: Touvron et al. 2023 "
            "(Llama 2), eq. 2",
            term=_reward_model,
            reward=_score,
        ),
        PreferenceLoss(
            name="process_reward_model",
            rows="process",
            required=("scores", "labels"),
            formula="-y log sigma(s) - (1 - y) log(1 - sigma(s)) at each step end",
            source="Lightman et al. 2023; Wang et al. 2024 (Math-Shepherd), over step ends instead "
            "of rows",
            term=_process_reward_model,
            reward=_score,
        ),
    )
}


def find_preference_loss(name: str) -> PreferenceLoss:
    """The loss of that name; ConfigError that lists the known ones."""
    if name not in PREFERENCE_LOSSES:
        raise ConfigError(
            f"no preference loss is named {name!r} (accepted: {sorted(PREFERENCE_LOSSES)})"
        )
    return PREFERENCE_LOSSES[name]
