"""The loader: files, inheritance, references, overrides, and where each value came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.config.loader import load_run_config
from nexrl.errors import ConfigError

MakeRecipe = Callable[..., Path]


def refused(recipe: Path, *overrides: str) -> str:
    """The text of the error that a recipe must raise."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return str(caught.value)


def test_a_recipe_is_a_folder_or_its_file(make_recipe: MakeRecipe) -> None:
    folder = make_recipe()
    by_folder, by_file = load_run_config(folder), load_run_config(folder / "rl_train.yaml")
    assert by_folder.config == by_file.config
    assert by_folder.recipe_dir == folder.resolve() == by_file.recipe_dir


def test_a_folder_without_recipe_and_a_missing_one_are_named(tmp_path: Path) -> None:
    assert "has no rl_train.yaml" in refused(tmp_path)
    assert "there is no recipe" in refused(tmp_path / "nowhere")


def test_later_defaults_win_and_the_file_wins_over_them(make_recipe: MakeRecipe) -> None:
    folder = make_recipe(files={"fast.yaml": "trainer: {num_steps: 7}\nseed: 5\n"})
    (folder / "rl_train.yaml").write_text("defaults: [valid.yaml, fast.yaml]\nseed: 6\n")
    config = load_run_config(folder).config
    assert (config.trainer.num_steps, config.seed, config.data.batch_size) == (7, 6, 4)


def test_mappings_merge_key_by_key_and_lists_are_replaced(make_recipe: MakeRecipe) -> None:
    folder = make_recipe("data:\n  shuffle: false\n  sources: [{path: other.jsonl}]\n")
    data = load_run_config(folder).config.data
    assert data.batch_size == 4
    assert [source.path for source in data.sources] == ["other.jsonl"]


def test_defaults_are_relative_to_the_file_that_names_them(make_recipe: MakeRecipe) -> None:
    folder = make_recipe(files={"sub/a.yaml": "defaults: b.yaml\n", "sub/b.yaml": "seed: 9\n"})
    (folder / "rl_train.yaml").write_text("defaults: [valid.yaml, sub/a.yaml]\n")
    loaded = load_run_config(folder)
    assert loaded.config.seed == 9
    assert str(loaded.provenance["seed"]) == "sub/b.yaml:1"


def test_a_recipe_folder_can_be_inherited_from(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    make_recipe()
    variant = tmp_path / "variant"
    variant.mkdir()
    (variant / "rl_train.yaml").write_text("defaults: ../recipe\nseed: 3\n")
    assert load_run_config(variant).config.seed == 3


def test_a_cycle_of_defaults_names_its_files(make_recipe: MakeRecipe) -> None:
    folder = make_recipe(files={"a.yaml": "defaults: rl_train.yaml\n"})
    (folder / "rl_train.yaml").write_text("defaults: a.yaml\n")
    assert "rl_train.yaml -> a.yaml -> rl_train.yaml" in refused(folder)


def test_a_missing_default_names_the_line_that_asks_for_it(make_recipe: MakeRecipe) -> None:
    folder = make_recipe()
    (folder / "rl_train.yaml").write_text("seed: 1\ndefaults: [gone.yaml]\n")
    assert "no file 'gone.yaml' (rl_train.yaml:2)" in refused(folder)


@pytest.mark.parametrize("defaults", ["{a: 1}", "[1]", "[{a: b}]"])
def test_defaults_of_another_shape_are_refused(make_recipe: MakeRecipe, defaults: str) -> None:
    folder = make_recipe()
    (folder / "rl_train.yaml").write_text(f"defaults: {defaults}\n")
    assert "defaults must be a path or a list of paths" in refused(folder)


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4", "+1e-4"])
def test_every_spelling_of_a_small_number_is_a_number(make_recipe: MakeRecipe, text: str) -> None:
    folder = make_recipe(f"trainer: {{optimizer: {{lr: {text}}}}}")
    assert load_run_config(folder).config.trainer.optimizer.lr == 1e-4
    assert (
        load_run_config(folder, [f"trainer.optimizer.lr={text}"]).config.trainer.optimizer.lr
        == 1e-4
    )


def test_no_text_turns_into_something_else(make_recipe: MakeRecipe) -> None:
    folder = make_recipe("rollout_worker: {arguments: {a: no, b: 1:30, c: 2024-01-01, d: 010}}")
    arguments = load_run_config(folder).config.rollout_worker.arguments
    assert arguments == {"a": "no", "b": "1:30", "c": "2024-01-01", "d": 10}


def test_an_integer_is_fine_where_a_number_is_wanted(make_recipe: MakeRecipe) -> None:
    loaded = load_run_config(make_recipe("trainer: {optimizer: {lr: 1}}"))
    assert loaded.config.trainer.optimizer.lr == 1.0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"seed: 1\nseed: 2\n", "rl_train.yaml:2: key 'seed' appears twice"),
        (b"seed: 1\ndata: [1\n", "rl_train.yaml:3: not valid YAML"),
        (b"seed: 1\nproject_name: caf\xe9\n", "rl_train.yaml:2: not UTF-8 (byte 0xe9)"),
        (b"seed: 1\nproject_name: a\x01b\n", "rl_train.yaml:2: control character"),
        (b"- 1\n", "rl_train.yaml:1: expected a mapping"),
        (b"a: 1\n---\nb: 1\n", "rl_train.yaml:2: not valid YAML"),
        (b"a: !!python/object:x.Y {}\n", "rl_train.yaml:1: tag"),
        (b"1: 2\n", "rl_train.yaml:1: key '1' must be a text"),
        (b"a: &x [*x]\n", "rl_train.yaml:1: an anchor that contains itself"),
        (b"a: &x {b: 1}\nc:\n  <<: *x\n", "rl_train.yaml:3: merge keys"),
    ],
)
def test_a_file_that_cannot_be_read_names_file_and_line(
    make_recipe: MakeRecipe, content: bytes, expected: str
) -> None:
    folder = make_recipe()
    (folder / "rl_train.yaml").write_bytes(content)
    assert expected in refused(folder)


def test_an_empty_recipe_says_what_is_needed_first(make_recipe: MakeRecipe) -> None:
    folder = make_recipe()
    (folder / "rl_train.yaml").write_text("")
    text = refused(folder)
    assert "data.sources needs at least one source" in text
    assert "service.train_service needs a model" in text


def test_a_whole_reference_keeps_its_type_and_one_within_text_is_written_out(
    make_recipe: MakeRecipe,
) -> None:
    folder = make_recipe(
        "seed: ${data.batch_size}\nproject_name: b${data.batch_size}-${weight.mode}\n"
    )
    config = load_run_config(folder).config
    assert (config.seed, config.project_name) == (4, "b4-sync")


def test_a_reference_may_point_to_a_section_through_another_reference(
    make_recipe: MakeRecipe,
) -> None:
    folder = make_recipe(
        """
        rollout_worker: {arguments: {a: {b: 3}, again: "${rollout_worker.arguments.a}"}}
        seed: ${rollout_worker.arguments.again.b}
        validate: {sources: "${data.sources}", enabled: true}
        """
    )
    config = load_run_config(folder).config
    assert config.seed == 3
    assert config.validate_.sources == config.data.sources


def test_references_that_form_a_cycle_are_named(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe("seed: ${data.batch_size}\ndata: {batch_size: '${seed}'}"))
    chain = "data.batch_size -> seed -> data.batch_size"
    assert f". seed: references form a cycle: {chain} (rl_train.yaml:2)" in text
    assert ". data.batch_size: references form a cycle: seed -> data.batch_size -> seed" in text


def test_a_reference_to_nothing_suggests_the_nearest_key(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe("seed: ${data.batchsize}"))
    assert text == (
        "seed: ${data.batchsize} points to no key; did you mean ${data.batch_size}? (rl_train.yaml:2)"
    )


@pytest.mark.parametrize("value", ["a${seed", "${what:seed}", "x${data}"])
def test_a_malformed_reference_is_refused_at_its_line(make_recipe: MakeRecipe, value: str) -> None:
    assert "(rl_train.yaml:2)" in refused(make_recipe(f"project_name: '{value}'"))


def test_an_escaped_reference_is_a_text(make_recipe: MakeRecipe) -> None:
    loaded = load_run_config(make_recipe(r"project_name: 'a\${seed}'"))
    assert loaded.config.project_name == "a${seed}"


def test_environment_variables_take_the_type_that_the_key_wants(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXRL_TEST_STEPS", "12")
    monkeypatch.setenv("NEXRL_TEST_NAME", "2024")
    folder = make_recipe(
        """
        experiment_name: ${oc.env:NEXRL_TEST_NAME}
        trainer: {num_steps: "${oc.env:NEXRL_TEST_STEPS}"}
        seed: ${oc.env:NEXRL_TEST_SEED,7}
        """
    )
    config = load_run_config(folder).config
    assert (config.experiment_name, config.trainer.num_steps, config.seed) == ("2024", 12, 7)


def test_a_missing_environment_variable_is_named(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe("project_name: ${oc.env:NEXRL_TEST_ABSENT}"))
    assert "environment variable NEXRL_TEST_ABSENT is not set" in text
    assert "project_name" in text


def test_overrides_win_and_reach_into_lists(make_recipe: MakeRecipe) -> None:
    loaded = load_run_config(
        make_recipe(), ["data.sources.0.path=b.jsonl", "data.sources[0].weight=2", "logger=[wandb]"]
    )
    assert loaded.config.data.sources[0].path == "b.jsonl"
    assert loaded.config.data.sources[0].weight == 2.0
    assert loaded.config.logger == ("wandb",)
    assert str(loaded.provenance["data.sources.0.path"]) == "command line"


def test_overrides_are_seen_by_references(make_recipe: MakeRecipe) -> None:
    loaded = load_run_config(make_recipe("seed: ${data.batch_size}"), ["data.batch_size=8"])
    assert loaded.config.seed == 8


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.num_steps", "an override is written key=value"),
        ("=3", "an override is written key=value"),
        ("trainer.num_steps=[1", "trainer.num_steps=[1"),
        ("seed.x=1", "seed is 1, which has no keys"),
        ("data.sources.7.path=a", "has no entry '7'"),
        ("stages.rl.seed=1", "the recipe has no stages"),
        ("trainer.max_step=10", "did you mean trainer.num_steps? (command line)"),
    ],
)
def test_an_override_that_cannot_work_is_refused(
    make_recipe: MakeRecipe, override: str, expected: str
) -> None:
    assert expected in refused(make_recipe("seed: 1"), override)


def test_provenance_names_file_and_line_command_line_or_default(make_recipe: MakeRecipe) -> None:
    loaded = load_run_config(
        make_recipe("seed: 1\ntrainer:\n  num_steps: 9\n"), ["launch.run_root=r"]
    )
    origins = {key: str(origin) for key, origin in loaded.provenance.items()}
    assert origins["trainer.num_steps"] == "rl_train.yaml:4"
    assert origins["data.batch_size"] == "valid.yaml:6"
    assert origins["launch.run_root"] == "command line"
    assert origins["weight.mode"] == "default"
