"""DataLoader: the order of draws, mixture, epochs, and resume by consumed draws."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexrl.config.schema import DataConfig, SourceConfig
from nexrl.data.data_loader import DataLoader, create_validation_draws
from nexrl.data.sources import Source
from nexrl.errors import ConfigError, DataError, InvariantError
from nexrl.types import Draw


def make_source(name: str = "s", num_rows: int = 10, **fields: Any) -> Source:
    fields.setdefault("item_ids", [f"{name}:{i}" for i in range(num_rows)])
    fields.setdefault("fingerprint", f"content of {name} with {num_rows} rows")
    rows = [{"prompt": f"{i}"} for i in range(num_rows)]
    return Source(name=name, rows=rows, places=[f"{name}.jsonl"] * num_rows, **fields)


def make_loader(num_rows: int = 10, **settings: Any) -> DataLoader:
    sources: Sequence[Source] = settings.pop("sources", None) or [make_source(num_rows=num_rows)]
    return DataLoader(sources, **{"seed": 0, "epochs": 1, **settings})


def resumed(state: Mapping[str, Any], num_rows: int = 10, **settings: Any) -> DataLoader:
    """A fresh loader that went through JSON, as a checkpoint does."""
    loader = make_loader(num_rows, **settings)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def rest(loader: DataLoader) -> Iterator[Draw]:
    while (draw := loader.next_draw()) is not None:
        yield draw


def numbers(draws: Sequence[Draw]) -> list[int]:
    return [int(draw.row["prompt"]) for draw in draws]


def identity(draw: Draw) -> tuple[str, int, int]:
    return draw.item_id, draw.draw, draw.order


# --- order ------------------------------------------------------------------------------------


def test_each_epoch_visits_every_item_once_and_then_ends() -> None:
    """FR-124: three items in batches of two; nothing repeats early, nothing is dropped."""
    draws = list(rest(make_loader(3, epochs=2)))
    assert [draw.draw for draw in draws] == [0, 0, 0, 1, 1, 1]
    assert sorted(numbers(draws[:3])) == sorted(numbers(draws[3:])) == [0, 1, 2]
    assert [draw.order for draw in draws] == list(range(6))


def test_without_epochs_it_never_ends() -> None:
    loader = make_loader(3, epochs=None)
    draws = [loader.next_draw() for _ in range(100)]
    assert draws[-1] is not None
    assert draws[-1].draw == 33


def test_order_is_that_of_the_file_without_shuffle() -> None:
    assert numbers(list(rest(make_loader(5, shuffle=False)))) == [0, 1, 2, 3, 4]


def test_shuffle_depends_on_seed_source_and_epoch_alone() -> None:
    first, again, other = (
        numbers(list(rest(make_loader(50, seed=seed, epochs=2)))) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first[:50] != first[50:]


def test_shuffled_order_is_the_same_on_every_machine_and_version() -> None:
    """A changed order would make every checkpoint resume wrongly: this literal must stay."""
    assert numbers(list(rest(make_loader(8, seed=3)))) == [3, 1, 7, 0, 5, 2, 6, 4]


def test_sources_are_mixed_by_weight() -> None:
    sources = [make_source("a", 7, weight=3.0), make_source("b", 5, weight=1.0)]
    loader = make_loader(sources=sources, epochs=None)
    counts = Counter(draw.source for draw in itertools.islice(rest(loader), 20_000))
    assert 0.735 < counts["a"] / 20_000 < 0.765


def test_sources_that_ended_leave_their_share_to_the_others() -> None:
    sources = [make_source("a", 2, weight=100.0), make_source("b", 30)]
    draws = list(rest(make_loader(sources=sources, epochs=2)))
    assert Counter(draw.source for draw in draws) == {"a": 4, "b": 60}
    assert len({draw.key for draw in draws}) == 64


def test_counts_say_what_there_is() -> None:
    loader = make_loader(sources=[make_source("a", 4, left_out={"overlong": ("a:9", "a:10")})])
    loader.next_draw()
    assert (loader.num_items, len(loader.state_dict()["outstanding"])) == (4, 1)
    assert loader.left_out == {"overlong": 2}


# --- resume -----------------------------------------------------------------------------------


def test_resume_issues_what_was_in_flight_again_and_then_goes_on() -> None:
    """FR-131: 0..39 trained, 40..63 in flight, 64..71 buffered, kill, resume."""
    loader = make_loader(100)
    before = [draw for _, draw in zip(range(72), rest(loader), strict=False)]
    loader.mark_consumed(draw.key for draw in before[:40])
    after = list(rest(resumed(loader.state_dict(), 100)))
    uninterrupted = list(rest(make_loader(100)))
    assert [identity(d) for d in after] == [identity(d) for d in uninterrupted[40:]]
    assert sorted(numbers(before[:40] + after)) == list(range(100))


def test_resume_keeps_gaps_left_by_groups_that_ended_out_of_order() -> None:
    loader = make_loader(10, shuffle=False)
    before = [draw for _, draw in zip(range(6), rest(loader), strict=False)]
    loader.mark_consumed([before[1].key, before[4].key])
    after = list(rest(resumed(loader.state_dict(), shuffle=False)))
    assert numbers(after) == [0, 2, 3, 5, 6, 7, 8, 9]


def test_resume_at_step_three_continues_with_items_four_and_five() -> None:
    """FR-133: four steps of two items, resumed after two steps."""
    loader = make_loader(8, shuffle=False)
    for _ in range(2):
        loader.mark_consumed([draw.key for _, draw in zip(range(2), rest(loader), strict=False)])
    continued = resumed(loader.state_dict(), 8, shuffle=False)
    assert numbers([d for _, d in zip(range(2), rest(continued), strict=False)]) == [4, 5]


def test_draw_that_was_taken_but_did_not_fit_is_in_the_state() -> None:
    """FR-134: a draw held back by somebody downstream is outstanding, so it is not lost."""
    loader = make_loader(2, shuffle=False)
    taken, held_back = loader.next_draw(), loader.next_draw()
    assert taken is not None
    assert held_back is not None
    loader.mark_consumed([taken.key])
    assert numbers(list(rest(resumed(loader.state_dict(), 2, shuffle=False)))) == [1]


def test_state_taken_right_after_a_resume_is_the_same_state() -> None:
    loader = make_loader(10, epochs=3)
    list(itertools.islice(rest(loader), 17))
    state = loader.state_dict()
    assert resumed(state, epochs=3).state_dict() == state


def test_ended_loader_stays_ended_after_resume() -> None:
    loader = make_loader(3)
    loader.mark_consumed([draw.key for draw in rest(loader)])
    assert resumed(loader.state_dict(), 3).next_draw() is None


def test_more_epochs_may_be_asked_for_at_resume() -> None:
    loader = make_loader(3)
    loader.mark_consumed([draw.key for draw in rest(loader)])
    more = list(rest(resumed(loader.state_dict(), 3, epochs=2)))
    assert [identity(d) for d in more] == [
        identity(d) for d in list(rest(make_loader(3, epochs=2)))[3:]
    ]


@pytest.mark.parametrize("num_rows", [300, 1000])
def test_resume_with_other_data_is_refused_with_both_fingerprints(num_rows: int) -> None:
    """FR-130: A of 600 rows, 500 of them yielded, resumed with B of 300 or 1000 rows."""
    state = make_loader(600).state_dict()
    with pytest.raises(ConfigError, match="cannot resume: the data set") as caught:
        resumed(state, num_rows)
    assert state["fingerprint"] in str(caught.value)
    assert make_loader(num_rows).fingerprint in str(caught.value)


def test_resume_with_another_filter_is_refused() -> None:
    kept = make_source(num_rows=10, left_out={"filter": ("s:10",)})
    with pytest.raises(ConfigError, match="the data set"):
        resumed(make_loader(10).state_dict(), sources=[kept])


@pytest.mark.parametrize("changed", [{"seed": 1}, {"shuffle": False}])
def test_resume_with_another_order_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the order \((seed|shuffle)\) is not the one"):
        resumed(make_loader().state_dict(), **changed)


@pytest.mark.parametrize("keys", [["s:99/0"], ["s:0/0", "s:0/0"]])
def test_consuming_what_is_not_outstanding_is_an_invariant_error(keys: list[str]) -> None:
    loader = make_loader(shuffle=False)
    loader.next_draw()
    with pytest.raises(InvariantError, match="consumed but not outstanding"):
        loader.mark_consumed(keys)


ACTIONS = st.lists(st.sampled_from(["next", "next", "consume", "save", "kill"]), max_size=120)


@settings(deadline=None, max_examples=150)
@given(ACTIONS, st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_any_interleaving_consumes_each_visit_exactly_once(
    actions: list[str], sizes: list[int], epochs: int, data: st.DataObject
) -> None:
    """What was consumed after the last save is rolled back by a kill, as the weights are."""
    sources = [make_source(f"s{i}", n, weight=i + 1.0) for i, n in enumerate(sizes)]
    loader = make_loader(sources=sources, epochs=epochs)
    held: dict[str, Draw] = {}
    consumed: dict[str, Draw] = {}
    saved, consumed_at_save = loader.state_dict(), dict(consumed)
    for action in [*actions, *["next", "consume"] * (sum(sizes) * epochs + len(actions))]:
        if action == "next" and (draw := loader.next_draw()) is not None:
            assert draw.key not in held
            assert draw.key not in consumed
            held[draw.key] = draw
        elif action == "consume" and held:
            key = data.draw(st.sampled_from(sorted(held)))
            consumed[key] = held.pop(key)
            loader.mark_consumed([key])
        elif action == "save":
            saved, consumed_at_save = loader.state_dict(), dict(consumed)
        elif action == "kill":
            held, consumed = {}, dict(consumed_at_save)
            loader = resumed(saved, sources=sources, epochs=epochs)
    everything = [identity(d) for d in rest(make_loader(sources=sources, epochs=epochs))]
    assert sorted(map(identity, consumed.values())) == sorted(everything)


# --- opening ----------------------------------------------------------------------------------


def write_rows(path: Path, num_rows: int) -> SourceConfig:
    path.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(num_rows)))
    return SourceConfig(path=path.name)


def test_open_reads_filters_and_counts(tmp_path: Path) -> None:
    config = DataConfig(
        sources=(write_rows(tmp_path / "a.jsonl", 12),), max_prompt_tokens=1, epochs=1
    )
    loader = DataLoader.open(
        config, recipe_dir=tmp_path, seed=0, prompt_length=lambda row: len(row["prompt"])
    )
    assert sorted(numbers(list(rest(loader)))) == list(range(10))
    assert loader.left_out == {"overlong": 2}


def test_length_limit_without_a_way_to_measure_is_refused(tmp_path: Path) -> None:
    config = DataConfig(sources=(write_rows(tmp_path / "a.jsonl", 1),), max_prompt_tokens=1)
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens is 1, but"):
        DataLoader.open(config, recipe_dir=tmp_path, seed=0)


def test_no_source_is_refused(tmp_path: Path) -> None:
    """Also of a loader that is opened from Python, where no rule of the configuration is asked."""
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        DataLoader.open(DataConfig(), recipe_dir=tmp_path, seed=0)
    with pytest.raises(ConfigError, match=r"validate\.sources is empty"):
        create_validation_draws([], data=DataConfig(), recipe_dir=tmp_path)


def test_sources_need_distinct_names_and_ids() -> None:
    with pytest.raises(ConfigError, match="two sources are named 's'"):
        make_loader(sources=[make_source(), make_source(item_ids=[f"{i}" for i in range(10)])])
    shared = [make_source(name, 1, item_ids=["x"]) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="sources 'a' and 'b' both have an item 'x'"):
        make_loader(sources=shared)


def test_bad_row_of_a_later_source_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n{}\n')
    sources = (write_rows(tmp_path / "a.jsonl", 1), SourceConfig(path="b.jsonl"))
    with pytest.raises(DataError, match=r"b\.jsonl:2 has neither a prompt"):
        DataLoader.open(DataConfig(sources=sources), recipe_dir=tmp_path, seed=0)


def test_validation_draws_keep_the_order_of_the_files(tmp_path: Path) -> None:
    sources = [write_rows(tmp_path / f"{name}.jsonl", 3) for name in "ab"]
    draws = create_validation_draws(sources, data=DataConfig(), recipe_dir=tmp_path, max_items=4)
    assert [draw.item_id for draw in draws] == ["a:0", "a:1", "a:2", "b:0"]
    assert [draw.order for draw in draws] == [0, 1, 2, 3]


def test_validation_applies_the_length_limit_but_not_the_training_filter(tmp_path: Path) -> None:
    data = DataConfig(max_prompt_tokens=1, filter="missing.py:filter")
    draws = create_validation_draws(
        [write_rows(tmp_path / "a.jsonl", 12)],
        data=data,
        recipe_dir=tmp_path,
        max_items=10,
        prompt_length=lambda row: len(row["prompt"]),
    )
    assert numbers(draws) == list(range(10))
