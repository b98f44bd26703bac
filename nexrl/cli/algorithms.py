"""`nexrl algorithms`: which presets and parts there are, and what each of them computes.

Everything printed comes from the registries of `nexrl/algorithms`, so that it cannot drift from
what runs. Plain text of at most 100 columns; no torch.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.aggregation import AGGREGATIONS
from nexrl.algorithms.corrections import CORRECTION_PRESETS
from nexrl.algorithms.kl import KL_ESTIMATORS, KL_IN_LOSS, KL_IN_REWARD
from nexrl.algorithms.loss_definition import REGULARISERS, LossDefinition
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from nexrl.algorithms.preset_definition import FORMULA_WORDS
from nexrl.algorithms.presets import PRESETS, Preset
from nexrl.config.rule import ADVANTAGE_SETTINGS
from nexrl.config.schema_algorithm import AdvantageConfig
from nexrl.errors import nearest

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


def show_algorithms(name: str | None) -> bool:
    """Print all names, or what has this one; whether there is such a thing."""
    if name is None:
        print("\n".join(listing()))
        return True
    found = ["\n".join(show(name)) for names, show in _SHOWN if name in names]
    if not found:
        known = [known for names, _ in _SHOWN for known in names]
        meant = nearest(name, known) or "; `nexrl algorithms` lists all"
        print(f"nothing is named {name!r}{meant}", file=sys.stderr)
        return False
    print("\n\n".join(found))
    return True


def listing() -> Iterator[str]:
    """Lines of `nexrl algorithms`."""
    yield from HOW_TO_CHOOSE.splitlines()
    yield ""
    yield "presets, trainer.algorithm"
    width = max(map(len, PRESETS))
    for family in dict.fromkeys(preset.family for preset in PRESETS.values()):
        members = {_marked(p): p.summary for p in PRESETS.values() if p.family == family}
        yield from ("", f"  {family}", *_table(members, width))
    for title, entries in _parts():
        yield from ("", title, *_table(entries))


def _parts() -> Iterator[tuple[str, Mapping[str, str]]]:
    """What presets are made of: a title, and the line of each name."""
    key = "trainer.algorithm"
    formulas = {name: _paragraphs(found.estimate)[0] for name, found in ADVANTAGES.items()}
    yield f"advantages, {key}.advantage", formulas
    yield f"losses, {key}.loss", {_marked(loss): LOSS_LINES[n] for n, loss in LOSSES.items()}
    yield f"aggregations, {key}.loss.aggregation", AGGREGATIONS
    yield f"KL estimators, {key}.kl.estimator", KL_LINES
    yield f"corrections, {key}.correction", {name: _bounds(name) for name in CORRECTION_PRESETS}
    yield "filters, trajectory_pool.dynamic_sampling.filters", FILTER_LINES


def _table(entries: Mapping[str, str], width: int = 0) -> Iterator[str]:
    """Names in a column of at least `width`, and what is said of each."""
    width = max([width, *map(len, entries)])
    for name, line in entries.items():
        yield from _wrapped(f"    {name:<{width}}  {line}", indent=width + 6)


def _wrapped(text: str, *, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _labelled(label: str, text: str) -> list[str]:
    return _wrapped(f"{label:<11}  {text}", indent=13)


def _marked(found: LossDefinition | Preset) -> str:
    return found.name + " (x)" * found.experimental


def _bounds(name: str) -> str:
    correction = CORRECTION_PRESETS[name]
    if correction.action == "none":
        return "weight 1"
    low, high = ("-" if b is None else f"{b:g}" for b in (correction.low, correction.high))
    verb = {"truncate": "held within", "mask": "0 outside", "reject": "row 0 outside"}
    return (
        f"{correction.level} ratio of trainer to engine, {verb[correction.action]} [{low}, {high}]"
    )


def _paragraphs(function: Callable[..., Any]) -> list[str]:
    """The docstring's paragraphs, each on one line, but for what is indented."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return [p if p.startswith("    ") else " ".join(p.split()) for p in paragraphs]


def _explained(function: Callable[..., Any]) -> Iterator[str]:
    for paragraph in _paragraphs(function):
        yield ""
        if paragraph.startswith("    "):
            yield from (f"  {line}" for line in paragraph.splitlines())
        else:
            yield from _wrapped("  " + paragraph, indent=2)


def _yaml_lines(settings: dict[str, Any]) -> list[str]:
    """Nested settings as YAML, in the order given, without tags or anchors."""
    import yaml

    plain = json.loads(json.dumps(settings))
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=False).splitlines()


def _show_preset(name: str) -> Iterator[str]:
    preset = PRESETS[name]
    mark = ", experimental" if preset.experimental else ""
    yield from _wrapped(f"preset {name} ({preset.family}{mark}): {preset.summary}", indent=2)
    algorithm = {"preset": name, **preset.settings["trainer"]["algorithm"]}
    settings = {**preset.settings, "trainer": {"algorithm": algorithm}}
    yield from ("", *_yaml_lines(settings), "")
    if preset.shares:
        for key, (other, share) in preset.shares.items():
            yield from _labelled("also", f"{key} = {share:g} x {other}")
        yield ""
    yield "what is minimised"
    for text in (preset.formula, FORMULA_WORDS):
        yield from (f"  {line}" for line in text.splitlines())
        yield ""
    yield from _labelled("source", preset.source)
    yield from _labelled("needs", "; ".join(preset.needs) or "a reward only")
    if name in PREFERENCE_LOSSES and PREFERENCE_LOSSES[name].config:
        own = ", ".join(PREFERENCE_LOSSES[name].config)
        yield from _labelled("settings", f"trainer.algorithm.preference: {own}")


def _show_advantage(name: str) -> Iterator[str]:
    definition, default = ADVANTAGES[name], AdvantageConfig()
    yield f"advantage {name}"
    yield from _explained(definition.estimate)
    yield ""
    own = [setting for setting, users in ADVANTAGE_SETTINGS.items() if name in users]
    yield from _settings({setting: getattr(default, setting) for setting in own})
    yield from _labelled("needs", ", ".join(definition.needs) or "rewards and groups only")
    zero = "get exactly 0" if definition.group_relative else "are nothing special"
    yield from _labelled("equal", f"groups of equal rewards {zero}")


def _show_loss(name: str) -> Iterator[str]:
    loss = LOSSES[name]
    yield f"loss {name}{', experimental' * loss.experimental}: {LOSS_LINES[name]}"
    yield from _explained(loss.term_of)
    yield ""
    yield from _settings({k: v for k, v in loss.config.items() if k not in REGULARISERS})
    yield from _labelled("inputs", ", ".join((*loss.required, *loss.optional)))
    yield from _labelled("aggregation", f"{loss.aggregation} only" if loss.aggregation else "any")
    bounded = "yes" if loss.bounded else "no: one optimizer step a batch, or trust_region: none"
    yield from _labelled("bounded", bounded)
    if loss.prepare is not None:
        yield from _labelled("beforehand", "a forward pass of each optimizer step")
        yield from _explained(loss.prepare)


def _show_correction(name: str) -> Iterator[str]:
    yield f"correction {name}: {_bounds(name)}"
    yield from ("", *_yaml_lines({"trainer": {"algorithm": {"correction": {"preset": name}}}}), "")
    yield from _settings(asdict(CORRECTION_PRESETS[name]), label="brings")


def _show_aggregation(name: str) -> Iterator[str]:
    yield f"aggregation {name}: {AGGREGATIONS[name]}"


def _show_kl(name: str) -> Iterator[str]:
    placements = {"loss": KL_IN_LOSS, "reward": KL_IN_REWARD}
    yield from (f"KL estimator {name}: {KL_LINES[name]}", "")
    yield from _labelled("placement", " and ".join(k for k, v in placements.items() if name in v))


def _show_filter(name: str) -> Iterator[str]:
    yield from (f"filter {name}: {FILTER_LINES[name]}", "")
    yield from _yaml_lines({"trajectory_pool": {"dynamic_sampling": {"filters": [name]}}})


def _settings(values: Mapping[str, Any], label: str = "settings") -> list[str]:
    return _labelled(label, ", ".join(f"{k} {_shown(v)}" for k, v in values.items()) or "none")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


_SHOWN: tuple[tuple[Mapping[str, Any], Callable[[str], Iterator[str]]], ...] = (
    (PRESETS, _show_preset),
    (ADVANTAGES, _show_advantage),
    (LOSSES, _show_loss),
    (CORRECTION_PRESETS, _show_correction),
    (AGGREGATIONS, _show_aggregation),
    (KL_ESTIMATORS, _show_kl),
    (FILTER_LINES, _show_filter),
)
"""All names, by kind, and how one of the kind is shown."""
