"""RecipeProbe: what a plan sees of a recipe's rows, user code, tokenizer and reward function.

Everything goes through the very functions that a run uses, so that what passes here passes there.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from nexrl.algorithms.filters import GROUP_FILTERS
from nexrl.cli.memory_estimate import ModelSize, read_model_size
from nexrl.cli.plan_rows import PlacedRow, try_rows
from nexrl.cli.plan_teacher import check_vocabulary, teacher_folder
from nexrl.cli.plan_text import (
    ROWS_READ,
    Finding,
    Inspection,
    RenderedPrompts,
    Severity,
    SourceSample,
)
from nexrl.config.loader import LoadedConfig, StageConfig
from nexrl.config.problems import located
from nexrl.config.rule import OFFLINE_WORKERS, is_reference, is_rl
from nexrl.config.rules import source_name
from nexrl.config.schema import RunConfig, SourceConfig
from nexrl.config.user_code import load_user_object
from nexrl.data.sources import Source, leave_out, load_filter, open_source
from nexrl.errors import ConfigError, NexRLError, UserCodeError, user_frame
from nexrl.launch.model_folder import cached_folder, resolve_model_folder
from nexrl.rendering.renderer import load_renderer
from nexrl.rollout.build import worker_class
from nexrl.rollout.prompts import PromptBuilder
from nexrl.services.reward.local import LocalRewardService, load_reward_service
from nexrl.services.reward.service_class import TimedReward
from nexrl.trainer.build import trainer_class

_COUNT_BUDGET_S = 1.0
"""Seconds for reading one source beyond the rows that are checked, to count its items."""
_PROBE_DEADLINE_S = 5.0
"""Seconds for scoring one row's own answer."""
_COLUMNS = {
    "preference": ("chosen_key", "rejected_key"),
    "labelled": ("answer_key", "label_key"),
    "process": ("steps_key", "label_key"),
}
"""Settings of `data` that name the columns which an offline worker reads beside the prompt. A
supervised row may have messages in place of an answer."""
_FACTORY_KEY = "service.train_service.model_factory"

Row = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


class RecipeProbe:
    """Looks at a recipe through the real modules.

    Invariant: errors that NexRL raises on purpose become findings; nothing is started or written
    outside `scratch`.
    """

    def __init__(self, loaded: LoadedConfig, *, scratch: Path) -> None:
        self._loaded = loaded
        self._recipe_dir = loaded.recipe_dir
        self._scratch = scratch
        self._findings: list[Finding] = []
        self._origins = loaded.provenance
        self._folder = folder = self._attempt(self._find_model_folder)
        self._renderer = self._attempt(load_renderer, folder) if folder else None
        self.size = self._attempt(read_model_size, folder) if folder else None
        self.startup, self._findings = self._findings, []

    def inspect_stage(self, stage: StageConfig) -> Inspection:
        """Rows, prompts and user code of one stage."""
        self._findings, self._origins = [], stage.provenance
        config = stage.config
        self._check_code(config)
        placed: list[PlacedRow] = []
        held_out: list[PlacedRow] = []
        sources = self._read(config, "data.sources", config.data.sources, placed)
        validation = []
        if config.validate_.enabled:
            held = config.validate_.sources
            validation = self._read(config, "validate.sources", held, held_out)
        prompts = self._attempt(self._render, config, placed)
        self._attempt(self._render, config, held_out)
        longest = self._attempt(self._try_rows, config, placed)
        self._attempt(self._try_rows, config, held_out)
        self._attempt(self._probe_reward, config, [row for _, row in placed or held_out])
        return Inspection(
            sources=sources,
            validation_sources=validation,
            prompts=prompts,
            longest_row=longest,
            teacher=self._attempt(self._inspect_teacher, config),
            scorer=_scorer_words(config),
            findings=tuple(self._findings),
        )

    def _attempt(self, look: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """What `look` sees; None, and a problem of the plan, where the recipe has a mistake."""
        try:
            return look(*args, **named)
        except NexRLError as error:
            self._add("problem", str(error))
            return None

    def _add(self, severity: Severity, text: str) -> None:
        self._findings.append(Finding(severity=severity, text=located(text, self._origins)))

    def _find_model_folder(self) -> Path | None:
        config, service = self._loaded.config, self._loaded.config.service.train_service
        if service.model_path is not None:
            return resolve_model_folder(config, recipe_dir=self._recipe_dir)
        if service.model_factory is None:
            return None
        made = cached_folder(config, recipe_dir=self._recipe_dir)
        return made if (made / "config.json").is_file() else self._preview(service.model_factory)

    def _preview(self, reference: str) -> Path | None:
        """Tokenizer and config.json of a model that is not made yet, if its factory offers them
        cheaply as its attribute `tokenizer`, a function of a folder."""
        factory = self._own_function(_FACTORY_KEY, reference, "folder", "seed")
        write = getattr(factory, "tokenizer", None)
        if write is None:
            self._add("ok", f"model and tokenizer are made at launch by {reference}")
            return None
        try:
            write(self._scratch)
        except Exception as error:
            raise ConfigError(
                f"{_FACTORY_KEY}: {reference}.tokenizer(folder) raised {type(error).__name__}: "
                f"{error} ({user_frame(error)})"
            ) from error
        return self._scratch

    def _own_function(self, key: str, reference: str, *parameters: str) -> Any:
        """A function of the recipe; ConfigError when it is not there or takes other arguments."""
        function = load_user_object(reference, recipe_dir=self._recipe_dir, key=key)
        _check_accepts(function, key, reference, *parameters)
        return function

    def _check_code(self, config: RunConfig) -> None:
        self._attempt(worker_class, config.rollout_worker, self._recipe_dir)
        self._attempt(trainer_class, config.trainer, self._recipe_dir)
        algorithm, own = config.trainer.algorithm, list[tuple[str, ...]]()
        if is_rl(config) and is_reference(algorithm.loss.name):
            key = "trainer.algorithm.loss.name"
            own.append((key, algorithm.loss.name, "outputs", "inputs", "settings"))
        if is_rl(config) and is_reference(algorithm.advantage.name):
            key = "trainer.algorithm.advantage.name"
            own.append((key, algorithm.advantage.name, "inputs", "settings"))
        for index, name in enumerate(config.trajectory_pool.dynamic_sampling.filters):
            if name not in GROUP_FILTERS:
                own.append((f"trajectory_pool.dynamic_sampling.filters.{index}", name, "group"))
        for function in own:
            self._attempt(self._own_function, *function)

    def _read(
        self, config: RunConfig, key: str, sources: Sequence[SourceConfig], rows: list[PlacedRow]
    ) -> list[SourceSample]:
        """Read and check the first rows of each source; append those that are kept to `rows`."""
        samples = (
            self._attempt(self._read_source, config, f"{key}.{index}", source, rows)
            for index, source in enumerate(sources)
        )
        return [sample for sample in samples if sample is not None]

    def _read_source(
        self, config: RunConfig, key: str, source: SourceConfig, rows: list[PlacedRow]
    ) -> SourceSample:
        worker = config.rollout_worker.type
        found = open_source(
            source,
            data=config.data,
            recipe_dir=self._recipe_dir,
            limit=ROWS_READ,
            needs_prompt=worker != "custom",
            needs_columns=tuple(getattr(config.data, name) for name in _COLUMNS.get(worker, ())),
            key=key,
        )
        count: int | None = len(found.rows)
        if count == ROWS_READ:
            count = count_items(source, self._recipe_dir)
        kept = self._left_in(config, found, is_whole=count == len(found.rows))
        rows += zip(kept.places, kept.rows, strict=True)
        return SourceSample(
            name=found.name,
            num_read=len(found.rows),
            num_left_out=len(found.rows) - len(kept.rows),
            num_items=count,
        )

    def _left_in(self, config: RunConfig, found: Source, *, is_whole: bool) -> Source:
        """The rows that the recipe's filter and length limit keep; nothing left is a problem when
        these are all rows there are."""
        keep = load_filter(config.data, recipe_dir=self._recipe_dir)
        if keep is not None:
            _check_accepts(keep, "data.filter", config.data.filter or "", "row")
        limit, measure = config.data.max_prompt_tokens, None
        if limit is not None and self._renderer is not None:
            builder = PromptBuilder(self._renderer, config.rollout_worker, config.data)
            measure = _length_by(builder)
        try:
            return leave_out(found, keep=keep, max_prompt_tokens=limit, prompt_length=measure)
        except ConfigError as error:
            self._add("problem" if is_whole else "warning", str(error))
            return replace(found, rows=(), item_ids=(), places=())

    def _render(self, config: RunConfig, rows: Sequence[PlacedRow]) -> RenderedPrompts | None:
        if self._renderer is None or not rows or config.rollout_worker.type == "custom":
            return None
        builder = PromptBuilder(self._renderer, config.rollout_worker, config.data)
        prompts = [builder.of_row(row).token_ids for _, row in rows]
        bos = self._renderer.bos_token_id
        return RenderedPrompts(
            first_text=self._renderer.decode(prompts[0], skip_special_tokens=False),
            lengths=[len(prompt) for prompt in prompts],
            num_leading_bos=len(list(takewhile(lambda token: token == bos, prompts[0]))),
        )

    def _try_rows(self, config: RunConfig, rows: Sequence[PlacedRow]) -> int | None:
        """Tokens of the longest row that an offline worker makes of these."""
        if self._renderer is None or not rows or config.rollout_worker.type not in OFFLINE_WORKERS:
            return None
        trial = try_rows(config, rows, renderer=self._renderer, recipe_dir=self._recipe_dir)
        if trial.finding:
            self._findings.append(trial.finding)
        return trial.longest

    def _inspect_teacher(self, config: RunConfig) -> ModelSize | None:
        folder = teacher_folder(config, recipe_dir=self._recipe_dir)
        if folder is None:
            return None
        if self._folder is not None:
            check_vocabulary(folder, self._folder)
        return read_model_size(folder)

    def _probe_reward(self, config: RunConfig, rows: Sequence[Row]) -> None:
        """Score the first row's own answer, the way a run does (FR-059)."""
        if config.rollout_worker.reward is None:
            return
        if text := asyncio.run(_score_own_answer(config, self._recipe_dir, rows)):
            self._add("warning", text)


async def _score_own_answer(config: RunConfig, recipe_dir: Path, rows: Sequence[Row]) -> str:
    """What is odd about the score, or nothing; ConfigError when the function cannot be called."""
    worker = config.rollout_worker
    service = load_reward_service(
        worker.reward or "",
        recipe_dir=recipe_dir,
        arguments=worker.reward_arguments,
        isolation=worker.reward_isolation,
        deadline_s=min(worker.reward_deadline_s, _PROBE_DEADLINE_S),
        num_workers=1,
    )
    try:
        if worker.type == "custom":
            return ""  # the worker decides what the function gets
        if rows and isinstance(service, LocalRewardService | TimedReward):
            service.check_row(rows[0])
        answer = rows[0].get(config.data.answer_key) if rows else None
        if not isinstance(answer, str):
            return ""
        result = await service.score(answer, rows[0])
    except ConfigError:
        raise
    except NexRLError as error:
        return f"rollout_worker.reward on the first row's own answer {answer!r:.60}: {error}"
    finally:
        await service.aclose()
    if result.value is None or result.value > 0 or not isinstance(service, LocalRewardService):
        return ""  # scores of a trained model have no zero
    return (
        f"rollout_worker.reward gives {result.value:g} to the first row's own answer "
        f"{answer!r:.60} (column {config.data.answer_key}): is that the column it compares with?"
    )


def count_items(source: SourceConfig, recipe_dir: Path) -> int | None:
    """Rows of a source counted within a time budget; None when that does not suffice."""
    deadline = time.monotonic() + _COUNT_BUDGET_S
    if source.path is None:
        factory = load_user_object(
            source.factory or "", recipe_dir=recipe_dir, key=f"source {source_name(source)}"
        )
        try:
            made = factory(**source.arguments)
            return len(made) if hasattr(made, "__len__") else None
        except Exception as error:
            raise UserCodeError(
                f"{source.factory} called again to count its items raised "
                f"{type(error).__name__}: {error} ({user_frame(error)})"
            ) from error
    from nexrl.data.file_formats import read_rows

    path = next(p for p in (recipe_dir / source.path, Path(source.path)) if p.exists())
    count = 0
    for _ in read_rows(path):
        count += 1
        if time.monotonic() > deadline:
            return None
    return count


def _length_by(builder: PromptBuilder) -> Callable[[Row], int]:
    return lambda row: len(builder.of_row(row).token_ids)


def _scorer_words(config: RunConfig) -> str:
    worker = config.rollout_worker
    if worker.reward is not None:
        where = f"in a {worker.reward_isolation}, at most {worker.reward_deadline_s:g} s a call"
        return f"{worker.reward} ({where})"
    return "the worker's own" if worker.type == "custom" else "none"


def _check_accepts(function: Any, key: str, reference: str, *parameters: str) -> None:
    """ConfigError when a user function cannot be called with these positional arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a readable signature
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {reference}{signature} must accept ({', '.join(parameters)}): {error}"
        ) from error
