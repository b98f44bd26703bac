"""The plan: units, lints and estimates, over a probe that says what it saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nexrl.cli.memory_estimate import ModelSize, estimate_memory, human_bytes, model_size
from nexrl.cli.plan_text import (
    WIDTH,
    Finding,
    Inspection,
    Plan,
    RenderedPrompts,
    SourceSample,
    build_plan,
    render_plan,
)
from nexrl.config.loader import load_run_config

MakeRecipe = Callable[..., Path]

MODEL = ModelSize(num_parameters=1000, vocab_size=16, num_layers=2, kv_width=8, max_positions=64)


@dataclass
class SeenWorld:
    """What a probe saw."""

    num_items: int | None = 100
    prompt_lengths: tuple[int, ...] = (5, 7)
    num_leading_bos: int = 1
    size: ModelSize | None = MODEL
    machine: list[Finding] = field(default_factory=list)
    found: tuple[Finding, ...] = ()
    longest_row: int | None = None
    teacher: ModelSize | None = None
    ram: int = 8 << 30

    def inspection(self) -> Inspection:
        sample = SourceSample(name="train", num_read=20, num_items=self.num_items)
        prompts = RenderedPrompts(
            first_text="1+1=",
            lengths=self.prompt_lengths,
            num_leading_bos=self.num_leading_bos,
        )
        return Inspection(
            sources=[sample],
            validation_sources=[sample],
            prompts=prompts,
            longest_row=self.longest_row,
            teacher=self.teacher,
            scorer="reward.py:exact",
            findings=self.found,
        )


def plan_of(recipe: Path, *overrides: str, world: SeenWorld | None = None) -> Plan:
    """The plan of a recipe in a world."""
    loaded, world = load_run_config(recipe, overrides), world or SeenWorld()
    return build_plan(
        loaded,
        [world.inspection() for _ in loaded.stages],
        machine=world.machine,
        model=world.size,
        machine_bytes=world.ram,
    )


def test_a_version_is_counted_in_items_trajectories_steps_and_tokens(
    make_recipe: MakeRecipe,
) -> None:
    lines = dict(plan_of(make_recipe(), "trainer.num_optimizer_steps=2").stages[0].lines)
    assert lines["items per version"] == "4"
    assert lines["trajectories per version"] == "8 = 4 items x 2 rollouts"
    assert lines["optimizer steps per version"] == "2, each 2 items"
    assert lines["tokens per version"].startswith("at most 120 = 8 x (7 prompt + 8 completion)")
    assert lines["staleness"].startswith("0 versions")


def algorithm_lines_of(recipe: Path, *overrides: str) -> dict[str, str]:
    """The lines of a plan that speak of the algorithm."""
    lines = dict(plan_of(recipe, *overrides).stages[0].lines)
    labels = ("trainer", "algorithm", "advantage", "loss", "beside the loss")
    return {label: lines[label] for label in labels if label in lines}


def test_the_algorithm_is_told_by_its_parts_as_they_run(make_recipe: MakeRecipe) -> None:
    overrides = ("trainer.algorithm=dapo", "trainer.algorithm.correction=icepop")
    assert algorithm_lines_of(make_recipe(), *overrides) == {
        "algorithm": "dapo, with correction.preset as written",
        "advantage": "grpo (std sample)",
        "loss": "ppo (clip_low 0.2, clip_high 0.28), token_mean: mean over all trained tokens",
        "beside the loss": (
            "correction by token: mask outside [0.5, 5]; proximal logprobs recomputed; "
            "up to 1 off over the last 1 of 8 tokens"
        ),
    }


def test_settings_that_a_loss_has_by_default_are_told_too(make_recipe: MakeRecipe) -> None:
    lines = algorithm_lines_of(make_recipe(), "trainer.algorithm.loss=cispo")
    assert lines["loss"].startswith("cispo (clip_high 4), sequence_mean_token_mean")
    critic = algorithm_lines_of(make_recipe(), "trainer.algorithm=vapo")["beside the loss"]
    assert critic == "critic with lr 1e-05, alone for 50 batches"


def test_an_offline_loss_is_told_with_its_own_settings_and_denominator(
    make_recipe: MakeRecipe,
) -> None:
    overrides = ("trainer.algorithm=dpo", "trainer.algorithm.preference.beta=0.5")
    assert algorithm_lines_of(make_recipe(), *overrides) == {
        "algorithm": "dpo, with preference.beta as written",
        "loss": (
            "dpo (beta 0.5, label_smoothing 0, sft_coefficient 0), mean over the pairs of an "
            "optimizer step"
        ),
    }


def test_a_custom_trainer_is_told_by_its_class(make_recipe: MakeRecipe) -> None:
    prefix = "trainer.custom_trainer"
    overrides = ("trainer.type=custom", f"{prefix}_module_path=t.py", f"{prefix}_class_name=T")
    assert algorithm_lines_of(make_recipe(), *overrides) == {"trainer": "T of t.py"}


DPO = ("trainer.algorithm=dpo", "rollout_worker.reward=null", "data.rollout_repeat_n=1")
VALIDATED = ("validate.enabled=true", "validate.sources=[{path: held_out.jsonl}]")


def test_rows_that_are_only_read_are_counted_as_rows_and_not_as_rollouts(
    make_recipe: MakeRecipe,
) -> None:
    world = SeenWorld(longest_row=9)
    plan = plan_of(make_recipe(), *DPO, *VALIDATED, "validate.at_start=true", world=world)
    lines = dict(plan.stages[0].lines)
    assert lines["rows per version"] == "8 = 4 items x 2 responses"
    assert lines["tokens per version"] == "about 72 = 8 x 9, the longest row read"
    assert lines["validation"].startswith("100 items by their own loss, at start")
    assert not {"trajectories per version", "staleness", "scorer"} & set(lines)
    assert plan.findings == []


def test_groups_that_will_be_dropped_are_told_with_what_replaces_them(
    make_recipe: MakeRecipe,
) -> None:
    lines = dict(plan_of(make_recipe(), "trainer.algorithm=dapo").stages[0].lines)
    assert lines["groups dropped"] == (
        "constant_reward; up to 12 more are drawn for a batch, then train_short"
    )
    assert "groups dropped" not in dict(plan_of(make_recipe()).stages[0].lines)


def test_a_loss_that_costs_a_forward_pass_says_so(make_recipe: MakeRecipe) -> None:
    own = algorithm_lines_of(make_recipe(), "trainer.algorithm.loss=mine.py:loss")
    assert "evaluates the loss, on what a forward pass returns" in own["beside the loss"]
    bapo = algorithm_lines_of(make_recipe(), "trainer.algorithm=bapo")
    assert bapo["beside the loss"] == "a forward pass before each optimizer step"


def test_the_lines_of_a_stage_keep_within_the_width(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    for preset in ("dapo", "bapo", "vapo", "dr_grpo"):
        plan = plan_of(recipe, f"trainer.algorithm={preset}")
        stage = render_plan(plan).partition("\nmemory")[0]
        assert max(map(len, stage.splitlines())) <= WIDTH


def test_the_prompt_limit_bounds_tokens_when_it_is_set(make_recipe: MakeRecipe) -> None:
    lines = dict(plan_of(make_recipe(), "data.max_prompt_tokens=10").stages[0].lines)
    assert lines["tokens per version"].startswith("at most 144 = 8 x (10 prompt + 8 completion)")


def test_versions_are_told_in_epochs_and_limited_by_them(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    long = plan_of(recipe, "trainer.num_steps=50").stages[0]
    assert dict(long.lines)["versions"] == "50, 2.00 epochs of 100 items"
    short = plan_of(recipe, "trainer.num_steps=50", "data.epochs=1").stages[0]
    assert dict(short.lines)["versions"] == "25, 1.00 epochs of 100 items"
    unknown = plan_of(recipe, "data.epochs=1", world=SeenWorld(num_items=None)).stages[0]
    assert dict(unknown.lines)["versions"] == "3, or 1 epochs if fewer"


def test_the_scorer_in_use_is_named(make_recipe: MakeRecipe) -> None:
    """FR-163: a start-up banner lists the scorer in use."""
    assert "scorer                      reward.py:exact" in render_plan(plan_of(make_recipe()))


def test_two_leading_bos_are_a_problem(make_recipe: MakeRecipe) -> None:
    """FR-014: the start-up lint counts leading BOS in the first rendered prompt."""
    plan = plan_of(make_recipe(), world=SeenWorld(num_leading_bos=2))
    assert ["starts with 2 BOS tokens" in text for text in plan.problems] == [True]
    assert plan_of(make_recipe()).problems == []


def test_a_prompt_without_room_is_a_problem_and_a_tight_one_a_warning(
    make_recipe: MakeRecipe,
) -> None:
    full = plan_of(make_recipe(), world=SeenWorld(prompt_lengths=(64,)))
    assert "a prompt of 64 tokens leaves no room in a context of 64" in full.problems[0]
    tight = plan_of(make_recipe(), world=SeenWorld(prompt_lengths=(60,)))
    assert tight.problems == []
    assert "exceed the context of 64" in render_plan(tight)


def test_a_row_longer_than_the_model_is_a_problem(make_recipe: MakeRecipe) -> None:
    plan = plan_of(make_recipe(), *DPO, world=SeenWorld(longest_row=65))
    assert plan.problems == [
        "a row of 65 tokens, prompt and response, is longer than the model's 64 positions; leave "
        "such rows out with data.filter"
    ]


def test_a_supervised_stage_samples_only_in_validation(make_recipe: MakeRecipe) -> None:
    recipe, tight = make_recipe(), SeenWorld(prompt_lengths=(60,))
    alone = render_plan(plan_of(recipe, "trainer.algorithm=sft", world=tight))
    assert "exceed the context" not in alone
    plan = plan_of(recipe, "trainer.algorithm=sft", *VALIDATED, world=tight)
    assert "a prompt of 60 tokens and validate.sampling.max_tokens 256 exceed" in render_plan(plan)


def test_settings_that_are_probably_not_meant_are_warned_of(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    cases = {
        "trainer.algorithm.advantage=dr_grpo": "dr_grpo is meant for loss.aggregation constant",
        "trainer.algorithm=sft": "rows of rollout_worker.type supervised are not scored",
        "trainer.algorithm=vapo": "length_adaptive 0.05 makes lambda at most",
        "trainer.algorithm.greedy_baseline=true": "which trainer.algorithm.advantage grpo does not",
        "trainer.optimizer.warmup_steps=10": "is longer than the stage's 3 optimizer steps",
        "rollout_worker.failure_policy.min_group_size=1": "shrinks to one member",
        "trainer.algorithm.loss.clip_low=2": "the lower bound -1 is below every ratio (command li",
    }
    for override, sentence in cases.items():
        plan = plan_of(recipe, override)
        assert sentence in render_plan(plan)
        assert plan.problems == []


def test_findings_of_a_stage_carry_its_name_and_problems_come_first(
    make_recipe: MakeRecipe,
) -> None:
    world = SeenWorld(
        machine=[Finding(severity="ok", text="fine")],
        found=(Finding(severity="problem", text="no row"),),
    )
    plan = plan_of(make_recipe("stages: [{name: a}, {name: b}]"), world=world)
    assert [f.text for f in plan.findings] == ["stage a: no row", "stage b: no row", "fine"]


def test_memory_is_estimated_per_part_and_compared_with_the_machine(
    make_recipe: MakeRecipe,
) -> None:
    config = load_run_config(make_recipe(), ["trainer.algorithm.kl.coefficient=0.1"]).config
    sizes = {
        i.what: i.num_bytes
        for i in estimate_memory(config, MODEL, row_tokens=15, trained_tokens=120)
    }
    assert sizes["train: weights"] == sizes["train: gradients"] == 4000
    assert sizes["train: AdamW moments"] == 8000
    assert sizes["train: reference policy"] == 4000
    assert sizes["train: logits of a micro-batch"] == 2 * 4 * (8 * 15) * 16
    assert sizes["inference: KV cache, 256 x 64 tokens"] == 2 * 2 * 8 * 4 * 256 * 64
    with_critic = load_run_config(make_recipe(), ["trainer.algorithm=ppo"]).config
    sizes = {
        i.what: i.num_bytes
        for i in estimate_memory(with_critic, MODEL, row_tokens=15, trained_tokens=120)
    }
    assert sizes["train: critic policy"] == 4 * 4000
    assert "train: reference policy" not in sizes
    taught = ("trainer.algorithm=distill", "trainer.algorithm.teacher.path=t")
    memory = plan_of(make_recipe(), *taught, world=SeenWorld(teacher=MODEL)).memory
    assert {i.what: i.num_bytes for i in memory}["train: teacher policy"] == 4000
    scoring = plan_of(make_recipe(), "trainer.algorithm=reward_model").memory
    assert not any(i.what.startswith("inference") for i in scoring)
    small = plan_of(make_recipe(), world=SeenWorld(ram=1 << 20))
    assert "this machine has 1.0 MiB" in render_plan(small)


def test_services_elsewhere_take_no_memory_here(make_recipe: MakeRecipe) -> None:
    overrides = ["service.train_service.url=http://h:1", "service.inference_service.url=http://h:2"]
    config = load_run_config(make_recipe(), overrides).config
    assert estimate_memory(config, MODEL, row_tokens=15, trained_tokens=120) == []


def test_parameters_are_counted_from_a_model_configuration() -> None:
    llama_135m = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
    size = model_size(llama_135m)
    assert size is not None
    assert size.num_parameters == 134_515_008
    assert model_size({"model_type": "other"}) is None


def test_bytes_are_written_for_people() -> None:
    assert [human_bytes(n) for n in (5, 2048, 3 << 20, 5 << 29)] == [
        *("5 B", "2.0 KiB", "3.0 MiB", "2.5 GiB")
    ]
