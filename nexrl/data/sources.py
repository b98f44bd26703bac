"""One source of data items: a file, a dataset folder or a Python factory, checked row by row.

`open_source` is the door of all data: what passes has the columns a worker needs, and an id of its
own for each row. `leave_out` then applies the recipe's filter and the length limit, and counts
what it removes. The DataLoader orders what is left; the Validator goes through it from the front.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nexrl.config.rules import source_name
from nexrl.config.schema import DataConfig, SourceConfig
from nexrl.config.user_code import load_user_object
from nexrl.data.file_formats import PlacedRow, read_rows
from nexrl.errors import ConfigError, DataError, UserCodeError, user_frame

logger = logging.getLogger(__name__)

Keep = Callable[[Mapping[str, Any]], bool]
PromptLength = Callable[[Mapping[str, Any]], int]
"""Tokens of a row's rendered prompt, template included (FR-082)."""

MAX_FACTORY_ROWS = 10_000_000
"""Rows after which a factory is taken to be endless."""
_END = object()
USUAL_PROMPT_COLUMNS = ("question", "problem", "instruction", "query", "input", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows of one source, in file order, all in memory."""

    name: str
    """Name in metrics and default item ids."""
    rows: Sequence[Mapping[str, Any]]
    """Columns of each item."""
    item_ids: Sequence[str]
    """Stable id of each item; unique."""
    places: Sequence[str]
    """Where each row stands: file and line, for messages."""
    fingerprint: str
    """blake2b-128 over ids and contents, in order; equal exactly for equal data."""
    weight: float = 1.0
    """Share of draws relative to other sources."""
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of items left out, by reason: `filter`, `overlong`."""


def open_source(
    source: SourceConfig,
    *,
    data: DataConfig,
    recipe_dir: Path,
    limit: int | None = None,
    needs_prompt: bool = True,
    needs_columns: Sequence[str] = (),
    key: str = "data.sources.0",
) -> Source:
    """Read and check a source; at most `limit` rows from its front.

    `needs_prompt` is false for custom workers, which read columns of their own; `needs_columns`
    are further ones that every row must have. `key` names the source in messages. Raises
    ConfigError for what the configuration gets wrong, DataError for what the data gets wrong,
    UserCodeError for a factory that raises.
    """
    placed = _rows_of(source, recipe_dir=recipe_dir, key=key)
    name = source_name(source)
    rows: list[Mapping[str, Any]] = []
    item_ids: list[str] = []
    places: list[str] = []
    seen: dict[str, str] = {}
    digest = hashlib.blake2b(digest_size=16)
    for number, (place, row) in enumerate(itertools.islice(placed, limit)):
        if needs_prompt:
            _check_prompt(row, place, data)
        for column in needs_columns:
            if row.get(column) is None:
                raise DataError(f"{place} has no column {column!r}; {_columns(row)}")
        item_id = _item_id(row, number, place, name=name, key=data.item_id_key)
        if item_id in seen:
            raise DataError(f"{place} has the item id {item_id!r}, which {seen[item_id]} has too")
        seen[item_id] = place
        digest.update(f"{item_id}\x1f{_stable_text(row)}\n".encode(errors="surrogatepass"))
        rows.append(row)
        item_ids.append(item_id)
        places.append(place)
    if not rows:
        raise DataError(f"{key}: {source.path or source.factory} has no rows")
    return Source(
        name=name,
        rows=rows,
        item_ids=item_ids,
        places=places,
        fingerprint=digest.hexdigest(),
        weight=source.weight,
    )


def open_sources(
    sources: Sequence[SourceConfig],
    *,
    section: str,
    data: DataConfig,
    recipe_dir: Path,
    keep: Keep | None = None,
    limit: int | None = None,
    prompt_length: PromptLength | None = None,
    needs_prompt: bool = True,
) -> list[Source]:
    """All sources of a section (`data` or `validate`), without rows that are filtered or too long.

    `prompt_length` counts the tokens of a row's rendered prompt and is needed exactly when
    `data.max_prompt_tokens` is set. The rest is as for `open_source` and `leave_out`.
    """
    if not sources:
        raise ConfigError(f"{section}.sources is empty; give at least one path or factory")
    if data.max_prompt_tokens is not None and prompt_length is None:
        raise ConfigError(
            f"data.max_prompt_tokens is {data.max_prompt_tokens}, but this kind of rollout worker "
            "renders no prompt that could be measured; remove it, or use data.filter"
        )
    return [
        leave_out(
            open_source(
                source,
                data=data,
                recipe_dir=recipe_dir,
                limit=limit,
                needs_prompt=needs_prompt,
                key=f"{section}.sources.{i}",
            ),
            keep=keep,
            max_prompt_tokens=data.max_prompt_tokens,
            prompt_length=prompt_length,
        )
        for i, source in enumerate(sources)
    ]


def leave_out(
    source: Source,
    *,
    keep: Keep | None = None,
    max_prompt_tokens: int | None = None,
    prompt_length: PromptLength | None = None,
) -> Source:
    """The source without rows that `keep` rejects or whose prompt is too long; both are counted.

    Nothing left is an error, because a run on no data would wait for ever.
    """
    left_out: dict[str, list[str]] = {}
    kept: list[int] = []
    for i, row in enumerate(source.rows):
        if keep is not None and not _user_verdict(keep, row, source.places[i]):
            left_out.setdefault("filter", []).append(source.item_ids[i])
        elif (
            max_prompt_tokens is not None
            and prompt_length is not None
            and prompt_length(row) > max_prompt_tokens
        ):
            left_out.setdefault("overlong", []).append(source.item_ids[i])
        else:
            kept.append(i)
    for reason, ids in left_out.items():
        logger.info(
            "source %s: %d of %d items left out (%s): %s%s",
            *(source.name, len(ids), len(source.rows), reason),
            *(", ".join(ids[:10]), " ..." if len(ids) > 10 else ""),
        )
    if not kept:
        counts = {reason: len(ids) for reason, ids in left_out.items()}
        raise ConfigError(
            f"source {source.name}: none of {len(source.rows)} rows is left {counts}; see "
            f"data.filter and data.max_prompt_tokens ({max_prompt_tokens})"
        )
    return replace(
        source,
        rows=[source.rows[i] for i in kept],
        item_ids=[source.item_ids[i] for i in kept],
        places=[source.places[i] for i in kept],
        left_out={reason: tuple(ids) for reason, ids in left_out.items()},
    )


def load_filter(data: DataConfig, *, recipe_dir: Path) -> Keep | None:
    """The user function of `data.filter`, or None."""
    if data.filter is None:
        return None
    keep: Keep = load_user_object(data.filter, recipe_dir=recipe_dir, key="data.filter")
    return keep


def _rows_of(source: SourceConfig, *, recipe_dir: Path, key: str) -> Iterator[PlacedRow]:
    if (source.path is None) == (source.factory is None):
        given = "neither" if source.path is None else "both"
        raise ConfigError(f"{key} needs exactly one of path and factory, got {given}")
    if source.path is not None:
        return read_rows(_find(source.path, recipe_dir=recipe_dir, key=f"{key}.path"))
    return _rows_of_factory(source, recipe_dir=recipe_dir, key=key)


def _find(path: str, *, recipe_dir: Path, key: str) -> Path:
    """A path relative to the recipe folder, else to the working directory."""
    candidates = [recipe_dir / path, Path(path)]
    found = next((candidate for candidate in candidates if candidate.exists()), None)
    if found is not None:
        return found
    name, folder = candidates[0].name, candidates[0].parent
    present = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(name, present, n=1)
    tried = " and ".join(dict.fromkeys(str(c.absolute()) for c in candidates))
    raise ConfigError(
        f"{key}: {path!r} does not exist; tried {tried}"
        f"{f'; did you mean {near[0]!r}?' if near else ''}"
    )


def _rows_of_factory(source: SourceConfig, *, recipe_dir: Path, key: str) -> Iterator[PlacedRow]:
    reference = source.factory or ""
    factory = load_user_object(reference, recipe_dir=recipe_dir, key=f"{key}.factory")
    what = f"{key}.factory: {reference}(**{source.arguments})"
    made = _call(lambda: factory(**source.arguments), what)
    if not isinstance(made, Iterable) or isinstance(made, str | bytes | Mapping):
        raise DataError(
            f"{what} must return a sequence or iterable of mappings, got {type(made).__name__}"
        )
    iterator = _call(lambda: iter(made), what)
    for number in itertools.count():
        row = _call(lambda: next(iterator, _END), what)
        if row is _END:
            return
        place = f"{reference} row {number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{place} must be a mapping of columns, got {type(row).__name__}")
        if number == MAX_FACTORY_ROWS:
            raise DataError(f"{what} gave {number} rows and has no end")
        yield PlacedRow(place, dict(row))


def _call(function: Callable[[], Any], what: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise UserCodeError(
            f"{what} raised {type(error).__name__}: {error} ({user_frame(error)})"
        ) from error


def _user_verdict(keep: Keep, row: Any, place: str) -> bool:
    verdict = _call(lambda: keep(row), f"data.filter on {place}")
    if not isinstance(verdict, bool | np.bool_):
        raise UserCodeError(
            f"data.filter on {place} returned {verdict!r}; it must return True (keep) or False"
        )
    return bool(verdict)


def _check_prompt(row: Mapping[str, Any], place: str, data: DataConfig) -> None:
    prompt = row.get(data.prompt_key)
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{place}: column {data.prompt_key!r} is empty")
        return
    if prompt is not None:
        hint = ""
        if isinstance(prompt, list):
            hint = f"; chat messages are read from data.messages_key ({data.messages_key!r})"
        raise DataError(
            f"{place}: column {data.prompt_key!r} must be a string, got "
            f"{type(prompt).__name__}{hint}"
        )
    messages = row.get(data.messages_key)
    if messages is None:
        raise DataError(_no_prompt(row, place, data))
    _check_messages(messages, f"{place}: column {data.messages_key!r}")


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(
            f"{where} must be a non-empty list of messages, got {type(messages).__name__} "
            f"{messages!r:.60}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: message {i} must be a mapping with a `role` and `content`, got "
                f"{message!r:.80}"
            )


def _no_prompt(row: Mapping[str, Any], place: str, data: DataConfig) -> str:
    columns = [str(column) for column in row]
    near = difflib.get_close_matches(data.prompt_key, columns, n=1)
    usual = [column for column in USUAL_PROMPT_COLUMNS if column in columns]
    guess = (near or usual or ["<column>"])[0]
    return (
        f"{place} has neither a prompt (data.prompt_key: {data.prompt_key}) nor messages "
        f"(data.messages_key: {data.messages_key}); {_columns(row)}; to use a column as the "
        f"prompt, set data.prompt_key: {guess}"
    )


def _columns(row: Mapping[str, Any]) -> str:
    return f"its columns are {', '.join(sorted(map(str, row))) or '(none)'}"


def _item_id(row: Mapping[str, Any], number: int, place: str, *, name: str, key: str | None) -> str:
    if key is None:
        return f"{name}:{number}"
    value = row.get(key)
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise DataError(
            f"{place}: the item id (data.item_id_key: {key}) must be a string or integer, got "
            f"{value!r}; {_columns(row)}"
        )
    return str(value)


def _stable_text(row: Mapping[str, Any]) -> str:
    """A row as text that is equal in every process; objects without content count as their type."""
    try:
        return json.dumps(row, sort_keys=True, default=_stable_value)
    except TypeError:
        # Keys of mixed types cannot be sorted; their order in the row is stable too.
        return json.dumps({str(k): v for k, v in row.items()}, default=_stable_value, skipkeys=True)


def _stable_value(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return f"<{type(value).__qualname__}>"
