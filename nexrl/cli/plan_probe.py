"""RecipeProbe: what a plan sees of a recipe's rows, user code, tokenizer and reward function.

Everything goes through the very functions that a run uses, so that what passes here passes there.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nexrl.algorithms.filters import GROUP_FILTERS
from nexrl.cli.memory_estimate import ModelSize, model_size
from nexrl.cli.plan_text import (
    ROWS_READ,
    Finding,
    Inspection,
    RenderedPrompts,
    Severity,
    SourceSample,
)
from nexrl.config.loader import LoadedConfig, StageConfig
from nexrl.config.rules import source_name
from nexrl.config.schema import RunConfig, SourceConfig
from nexrl.config.user_code import load_user_object
from nexrl.data.sources import load_filter, open_source
from nexrl.errors import ConfigError, NexRLError, UserCodeError, user_frame
from nexrl.launch.model_folder import cached_folder, resolve_model_folder
from nexrl.rendering.renderer import HfRenderer, load_renderer
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
    "supervised": ("answer_key",),
    "preference": ("chosen_key", "rejected_key"),
    "labelled": ("answer_key", "label_key"),
    "process": ("steps_key", "label_key"),
}
"""Settings of `data` that name the columns which a built-in worker reads beside the prompt."""
_FACTORY_KEY = "service.train_service.model_factory"

Row = Mapping[str, Any]


class _Reported:
    """A `with` block that turns errors which NexRL raises on purpose into problems."""

    def __init__(self, add: Callable[[Severity, str], None]) -> None:
        self._add = add

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> bool:
        if not isinstance(error, NexRLError):
            return False
        self._add("problem", str(error))
        return True


class RecipeProbe:
    """Looks at a recipe through the real modules.

    Invariant: errors that NexRL raises on purpose become findings; nothing is started or written
    outside `scratch`.
    """

    def __init__(self, loaded: LoadedConfig, *, scratch: Path) -> None:
        self._loaded = loaded
        self._scratch = scratch
        self._findings: list[Finding] = []
        self._folder = self._find_model_folder()
        self._renderer = self._load_renderer()
        self.size = self._read_size()
        self.startup, self._findings = self._findings, []

    def inspect_stage(self, stage: StageConfig) -> Inspection:
        """Rows, prompts and user code of one stage."""
        self._findings = []
        config = stage.config
        self._check_code(config)
        rows: list[Row] = []
        sources = self._read(config, "data.sources", config.data.sources, rows)
        held_out: list[Row] = []
        validation = (
            self._read(config, "validate.sources", config.validate_.sources, held_out)
            if config.validate_.enabled
            else []
        )
        prompts = self._render(config, rows)
        self._render(config, held_out)
        self._probe_reward(config, rows or held_out)
        return Inspection(
            sources=sources,
            validation_sources=validation,
            prompts=prompts,
            scorer=_scorer_words(config),
            findings=tuple(self._findings),
        )

    def _reported(self) -> _Reported:
        """A mistake of the recipe inside becomes a problem of the plan."""
        return _Reported(self._add)

    def _add(self, severity: Severity, text: str) -> None:
        self._findings.append(Finding(severity=severity, text=text))

    def _find_model_folder(self) -> Path | None:
        config, recipe_dir = self._loaded.config, self._loaded.recipe_dir
        service = config.service.train_service
        with self._reported():
            if service.model_path is not None:
                return resolve_model_folder(config, recipe_dir=recipe_dir)
            if service.model_factory is not None:
                made = cached_folder(config, recipe_dir=recipe_dir)
                return made if (made / "config.json").is_file() else self._preview()
        return None

    def _preview(self) -> Path | None:
        """Tokenizer and config.json of a model that is not made yet, if its factory offers them
        cheaply as its attribute `tokenizer`, a function of a folder."""
        reference = self._loaded.config.service.train_service.model_factory or ""
        factory = load_user_object(reference, recipe_dir=self._loaded.recipe_dir, key=_FACTORY_KEY)
        _check_accepts(factory, _FACTORY_KEY, reference, "folder", "seed")
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

    def _load_renderer(self) -> HfRenderer | None:
        with self._reported():
            return load_renderer(self._folder) if self._folder else None
        return None

    def _read_size(self) -> ModelSize | None:
        with self._reported():
            if self._folder is not None:
                return read_model_size(self._folder)
        return None

    def _check_code(self, config: RunConfig) -> None:
        recipe_dir = self._loaded.recipe_dir
        with self._reported():
            worker_class(config.rollout_worker, recipe_dir)
        with self._reported():
            trainer_class(config.trainer, recipe_dir)
        for index, name in enumerate(config.trajectory_pool.dynamic_sampling.filters):
            key = f"trajectory_pool.dynamic_sampling.filters.{index}"
            if name not in GROUP_FILTERS:
                with self._reported():
                    function = load_user_object(name, recipe_dir=recipe_dir, key=key)
                    _check_accepts(function, key, name, "group")

    def _read(
        self, config: RunConfig, key: str, sources: Sequence[SourceConfig], rows: list[Row]
    ) -> list[SourceSample]:
        """Read and check the first rows of each source, appending them to `rows`."""
        samples = []
        worker = config.rollout_worker.type
        columns = tuple(getattr(config.data, name) for name in _COLUMNS.get(worker, ()))
        for index, source in enumerate(sources):
            with self._reported():
                found = open_source(
                    source,
                    data=config.data,
                    recipe_dir=self._loaded.recipe_dir,
                    limit=ROWS_READ,
                    needs_prompt=worker != "custom",
                    needs_columns=columns,
                    key=f"{key}.{index}",
                )
                rows += found.rows
                count = self._count(source, len(found.rows))
                samples.append(
                    SourceSample(name=found.name, num_read=len(found.rows), num_items=count)
                )
        with self._reported():
            keep = load_filter(config.data, recipe_dir=self._loaded.recipe_dir)
            if keep is not None:
                _check_accepts(keep, "data.filter", config.data.filter or "", "row")
        return samples

    def _count(self, source: SourceConfig, num_read: int) -> int | None:
        """Items of a file or of a sized factory result; None when counting takes too long."""
        if num_read < ROWS_READ:
            return num_read
        return count_items(source, self._loaded.recipe_dir)

    def _render(self, config: RunConfig, rows: Sequence[Row]) -> RenderedPrompts | None:
        if self._renderer is None or not rows or config.rollout_worker.type == "custom":
            return None
        with self._reported():
            builder = PromptBuilder(self._renderer, config.rollout_worker, config.data)
            prompts = [builder.of_row(row).token_ids for row in rows]
            first = [int(token) for token in prompts[0]]
            bos = self._renderer.bos_token_id
            leading = 0
            while bos is not None and leading < len(first) and first[leading] == bos:
                leading += 1
            return RenderedPrompts(
                first_text=self._renderer.decode(prompts[0], skip_special_tokens=False),
                lengths=[len(prompt) for prompt in prompts],
                num_leading_bos=leading,
            )
        return None

    def _probe_reward(self, config: RunConfig, rows: Sequence[Row]) -> None:
        """Score the first row's own answer, the way a run does (FR-059)."""
        worker = config.rollout_worker
        if worker.reward is None:
            return
        with self._reported():
            text = asyncio.run(_score_own_answer(config, self._loaded.recipe_dir, rows))
            if text:
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


def read_model_size(folder: Path) -> ModelSize | None:
    """Size from config.json and the headers of the safetensors files; no weight is read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        count = sum(count_elements(file) for file in sorted(folder.glob("*.safetensors")))
    except (ValueError, OSError, struct.error) as error:
        raise ConfigError(f"model folder {folder} cannot be read: {error}") from error
    return model_size(config, count or None)


def count_elements(file: Path) -> int:
    """Elements of all tensors of a safetensors file, from its header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    shapes = (tensor["shape"] for name, tensor in header.items() if name != "__metadata__")
    return sum(math.prod(shape) for shape in shapes)


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
