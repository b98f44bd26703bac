"""Rows of data files: jsonl, json, csv, parquet, and Hugging Face dataset folders on disk.

`sources.py` asks `read_rows` for a path and gets rows one by one, each with the place it came
from, so that whatever is wrong with a row can be said with file and line. Nothing is guessed: a
file that is not what its name says is refused with a hint. pyarrow is imported only for formats
that need it; `datasets` never.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nexrl.errors import ConfigError, DataError


class PlacedRow(NamedTuple):
    """A row and its place: line of a text file, or number of a row from 0."""

    place: str
    """For people: `train.jsonl:17`, `train.parquet row 16`."""
    row: dict[str, Any]
    """Columns by name."""


def read_rows(path: Path) -> Iterator[PlacedRow]:
    """Rows of a file or dataset folder, lazily; the format is told by the suffix."""
    if path.is_dir():
        return _read_dataset_folder(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"data file {path}: suffix {path.suffix!r} is not one of {sorted(READERS)}, and it is "
            "not a Hugging Face dataset folder"
        )
    return reader(path)


def _read_jsonl(path: Path) -> Iterator[PlacedRow]:
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            hint = ""
            if number == 1 and line.lstrip().startswith("["):
                hint = "; one JSON array belongs into a file named .json"
            raise DataError(
                f"{place} is not JSON: {error.msg} at column {error.colno}: {_shorten(line)}{hint}"
            ) from error
        yield PlacedRow(place, _mapping(value, place))


def _read_json(path: Path) -> Iterator[PlacedRow]:
    text = "".join(line for _, line in _read_lines(path))
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; one object in each line belongs into a file named .jsonl"
        raise DataError(
            f"{path}:{error.lineno} is not JSON: {error.msg} at column {error.colno}"
            f"{hint if error.msg == 'Extra data' else ''}"
        ) from error
    if not isinstance(value, list):
        raise DataError(f"{path} must hold a JSON array of objects, got {_kind(value)}")
    for number, row in enumerate(value):
        place = f"{path} row {number}"
        yield PlacedRow(place, _mapping(row, place))


def _read_csv(path: Path) -> Iterator[PlacedRow]:
    reader = csv.reader((line for _, line in _read_lines(path)), strict=True)
    header: list[str] | None = None
    while True:
        start = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{path}:{start} is not CSV: {error}") from error
        if not fields:
            continue
        if header is None:
            header = _csv_header(fields, path)
            continue
        if len(fields) != len(header):
            raise DataError(
                f"{path}:{start} has {len(fields)} fields, the header has {len(header)}: "
                f"{', '.join(header)}; a comma inside a field needs quotes around the field"
            )
        yield PlacedRow(f"{path}:{start}", dict(zip(header, fields, strict=True)))


def _csv_header(fields: list[str], path: Path) -> list[str]:
    names = [name.strip() for name in fields]
    wrong = sorted({name for name in names if not name or names.count(name) > 1})
    if wrong:
        raise DataError(f"{path}:1: header names must be unique and not empty, got {wrong}")
    return names


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; DataError names the byte that is not UTF-8."""
    with path.open("rb") as file:
        offset = 0
        for number, raw in enumerate(file, start=1):
            data = _without_byte_order_mark(raw, path) if number == 1 else raw
            offset += len(raw) - len(data)
            try:
                yield number, data.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = data[error.start]
                raise DataError(
                    f"{path}:{number} is not UTF-8: byte 0x{byte:02x} at offset "
                    f"{offset + error.start} of the file; convert it, for example with "
                    "`iconv -f latin1 -t utf-8`"
                ) from error
            offset += len(data)


def _without_byte_order_mark(data: bytes, path: Path) -> bytes:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path}:1 is not UTF-8 but UTF-16; convert it with `iconv -f utf-16`")
    return data.removeprefix(codecs.BOM_UTF8)


def _read_parquet(path: Path) -> Iterator[PlacedRow]:
    pyarrow = _import_pyarrow(path)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from _rows_of_batches(file.iter_batches(), path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def _read_dataset_folder(folder: Path) -> Iterator[PlacedRow]:
    """A folder written by `Dataset.save_to_disk`, or one split of a saved `DatasetDict`."""
    splits_file = folder / "dataset_dict.json"
    if splits_file.is_file():
        splits = json.loads(splits_file.read_text(encoding="utf-8"))["splits"]
        if len(splits) != 1:
            raise ConfigError(
                f"data folder {folder} holds the splits {sorted(splits)}; name one of them: "
                f"{folder / splits[0] if splits else folder}"
            )
        return _read_dataset_folder(folder / splits[0])
    state_file = folder / "state.json"
    if not state_file.is_file():
        present = sorted(p.name for p in folder.iterdir())
        raise ConfigError(
            f"data folder {folder} has neither state.json nor dataset_dict.json, so it is not a "
            f"Hugging Face dataset saved with save_to_disk; it holds {present[:10]}"
        )
    state = json.loads(state_file.read_text(encoding="utf-8"))
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ConfigError(
            f"data folder {folder} was saved with an index of selected rows; save it again after "
            "`dataset.flatten_indices()`"
        )
    return _read_arrow_files([folder / entry["filename"] for entry in state["_data_files"]])


def _read_arrow_files(paths: list[Path]) -> Iterator[PlacedRow]:
    for path in paths:
        pyarrow = _import_pyarrow(path)
        try:
            with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
                yield from _rows_of_batches(reader, path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a readable arrow stream: {error}") from error


def _rows_of_batches(batches: Any, path: Path) -> Iterator[PlacedRow]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            yield PlacedRow(f"{path} row {number}", row)
            number += 1


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            f"data file {path} needs pyarrow, which is in the extra `parquet`: "
            'pip install "nexrl[parquet]"'
        ) from error
    return pyarrow


READERS: Mapping[str, Callable[[Path], Iterator[PlacedRow]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"{place} must be a JSON object (a mapping of columns), got {_kind(value)}: "
            f"{_shorten(json.dumps(value))}"
        )
    return value


def _kind(value: Any) -> str:
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _shorten(text: str, limit: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= limit else f"{text[:limit]}..."
