"""`nexrl algorithms`: which presets and parts there are, and what each of them computes.

Everything printed comes from the registries of `nexrl/algorithms`, so that it cannot drift from
what runs. Plain text of at most 100 columns; no torch.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.aggregation import AGGREGATIONS
from nexrl.algorithms.corrections import CORRECTION_PRESETS, CorrectionPreset
from nexrl.algorithms.kl import KL_ESTIMATORS, KL_IN_LOSS
from nexrl.algorithms.loss_definition import REGULARISERS, LossDefinition
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from nexrl.algorithms.preset_definition import FORMULA_WORDS
from nexrl.algorithms.presets import PRESETS, Preset
from nexrl.config.rule import ADVANTAGE_SETTINGS
from nexrl.config.schema_algorithm import AdvantageConfig

EXIT_CONFIGURATION = 2
WIDTH = 100

HOW_TO_CHOOSE = """\
A preset is one word in a recipe, and brings parts; what is written beside it wins:

    trainer:
      algorithm: dapo

    trainer:
      algorithm: {preset: dapo, advantage: rloo, kl: {coefficient: 0.01}}

Any advantage goes with any loss, aggregation, correction and KL placement; what cannot work is
refused with the reason. An advantage, a loss or a filter of your own is written `path.py:name`.
`nexrl algorithms show NAME` prints settings, formula and source. (x): experimental.
r reward, mu and sd of its group, A advantage, rho = exp(logp - proximal logp), W its product over
a row, V value, sg without gradient."""
"""What stands above the list."""
LOSS_LINES = {
    "cross_entropy": "-logp",
    "reinforce": "-A logp",
    "importance_sampling": "-rho A",
    "ppo": "max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A)",
    "bapo": "ppo whose bounds are found for each optimizer step",
    "cispo": "-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logp",
    "dppo": "-rho A, 0 where the token's probability has moved too far",
    "gspo": "ppo of s = exp(mean over the row of log rho)",
    "gspo_token": "ppo of s with a gradient of its own at each token",
    "luspo": "gspo's term, a row counted by its length",
    "gmpo": "-exp(mean over the row of clipped log rho) A",
    "sapo": "-4/tau sigma(tau (rho - 1)) A",
    "vespo": "-sg(W^k exp(lambda (1 - W))) A logp, W the ratio of the whole row",
    "topr": "-A logp where A >= 0, -sg(min(W, 1)) A logp where A < 0",
    "kimi": "-A logp + tau/2 (log W)^2 of the row",
    "clip_cov": "ppo without gradient at a few tokens of high covariance",
    "kl_cov": "-rho A + penalty |log rho| at the tokens of highest covariance",
    "value": "1/2 (V - return)^2 with a clip, for the critic",
    "reverse_kl": "logp - teacher at the drawn token, gradient of half its square",
    "reverse_kl_top_k": "KL(student || teacher) over the teacher's likeliest tokens",
    "forward_kl_top_k": "KL(teacher || student) over the teacher's likeliest tokens",
    "jsd_top_k": "Jensen-Shannon divergence over the teacher's likeliest tokens",
}
"""Each per-token loss in one line, in the words of `FORMULA_WORDS`."""
KL_LINES = {
    "k1": "logp - ref; in the reward only: its gradient is 0 in expectation",
    "k2": "(logp - ref)^2 / 2",
    "k3": "exp(ref - logp) - 1 + logp - ref",
    "k1+": "value of k1, gradient of k2; in the loss only",
    "k3+": "value of k3, gradient of k2; in the loss only",
}
"""Each KL estimator in one line."""
FILTER_LINES = {
    "constant_reward": "drops a group whose rewards are all equal",
    "all_truncated": "drops a group of which every trajectory was truncated",
}
"""Each group filter in one line."""


def show_algorithms(name: str | None) -> int:
    """Print all names, or what has this one; returns the exit status."""
    if name is None:
        print("\n".join(listing()))
        return 0
    found = list(descriptions(name))
    if not found:
        near = difflib.get_close_matches(name, _all_names(), 1)
        meant = f"; did you mean {near[0]}?" if near else "; `nexrl algorithms` lists all"
        print(f"nothing is named {name!r}{meant}", file=sys.stderr)
        return EXIT_CONFIGURATION
    print("\n\n".join(found))
    return 0


# --- the list -------------------------------------------------------------------------------------


def listing() -> Iterator[str]:
    """Lines of `nexrl algorithms`."""
    yield from HOW_TO_CHOOSE.splitlines()
    yield ""
    yield "presets, trainer.algorithm"
    width = max(map(len, PRESETS))
    for family in dict.fromkeys(preset.family for preset in PRESETS.values()):
        members = [p for p in PRESETS.values() if p.family == family]
        yield ""
        yield f"  {family}"
        yield from _table(((_marked(p), p.summary) for p in members), width)
    for title, entries in _parts():
        yield ""
        yield title
        yield from _table(entries)


def _parts() -> Iterator[tuple[str, Iterable[tuple[str, str]]]]:
    """What presets are made of: a title, and name and line of each."""
    key = "trainer.algorithm"
    formulas = {name: _formula(found.estimate) for name, found in ADVANTAGES.items()}
    yield f"advantages, {key}.advantage", formulas.items()
    losses = ((_marked(loss), LOSS_LINES[name]) for name, loss in LOSSES.items())
    yield f"losses, {key}.loss", losses
    yield f"aggregations, {key}.loss.aggregation", AGGREGATIONS.items()
    yield f"KL estimators, {key}.kl.estimator", KL_LINES.items()
    bounds = {name: _bounds(correction) for name, correction in CORRECTION_PRESETS.items()}
    yield f"corrections, {key}.correction", bounds.items()
    yield "filters, trajectory_pool.dynamic_sampling.filters", FILTER_LINES.items()


def _table(entries: Iterable[tuple[str, str]], width: int = 0) -> Iterator[str]:
    """Names in a column of at least `width`, and what is said of each."""
    found = list(entries)
    width = max([width, *(len(name) for name, _ in found)])
    for name, line in found:
        yield from _wrapped(f"    {name:<{width}}  {line}", indent=width + 6)


def _wrapped(text: str, *, indent: int) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, drop_whitespace=True
    )


def _marked(found: LossDefinition | Preset) -> str:
    return found.name + " (x)" * found.experimental


def _bounds(correction: CorrectionPreset) -> str:
    if correction.action == "none":
        return "weight 1"
    low, high = ("-" if b is None else f"{b:g}" for b in (correction.low, correction.high))
    verb = {"truncate": "held within", "mask": "0 outside", "reject": "row 0 outside"}
    return (
        f"{correction.level} ratio of trainer to engine, {verb[correction.action]} [{low}, {high}]"
    )


def _formula(function: Callable[..., Any]) -> str:
    """The docstring's first paragraph."""
    text = inspect.getdoc(function) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _all_names() -> list[str]:
    parts = (ADVANTAGES, LOSSES, CORRECTION_PRESETS, AGGREGATIONS, KL_ESTIMATORS, FILTER_LINES)
    return [*PRESETS, *(name for names in parts for name in names)]


# --- one name -------------------------------------------------------------------------------------


def descriptions(name: str) -> Iterator[str]:
    """A text for each kind of thing that has this name."""
    if name in PRESETS:
        yield "\n".join(_show_preset(PRESETS[name]))
    if name in ADVANTAGES:
        yield "\n".join(_show_advantage(name))
    if name in LOSSES:
        yield "\n".join(_show_loss(LOSSES[name]))
    if name in CORRECTION_PRESETS:
        settings = yaml_lines({"trainer": {"algorithm": {"correction": {"preset": name}}}})
        bounds = _bounds(CORRECTION_PRESETS[name])
        brings = ", ".join(f"{k} {_shown(v)}" for k, v in asdict(CORRECTION_PRESETS[name]).items())
        yield "\n".join(
            [f"correction {name}: {bounds}", "", *settings, "", *_labelled("brings", brings)]
        )
    if name in AGGREGATIONS:
        yield f"aggregation {name}: {AGGREGATIONS[name]}"
    if name in KL_ESTIMATORS:
        where = "loss and reward" if name in KL_IN_LOSS and not name.endswith("+") else ""
        where = where or ("loss" if name in KL_IN_LOSS else "reward")
        yield f"KL estimator {name}: {KL_LINES[name]}\n\nplacement    {where}"
    if name in FILTER_LINES:
        chosen = {"trajectory_pool": {"dynamic_sampling": {"filters": [name]}}}
        yield "\n".join([f"filter {name}: {FILTER_LINES[name]}", "", *yaml_lines(chosen)])


def _show_preset(preset: Preset) -> Iterator[str]:
    mark = ", experimental" if preset.experimental else ""
    yield from _wrapped(f"preset {preset.name} ({preset.family}{mark}): {preset.summary}", indent=2)
    yield ""
    yield from yaml_lines(expansion(preset))
    if preset.shares:
        yield ""
    for key, (other, share) in preset.shares.items():
        yield from _labelled("also", f"{key} = {share:g} x {other}")
    yield ""
    yield "what is minimised"
    yield from (f"  {line}" for line in preset.formula.splitlines())
    yield ""
    yield from (f"  {line}" for line in FORMULA_WORDS.splitlines())
    yield ""
    yield from _labelled("source", preset.source)
    yield from _labelled("needs", "; ".join(preset.needs) or "a reward only")
    if preset.name in PREFERENCE_LOSSES and PREFERENCE_LOSSES[preset.name].config:
        settings = ", ".join(PREFERENCE_LOSSES[preset.name].config)
        yield from _labelled("settings", f"trainer.algorithm.preference: {settings}")


def expansion(preset: Preset) -> dict[str, Any]:
    """A preset and its settings, as they can be pasted into a recipe."""
    settings = {section: dict(value) for section, value in preset.settings.items()}
    algorithm = settings["trainer"]["algorithm"]
    settings["trainer"] = {"algorithm": {"preset": preset.name, **algorithm}}
    return settings


def yaml_lines(settings: dict[str, Any]) -> list[str]:
    """Nested settings as YAML, in the order given."""
    import yaml

    return yaml.safe_dump(_plain(settings), sort_keys=False, default_flow_style=False).splitlines()


def _plain(value: Any) -> Any:
    """Mappings and sequences as the dicts and lists that YAML writes without tags or anchors."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _show_advantage(name: str) -> Iterator[str]:
    definition = ADVANTAGES[name]
    yield f"advantage {name}"
    yield from _paragraphs(definition.estimate)
    yield ""
    default = AdvantageConfig()
    settings = [
        f"{setting} {_shown(getattr(default, setting))}"
        for setting, users in ADVANTAGE_SETTINGS.items()
        if name in users
    ]
    yield from _labelled("settings", ", ".join(settings) or "none")
    yield from _labelled("needs", ", ".join(definition.needs) or "rewards and groups only")
    zero = "get exactly 0" if definition.group_relative else "are nothing special"
    yield from _labelled("equal", f"groups of equal rewards {zero}")


def _show_loss(loss: LossDefinition) -> Iterator[str]:
    yield f"loss {loss.name}{', experimental' * loss.experimental}: {LOSS_LINES[loss.name]}"
    yield from _paragraphs(loss.term_of)
    yield ""
    settings = [f"{k} {_shown(v)}" for k, v in loss.config.items() if k not in REGULARISERS]
    yield from _labelled("settings", ", ".join(settings) or "none")
    yield from _labelled("inputs", ", ".join((*loss.required, *loss.optional)))
    yield from _labelled("aggregation", f"{loss.aggregation} only" if loss.aggregation else "any")
    bounded = "yes" if loss.bounded else "no: one optimizer step a batch, or trust_region: none"
    yield from _labelled("bounded", bounded)
    if loss.prepare is not None:
        yield from _labelled("beforehand", "a forward pass of each optimizer step")
        yield from _paragraphs(loss.prepare)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _paragraphs(function: Callable[..., Any]) -> Iterator[str]:
    for paragraph in (inspect.getdoc(function) or "").split("\n\n"):
        yield ""
        if paragraph.startswith("    "):
            yield from (f"  {line}" for line in paragraph.splitlines())
        else:
            yield from _wrapped("  " + " ".join(paragraph.split()), indent=2)


def _labelled(label: str, text: str) -> list[str]:
    return _wrapped(f"{label:<11}  {text}", indent=13)
