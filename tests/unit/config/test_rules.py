"""Rules between keys: what can never work is refused in words, with the line."""

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


def test_the_pool_batch_size_is_the_product_or_is_refused(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("trajectory_pool:\n  batch_size: 500\n")
    overrides = ("data.batch_size=64", "data.rollout_repeat_n=8")
    assert refused(recipe, *overrides) == (
        "trajectory_pool.batch_size must equal data.batch_size x data.rollout_repeat_n = "
        "64 x 8 = 512, got 500 (rl_train.yaml:3)"
    )
    load_run_config(recipe, [*overrides, "trajectory_pool.batch_size=512"])


def test_a_batch_that_cannot_be_split_names_the_nearest_sizes(make_recipe: MakeRecipe) -> None:
    """FR-160: sizes that do not divide are rejected with the nearest valid values."""
    text = refused(make_recipe(), "data.batch_size=100", "trainer.num_optimizer_steps=48")
    assert "data.batch_size must be a multiple of trainer.num_optimizer_steps = 48, got 100" in text
    assert "the nearest batch sizes are 96 or 144" in text
    assert "optimizer steps 25 or 50 (command line)" in text


CUSTOM_WORKER = "rollout_worker.custom_rollout_worker"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rollout_worker.type=custom"], f"needs {CUSTOM_WORKER}_module_path, which is not set"),
        (["rollout_worker.type=custom"], f"needs {CUSTOM_WORKER}_class_name, which is not set"),
        (
            [f"{CUSTOM_WORKER}_module_path=w.py"],
            f"{CUSTOM_WORKER}_module_path is used only with rollout_worker.type custom, and "
            "rollout_worker.type is single_turn",
        ),
        (["trainer.type=custom"], "needs trainer.custom_trainer_module_path, which is not set"),
        (["trainer.custom_trainer_class_name=T"], "is used only with trainer.type custom"),
        (
            ["rollout_worker.reward=null"],
            "rollout_worker.reward must be set for trainer.algorithm: grpo",
        ),
        (["rollout_worker.reward=exact"], "must be `path.py:name` or `package.module:name`"),
        (
            ["rollout_worker.reward=null", "rollout_worker.reward_arguments={a: 1}"],
            "rollout_worker.reward_arguments are keywords of rollout_worker.reward",
        ),
        (["rollout_worker.type=supervised"], "rows of supervised are trained by sft"),
        (
            ["rollout_worker.sampling.top_p=0.9"],
            "sampling.top_p must be 1 for RL training, got 0.9",
        ),
        (
            ["rollout_worker.sampling.top_k=50"],
            "sampling.top_k must be null for RL training, got 50",
        ),
        (["rollout_worker.sampling.temperature=0"], "temperature must be greater than 0 for RL"),
        (["rollout_worker.system_prompt=Hi"], "only when rollout_worker.chat_template is true"),
        (["weight.mode=batch-async"], "weight.mode must be sync, got batch-async: this version"),
        (["weight.mode=sample-async"], "weight.mode must be sync, got sample-async: this version"),
        (["weight.staleness_threshold=1"], "must be 0 with weight.mode sync, got 1"),
        (
            ["trajectory_pool.hand_out=windowed", "trajectory_pool.window=2"],
            "trajectory_pool.window must be at most weight.staleness_threshold + 1 = 1, got 2",
        ),
        (["trajectory_pool.window=2"], "used only with trajectory_pool.hand_out windowed"),
        (["data.rollout_repeat_n=1"], "a group of one always has advantage 0"),
        (
            ["trainer.num_optimizer_steps=2", "trainer.algorithm.loss.name=reinforce"],
            "loss.name reinforce is unbounded and trainer.num_optimizer_steps is 2",
        ),
        (["trainer.optimizer.betas=[0.9, 1]"], "betas.1 must be at least 0 and less than 1, got 1"),
        (["validate.enabled=true"], "validate.enabled needs validate.sources, which is empty"),
        (["trainer.stop_at_accuracy=0.5"], "trainer.stop_at_accuracy needs validation"),
        (["trainer.num_steps=0"], "there is nothing to do"),
        (["validate.success_part=''"], "validate.success_part must be a name or null"),
        (["data.sources=[]"], "data.sources needs at least one source"),
        (["data.sources=[{weight: 1}]"], "needs exactly one of path and factory, got neither"),
        (
            ["data.sources=[{path: a, factory: 'b.py:c'}]"],
            "needs exactly one of path and factory, got both",
        ),
        (["data.sources=[{path: a, arguments: {x: 1}}]"], "are keywords of a factory"),
        (["data.sources=[{path: a.csv}, {path: b/a.json}]"], "has 2 sources named 'a'"),
        (["data.sources=[{factory: f.py}]"], "data.sources.0.factory must be `path.py:name`"),
        (["data.messages_key=prompt"], "data.prompt_key and data.messages_key must differ"),
        (["data.filter=f.py"], "data.filter must be `path.py:name`"),
        (
            ["rollout_worker.failure_policy.min_group_size=3"],
            "min_group_size must be at most data.rollout_repeat_n = 2, got 3",
        ),
        (
            ["trajectory_pool.dynamic_sampling.filters=[constant]"],
            "filters.0 must be constant_reward or all_truncated, or a user function",
        ),
        (
            ["trajectory_pool.dynamic_sampling.refill_factor=1"],
            "replaces filtered groups, and trajectory_pool.dynamic_sampling.filters is empty",
        ),
        (["resume=''"], "resume must be a run folder"),
    ],
)
def test_combinations_that_cannot_work_are_refused(
    make_recipe: MakeRecipe, overrides: list[str], sentence: str
) -> None:
    text = refused(make_recipe(), *overrides)
    assert sentence in text
    assert "(command line)" in text or "(valid.yaml:" in text or "service" in text


INFERENCE, TRAIN = "service.inference_service", "service.train_service"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [f"{INFERENCE}.engine=openai"],
            f"{INFERENCE}.engine must be one of builtin, got",
        ),
        (
            [f"{TRAIN}.url=http://127.0.0.1:1", f"{TRAIN}.placement=in_process"],
            f"{TRAIN}.placement in_process that it is started here",
        ),
        ([f"{TRAIN}.model_factory=m.py:make"], "exclude each other, got both"),
        ([f"{TRAIN}.model_path=null"], f"{TRAIN} needs a model"),
        (
            [f"{TRAIN}.model_path=null", f"{TRAIN}.model_factory=make"],
            "model_factory must be `path.py:name`",
        ),
        ([f"{TRAIN}.api_key=x"], f"api_key is sent to {TRAIN}.url, which is not set"),
        ([f"{INFERENCE}.url=127.0.0.1:8000"], "must be an http:// or https:// address"),
        ([f"{INFERENCE}.device=gpu"], "device must be auto, cpu, mps, cuda or cuda:N, got 'gpu'"),
        ([f"{INFERENCE}.max_context=8"], "max_tokens must be less than"),
        ([f"{INFERENCE}.max_context=9", "data.max_prompt_tokens=9"], "data.max_prompt_tokens must"),
        (
            ["deterministic=true", "weight.mode=batch-async"],
            "deterministic: true needs weight.mode",
        ),
    ],
)
def test_services_that_cannot_work_are_refused(
    make_recipe: MakeRecipe, overrides: list[str], sentence: str
) -> None:
    assert sentence in refused(make_recipe(), *overrides)


def test_credentials_in_a_refused_address_are_not_shown(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe(), f"{INFERENCE}.url=ftp://user:hunter2@host/")
    assert "hunter2" not in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.algorithm.loss.name=reinforce"],
        ["trainer.num_optimizer_steps=2"],
        [
            "trainer.num_optimizer_steps=2",
            "trainer.algorithm.loss.name=importance_sampling",
            "trainer.algorithm.trust_region=none",
        ],
        ["data.rollout_repeat_n=1", "trainer.algorithm.advantage=reinforce"],
        ["trainer.algorithm=sft", "data.rollout_repeat_n=1"],
        ["trainer.algorithm=sft", "rollout_worker.reward=null"],
        [f"{TRAIN}.model_path=null", f"{TRAIN}.url=http://127.0.0.1:1"],
        ["trajectory_pool.hand_out=windowed"],
        ["deterministic=true"],
        ["trainer.num_steps=0", "validate.enabled=true", "validate.sources=[{path: v.jsonl}]"],
        [
            "trainer.type=custom",
            "trainer.custom_trainer_module_path=t.py",
            "trainer.custom_trainer_class_name=T",
            "rollout_worker.reward=null",
            "rollout_worker.sampling.top_p=0.9",
        ],
    ],
)
def test_combinations_that_work_are_accepted(make_recipe: MakeRecipe, overrides: list[str]) -> None:
    load_run_config(make_recipe(), overrides)


def test_validation_is_greedy_unless_a_temperature_is_written(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("validate: {sampling: {max_tokens: 4}}")
    assert load_run_config(recipe).config.validate_.sampling.temperature == 0.0


def test_rules_are_not_judged_while_types_are_wrong(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe(), "data.batch_size=x", "trajectory_pool.batch_size=500")
    assert text.count("batch_size") == 1
