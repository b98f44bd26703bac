"""The configuration reference, docs/configuration.md, written from the schema.

`python -m nexrl.config.reference` prints it; a test compares the file with what is printed, so a
field cannot be added without its sentence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from nexrl.config.fields import ITEM, Field, all_fields
from nexrl.config.nodes import dotted
from nexrl.config.shorthands import SHORTHANDS
from nexrl.config.stages import STAGE_SECTIONS

COMMAND = "python -m nexrl.config.reference > docs/configuration.md"

_HEAD = f"""\
# Configuration

Every setting there is. This page is written by `{COMMAND}`.

## A recipe

A recipe is a folder with `rl_train.yaml`. Only what differs from the defaults below is written:

```yaml
experiment_name: sums
data:
  sources:
    - path: train.jsonl
  batch_size: 64            # items per version
  rollout_repeat_n: 8       # rollouts of each item
rollout_worker:
  reward: reward.py:exact   # `path.py:name` or `package.module:name`
  sampling: {{max_tokens: 64}}
service:
  train_service:
    model_path: models/small
```

- **Paths** in a recipe are relative to its folder, then to the working directory.
- **Inheritance**: `defaults: ../base/rl_train.yaml`, or a list of files or recipe folders, relative to
  the file that names them. Later ones win, the file itself wins over all; mappings merge key by key,
  lists are replaced.
- **References**: `${{data.batch_size}}` takes the value of another key, with its type. `${{oc.env:NAME}}`
  and `${{oc.env:NAME,default}}` read the environment. `\\${{` is a literal `${{`.
- **Command line**: `nexrl launch RECIPE trainer.num_steps=20 data.sources.0.path=other.jsonl`. Values are
  YAML; what is empty is null. An override holds for every stage, unless it names one:
  `stages.rl.trainer.num_steps=20`.
- **Numbers** are YAML 1.2: `1e-4` is a number, `no` and `2024-01-01` are texts, `010` is ten.
- **Secrets** come from the environment (`api_key: ${{oc.env:API_KEY}}`) and are shown as `***` everywhere.
- **Strict**: an unknown key, a wrong type, a value out of range or an impossible combination is refused
  before anything starts, all of them in one message, each with its key, its value, what is accepted and
  the file and line. `nexrl plan RECIPE --provenance` shows where each value comes from.

## Algorithms

`trainer.algorithm: dapo` chooses a preset: settings that lie below everything that is written, so each of
them can be overridden. `nexrl algorithms` lists the presets and the parts they are made of,
`nexrl algorithms show dapo` prints one with its formula.

```yaml
trainer:
  algorithm:
    preset: dapo
    advantage: rloo           # one word for `{{name: rloo}}`
    loss: {{clip_high: 0.3}}
    correction: tis           # one word for `{{preset: tis}}`
```

- **One word** stands for a section's name: `{"`, `".join(map(dotted, SHORTHANDS))}`.
  On the command line too: `trainer.algorithm=rloo` changes the preset and nothing else that is written.
- **Another name** in place of a preset's loss, estimator or correction drops the preset's settings of
  that part: the clip range of ppo says nothing about cispo.
- **What a name brings**: a correction its level, action and bounds, and `recompute_proximal`; a loss that
  is defined for one denominator its `aggregation`; remax its `greedy_baseline`.
- **What nothing reads** is refused: a clip of a loss that has none, `std` of an estimator that divides by
  nothing, `kl` of a preference loss. What is written once for all stages needs one stage that reads it,
  and the default, written again (`trainer.algorithm.advantage.std=sample`), takes a setting back.

## Stages

`stages` is a list of named settings on top of the recipe, run one after another; each starts from the
weights of the last. A stage may set {", ".join(f"`{name}`" for name in STAGE_SECTIONS)}; services, launch and
seed hold for the whole run.

```yaml
stages:
  - name: warmup
    data: {{rollout_repeat_n: 1}}
    trainer: {{algorithm: sft, num_steps: 100}}
  - name: rl
    trainer: {{algorithm: dapo, num_steps: 200}}
```
"""

_TABLE_HEAD = ("| key | type | default | accepted | meaning |", "|---|---|---|---|---|")


def render_reference() -> str:
    """The whole page as Markdown, ending in a newline."""
    return "\n".join([_HEAD, *_tables()]) + "\n"


def _tables() -> Iterator[str]:
    fields = list(all_fields().values())
    yield "## Run\n"
    yield from _table([f for f in fields if len(f.path) == 1 and f.kind != "section"], "")
    for section in fields:
        if section.section is None:
            continue
        prefix = f"{section.key}.{ITEM}." if section.kind == "list" else f"{section.key}."
        below = [
            f
            for f in fields
            if f.key.startswith(prefix)
            and "." not in f.key.removeprefix(prefix)
            and f.kind != "section"
        ]
        title = f"{section.key}[]" if section.kind == "list" else section.key
        yield f"\n## {title.replace(f'.{ITEM}', '[]')}\n\n{section.description}\n"
        if below:
            yield from _table(below, prefix)


def _table(fields: list[Field], prefix: str) -> Iterator[str]:
    yield from _TABLE_HEAD
    for field in fields:
        cells = (
            f"`{field.key.removeprefix(prefix)}`",
            field.kind,
            f"`{_default(field.default)}`",
            field.accepted,
            field.description,
        )
        yield (
            "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"
        )


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        raise AssertionError("every setting has a default")
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e6:
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.stdout.write(render_reference())
