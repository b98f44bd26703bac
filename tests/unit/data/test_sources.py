"""open_source and leave_out: what enters as data, and what is said of what does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from nexrl.config.schema import DataConfig, SourceConfig
from nexrl.data.sources import Source, leave_out, load_filter, open_source
from nexrl.errors import ConfigError, DataError, UserCodeError

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "2", "tags": ["easy"]},
    {"prompt": "2+2=\u00e9", "answer": "4", "tags": []},
]


def open_path(path: Path | str, recipe_dir: Path = Path("."), **settings: Any) -> Source:
    limit, needs_prompt = settings.pop("limit", None), settings.pop("needs_prompt", True)
    needs_columns = settings.pop("needs_columns", ())
    return open_source(
        SourceConfig(path=str(path)),
        data=DataConfig(**settings),
        recipe_dir=recipe_dir,
        limit=limit,
        needs_prompt=needs_prompt,
        needs_columns=needs_columns,
    )


def write(path: Path, *lines: str | bytes | Mapping[str, Any]) -> Path:
    """One line each; a mapping is written as JSON."""
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else _text(line).encode()) + b"\n" for line in lines
        )
    )
    return path


def _text(line: str | Mapping[str, Any]) -> str:
    return line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)


def save_dataset(folder: Path, rows: list[dict[str, Any]], **state: Any) -> Path:
    """The layout of `datasets.Dataset.save_to_disk`, in two shards."""
    folder.mkdir(parents=True)
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    table = pa.Table.from_pylist(rows)
    for name, shard in zip(names, (table.slice(0, 1), table.slice(1)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as file:
            with pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(shard)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"} | state
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


# --- formats ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "dataset"])
def test_every_format_gives_the_same_rows_ids_and_fingerprint(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"train.{kind}"
    if kind == "jsonl":
        write(path, *ROWS)
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path = save_dataset(tmp_path / "train", ROWS)
    source = open_path(path)
    reference = open_path(write(tmp_path / "train.ndjson", *ROWS))
    assert list(source.rows) == ROWS
    assert list(source.item_ids) == ["train:0", "train:1"]
    assert source.fingerprint == reference.fingerprint


def test_csv_fields_are_strings_and_may_hold_commas_and_lines(tmp_path: Path) -> None:
    source = open_path(write(tmp_path / "a.csv", "prompt,answer", '"1,\n2",7', "", "3,4"))
    assert list(source.rows) == [{"prompt": "1,\n2", "answer": "7"}, {"prompt": "3", "answer": "4"}]
    assert list(source.places) == [f"{tmp_path / 'a.csv'}:2", f"{tmp_path / 'a.csv'}:5"]


def test_byte_order_mark_is_not_part_of_the_first_column(tmp_path: Path) -> None:
    source = open_path(write(tmp_path / "a.csv", b"\xef\xbb\xbfprompt", "x"))
    assert source.rows[0] == {"prompt": "x"}


def test_dataset_folder_with_several_splits_asks_for_one(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_dataset(tmp_path / "ds" / split, ROWS)
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"splits \['test', 'train'\]; name one of them: .*train"):
        open_path(tmp_path / "ds")
    assert len(open_path(tmp_path / "ds" / "test").rows) == 2


def test_only_split_of_a_dataset_dict_is_taken(tmp_path: Path) -> None:
    save_dataset(tmp_path / "ds" / "train", ROWS)
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert list(open_path(tmp_path / "ds").rows) == ROWS


def test_dataset_saved_with_an_index_of_rows_is_refused(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "ds", ROWS, _indices_data_files=[{"filename": "i.arrow"}])
    with pytest.raises(ConfigError, match="flatten_indices"):
        open_path(folder)


def test_limit_reads_no_further_than_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS, "not JSON")
    assert len(open_path(path, limit=2).rows) == 2


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r'pip install "nexrl\[parquet\]"'):
        open_path(tmp_path / "a.parquet")


def test_reading_text_files_imports_no_pyarrow() -> None:
    code = "import sys, nexrl.data.data_loader; assert not {'pyarrow', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- bad files and rows -----------------------------------------------------------------------

GOOD = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("name", "lines", "named"),
    [
        ("a.jsonl", [], "has no rows"),
        ("a.jsonl", ["", " "], "has no rows"),
        ("a.json", [], "has no rows"),
        ("a.json", ["[]"], "has no rows"),
        ("a.csv", ["prompt,answer"], "has no rows"),
        ("a.jsonl", [GOOD, "{oops}"], r"a\.jsonl:2 is not JSON: .*column 2: \{oops\}"),
        ("a.jsonl", ["[", GOOD, "]"], r"belongs into a file named \.json"),
        ("a.jsonl", [GOOD, "[1]"], r"a\.jsonl:2 must be a JSON object .*, got an array: \[1\]"),
        ("a.jsonl", ["null"], "got null"),
        ("a.json", [GOOD, GOOD], r"a\.json:2 is not JSON: Extra data .* named \.jsonl"),
        ("a.json", [GOOD], "must hold a JSON array of objects, got an object"),
        ("a.json", ["[1]"], r"a\.json row 0 must be a JSON object"),
        ("a.jsonl", [GOOD, b'{"prompt": "\xe9"}'], r":2 is not UTF-8: byte 0xe9 at offset 28 "),
        ("a.csv", [b"\xef\xbb\xbfprompt", b"\xe9"], r":2 is not UTF-8: byte 0xe9 at offset 10 "),
        ("a.csv", [b"\xff\xfep\0"], "not UTF-8 but UTF-16"),
        ("a.csv", ["prompt,answer", "a,b", "c"], r"a\.csv:3 has 1 fields, the header has 2"),
        ("a.csv", ["prompt,answer", "a,b,c"], r"a\.csv:2 has 3 fields, the header has 2"),
        ("a.csv", ["prompt,prompt", "a,b"], r"must be unique and not empty, got \['prompt'\]"),
        ("a.csv", ["prompt", 'a"b" c', '"open'], r"a\.csv:3 is not CSV"),
        ("a.parquet", ["no"], r"a\.parquet is not a readable parquet file"),
    ],
)
def test_bad_file_is_named_with_its_line(
    tmp_path: Path, name: str, lines: list[str | bytes], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        open_path(write(tmp_path / name, *lines))


def test_row_without_the_prompt_column_gets_a_mapping(tmp_path: Path) -> None:
    """FR-073: found before anything heavy starts; columns, expected names and the fix are listed."""
    path = write(tmp_path / "a.jsonl", {"question": "2+2?", "answer": "4"})
    with pytest.raises(DataError) as caught:
        open_path(path)
    for words in ("a.jsonl:1", "answer, question", "data.prompt_key: question", "messages_key"):
        assert words in str(caught.value)
    assert len(open_path(path, prompt_key="question").rows) == 1


def test_nearest_column_is_proposed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"Prompt": "a", "text": "b"})
    with pytest.raises(DataError, match=r"set data\.prompt_key: Prompt"):
        open_path(path)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": ""}, "column 'prompt' is empty"),
        ({"prompt": 3}, "must be a string, got int"),
        ({"prompt": [{"role": "user"}]}, "chat messages are read from data.messages_key"),
        ({"messages": []}, "must be a non-empty list of messages"),
        ({"messages": "hi"}, "must be a non-empty list of messages, got str"),
        ({"messages": [{"content": "hi"}]}, "message 0 must be a mapping with a `role`"),
        ({"prompt": None, "messages": None}, "has neither a prompt"),
    ],
)
def test_unusable_prompt_is_refused(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=named):
        open_path(write(tmp_path / "a.jsonl", row))


def test_custom_workers_name_their_own_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"task": "x"}, {"task": None})
    assert len(open_path(path, needs_prompt=False).rows) == 2
    with pytest.raises(DataError, match=r"a\.jsonl:2 has no column 'task'; its columns are task"):
        open_path(path, needs_prompt=False, needs_columns=("task",))


def test_item_ids_come_from_the_column_and_are_unique(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": "a", "id": i} for i in (7, "x", 7)))
    assert list(open_path(path, item_id_key="id", limit=2).item_ids) == ["7", "x"]
    with pytest.raises(DataError, match=r"a\.jsonl:3 has the item id '7', which .*a\.jsonl:1 has"):
        open_path(path, item_id_key="id")
    with pytest.raises(DataError, match="must be a string or integer, got None"):
        open_path(path, item_id_key="uid")


def test_missing_file_names_both_places_and_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *ROWS)
    with pytest.raises(ConfigError, match=r"did you mean 'train\.jsonl'"):
        open_path("trian.jsonl", tmp_path)


def test_unknown_suffix_lists_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'\.txt' is not one of .*'\.jsonl'"):
        open_path(write(tmp_path / "a.txt", "x"))


def test_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *ROWS)
    with pytest.raises(ConfigError, match=r"neither state.json nor dataset_dict.json.*a\.jsonl"):
        open_path(tmp_path)


@pytest.mark.parametrize("given", [{}, {"path": "a.jsonl", "factory": "a.py:b"}])
def test_source_has_exactly_one_origin(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources\.0 needs exactly one"):
        open_source(SourceConfig(**given), data=DataConfig(), recipe_dir=Path("."))


def test_fingerprint_tells_any_change_of_content_order_or_name(tmp_path: Path) -> None:
    texts = ["abc", "acb", "ab", "abd"]
    prints = set()
    for text in texts:
        path = write(tmp_path / "a.jsonl", *({"prompt": c} for c in text))
        prints.add(open_path(path).fingerprint)
    prints.add(open_path(write(tmp_path / "b.jsonl", *({"prompt": c} for c in "abc"))).fingerprint)
    assert len(prints) == 5


# --- factories --------------------------------------------------------------------------------

FACTORIES = """
def pairs(count):
    for i in range(count):
        yield {"prompt": f"{i}+1=", "what": object()}

def none_inside():
    yield {"prompt": "a"}
    yield None

def text():
    return "abc"

def broken():
    yield {"prompt": "a"}
    raise ZeroDivisionError("boom")

THREE = 3
"""


def open_factory(folder: Path, name: str, **arguments: Any) -> Source:
    (folder / "made.py").write_text(FACTORIES)
    source = SourceConfig(factory=f"made.py:{name}", arguments=arguments)
    return open_source(source, data=DataConfig(), recipe_dir=folder)


def test_factory_gets_its_arguments_and_names_the_source(tmp_path: Path) -> None:
    source = open_factory(tmp_path, "pairs", count=3)
    assert [row["prompt"] for row in source.rows] == ["0+1=", "1+1=", "2+1="]
    assert list(source.item_ids) == ["pairs:0", "pairs:1", "pairs:2"]


def test_fingerprint_of_factory_rows_does_not_depend_on_addresses(tmp_path: Path) -> None:
    first, second = (open_factory(tmp_path, "pairs", count=3) for _ in range(2))
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("name", "error", "named"),
    [
        ("none_inside", DataError, "row 1 must be a mapping of columns, got NoneType"),
        ("text", DataError, "iterable of mappings, got str"),
        ("broken", UserCodeError, r"raised ZeroDivisionError: boom \(.*made\.py:15\)"),
        ("THREE", ConfigError, "a function or class is expected"),
    ],
)
def test_bad_factory_is_named(
    tmp_path: Path, name: str, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        open_factory(tmp_path, name)


def test_wrong_arguments_name_the_call(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"data\.sources\.0\.factory: made.py:pairs"):
        open_factory(tmp_path, "pairs", number=3)


# --- leaving out ------------------------------------------------------------------------------


def test_overlong_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    """FR-080, FR-082: the length is that of the rendered prompt, on every path."""
    source = open_path(write(tmp_path / "a.jsonl", *({"prompt": "x" * n} for n in (1, 9, 2))))
    left = leave_out(source, max_prompt_tokens=6, prompt_length=lambda row: len(row["prompt"]) + 4)
    assert list(left.item_ids) == ["a:0", "a:2"]
    assert left.left_out == {"overlong": ("a:1",)}


def test_nothing_left_is_an_error_that_names_the_settings(tmp_path: Path) -> None:
    source = open_path(write(tmp_path / "a.jsonl", *ROWS))
    with pytest.raises(ConfigError, match=r"none of 2 rows is left \{'overlong': 2\}"):
        leave_out(source, max_prompt_tokens=1, prompt_length=lambda row: 2)


FILTERS = """
def short(row): return len(row["answer"]) < 2
def forgets(row): row["answer"]
def raises(row): return row["nothing"]
"""


def apply_filter(folder: Path, name: str) -> Source:
    (folder / "filters.py").write_text(FILTERS)
    rows = [{"prompt": "a", "answer": text} for text in ("1", "22", "3")]
    source = open_path(write(folder / "a.jsonl", *rows))
    keep = load_filter(DataConfig(filter=f"filters.py:{name}"), recipe_dir=folder)
    return leave_out(source, keep=keep)


def test_user_filter_keeps_rows_for_which_it_is_true(tmp_path: Path) -> None:
    source = apply_filter(tmp_path, "short")
    assert list(source.item_ids) == ["a:0", "a:2"]
    assert source.left_out == {"filter": ("a:1",)}


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("forgets", r"a\.jsonl:1 returned None; it must return True"),
        ("raises", r"a\.jsonl:1 raised KeyError: 'nothing' \(.*filters\.py:4\)"),
    ],
)
def test_bad_filter_is_named_with_the_row(tmp_path: Path, name: str, named: str) -> None:
    with pytest.raises(UserCodeError, match=named):
        apply_filter(tmp_path, name)
