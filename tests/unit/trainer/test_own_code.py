"""A recipe's own loss and advantage, by path: like built-in ones, and blamed by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexrl.errors import ConfigError, InvariantError, UserCodeError
from nexrl.testing.toy_train_service import ToyTrainService
from nexrl.testing.toy_trainer import drawn, make_toy_trainer
from nexrl.types import PolicyVersion

CODE = """
import numpy as np
import torch

from nexrl.algorithms.advantage_definition import Advantages


def ppo(outputs, inputs, settings):
    ratio = torch.exp(outputs["logprobs"] - inputs["proximal_logprobs"])
    held = ratio.clip(1 - settings["clip_low"], 1 + settings["clip_high"])
    return torch.maximum(-ratio * inputs["advantage"], -held * inputs["advantage"])


def total(outputs, inputs, settings):
    return (inputs["weight"] * ppo(outputs, inputs, settings)).sum()


def confident(outputs, inputs, settings):
    assert outputs["logprobs"].dtype == torch.float64
    by_row = torch.zeros(int(inputs["row"].max()) + 1, dtype=torch.float64)
    by_row = by_row.index_add(0, inputs["row"], outputs["entropy"])
    assert inputs["trajectory"].max() + 1 == len(by_row)
    return by_row.mean()


confident.needs = ("entropy",)


def infinite(outputs, inputs, settings):
    return outputs["logprobs"] / 0.0


def short(outputs, inputs, settings):
    return outputs["logprobs"][1:]


def plain(outputs, inputs, settings):
    return 1.0


def detached(outputs, inputs, settings):
    return outputs["logprobs"].detach() * inputs["advantage"]


def broken(outputs, inputs, settings):
    return inputs["nothing"]


def centred(inputs, settings):
    return inputs.rewards - inputs.rewards.mean()


def by_token(inputs, settings):
    return np.repeat(inputs.rewards, inputs.lengths)


def whole(inputs, settings):
    return Advantages(per_trajectory=inputs.rewards)


def wrong(inputs, settings):
    return inputs.rewards[1:]


def endless(inputs, settings):
    return inputs.rewards / 0


def judged(inputs, settings):
    return inputs.greedy_rewards


judged.needs = ("greedy_rewards",)


def penalised(inputs, settings):
    assert not inputs.rewards.any()
    return inputs.token_rewards


penalised.needs = ("token_rewards",)


def misspelt(inputs, settings):
    return inputs.rewards


misspelt.needs = ("valuess",)


def bare(inputs, settings):
    return inputs.rewards


bare.needs = "values"


def raising(inputs, settings):
    return [][0]
"""
REGULARISED = {"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


async def trained(recipe: Path, **settings: Any) -> tuple[ToyTrainService, dict[str, float]]:
    service = ToyTrainService()
    trainer = make_toy_trainer(service, recipe_dir=recipe, **settings)
    await trainer.setup()
    rows = drawn(service)
    service.tables["actor"] = service.tables["actor"] + 0.3 * np.eye(service.vocab_size)
    return service, await trainer.train(rows)


@pytest.mark.parametrize("correction", ["none", "truncate"])
async def test_an_own_term_is_treated_as_a_built_in_one(recipe: Path, correction: str) -> None:
    """The same weights and parts, with KL, entropy and correction added on the way."""
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    common = {**REGULARISED, "correction": {"action": correction, "high": 1.1}}
    found = []
    for name in ("ppo", "mine.py:ppo"):
        algorithm = {**common, "loss": {"name": name, **clips}}
        found.append(
            await trained(recipe, algorithm=algorithm, num_optimizer_steps=2, max_chunk_bytes=1024)
        )
    (built_in, expected), (own, metrics) = found
    np.testing.assert_allclose(own.tables["actor"], built_in.tables["actor"], rtol=1e-5)
    for key in ("loss/policy", "loss/kl", "loss/entropy", "loss/total", "ratio/mean", "kl/k3"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-8)
    assert ("forward_backward", "actor") not in own.calls


async def test_an_own_scalar_is_minimised_as_it_is(recipe: Path) -> None:
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    _, term = await trained(recipe, algorithm={"loss": {"name": "mine.py:ppo", **clips}})
    algorithm = {**REGULARISED, "loss": {"name": "mine.py:total", **clips}}
    _, scalar = await trained(recipe, algorithm=algorithm)
    assert scalar["loss/total"] == pytest.approx(term["loss/total"], rel=1e-6, abs=1e-9)
    assert scalar["grad_norm"] == pytest.approx(term["grad_norm"], rel=1e-5)
    assert "loss/kl" not in scalar


async def test_an_own_gradient_that_is_not_finite_is_skipped_where_that_is_asked_for(
    recipe: Path,
) -> None:
    algorithm = {"loss": {"name": "mine.py:infinite"}}
    skipping = {"algorithm": algorithm, "on_nonfinite_gradient": "skip"}
    service, metrics = await trained(recipe, **skipping)
    assert metrics["optimizer/skipped"] == 1
    assert ("backward", "actor") not in service.calls
    with pytest.raises(InvariantError, match=r"optimizer step 1 of 1 .* is not finite"):
        await trained(recipe, algorithm=algorithm)


async def test_an_own_loss_says_which_outputs_it_needs_and_sees_rows(recipe: Path) -> None:
    _, metrics = await trained(recipe, algorithm={"loss": {"name": "mine.py:confident"}})
    assert metrics["loss/total"] > 0
    assert metrics["entropy"] > 0


async def test_settings_of_an_own_loss_come_from_the_configuration(recipe: Path) -> None:
    (recipe / "tau.py").write_text(
        "def loss(outputs, inputs, settings):\n"
        "    return -settings['tau'] * inputs['advantage'] * outputs['logprobs']\n"
    )
    norms = []
    for tau in (1.0, 3.0):
        algorithm = {"loss": {"name": "tau.py:loss", "settings": {"tau": tau}}}
        norms.append((await trained(recipe, algorithm=algorithm))[1]["grad_norm"])
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "short",
            r"mine\.py:short must return a tensor \[n\] = \[\d+\].*got shape \[\d+\] "
            r"\(.*/mine\.py:\d+\)$",
        ),
        ("plain", r"mine\.py:plain must return a tensor .* got float"),
        ("detached", r"mine\.py:detached .* depends on none of the outputs"),  # trains nothing
        ("broken", r"mine\.py:broken raised KeyError: 'nothing' \(.*mine\.py:\d+\)"),
    ],
)
async def test_a_wrong_loss_is_blamed_with_what_it_did(
    recipe: Path, name: str, message: str
) -> None:
    with pytest.raises(UserCodeError, match=message):
        await trained(recipe, algorithm={"loss": {"name": f"mine.py:{name}"}})


@pytest.mark.parametrize("name", ["centred", "by_token", "whole"])
async def test_an_own_advantage_may_judge_trajectories_or_tokens(recipe: Path, name: str) -> None:
    service, _ = await trained(recipe, algorithm={"advantage": {"name": f"mine.py:{name}"}})
    (chunk,) = service.chunks
    given = set(chunk.inputs["advantage"][chunk.inputs["weight"] != 0].tolist())
    expected = {-1 / 3, 2 / 3} if name == "centred" else {0.0, 1.0}
    assert sorted(given) == pytest.approx(sorted(expected))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wrong",
            r"mine\.py:wrong .* must return .*\[T\] = \[12\].*\[M\] = \[\d+\].*got shape \[11\]",
        ),
        ("raising", r"mine\.py:raising raised IndexError.*mine\.py:\d+\)"),
    ],
)
async def test_a_wrong_advantage_is_blamed_with_what_it_did(
    recipe: Path, name: str, message: str
) -> None:
    with pytest.raises(UserCodeError, match=message):
        await trained(recipe, algorithm={"advantage": {"name": f"mine.py:{name}"}})


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value)")
async def test_an_advantage_that_is_not_finite_is_refused(recipe: Path) -> None:
    with pytest.raises(UserCodeError, match="not finite"):
        await trained(recipe, algorithm={"advantage": {"name": "mine.py:endless"}})


def test_what_an_own_advantage_needs_becomes_the_trainers_need(recipe: Path) -> None:
    settings: dict[str, Any] = {"algorithm": {"advantage": {"name": "mine.py:judged"}}}
    assert make_toy_trainer(recipe_dir=recipe, **settings).needs == ("reward", "greedy_reward")


async def test_an_own_advantage_that_needs_token_rewards_gets_them_where_they_were_earned(
    recipe: Path,
) -> None:
    """Else a KL penalty in the reward is part of `rewards`, one number for the trajectory."""
    advantage = {"name": "mine.py:penalised"}
    kl = {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}
    trainer = make_toy_trainer(
        service := ToyTrainService(),
        recipe_dir=recipe,
        algorithm={"advantage": advantage, "kl": kl},
    )
    await trainer.setup()
    service.tables["actor"] = service.tables["actor"] + 0.3 * np.eye(service.vocab_size)
    await trainer.train(drawn(service, num_groups=1, size=1, reward=0.0))
    (chunk,) = service.chunks
    assert len(set(chunk.inputs["advantage"][chunk.inputs["weight"] != 0].tolist())) > 1
    alone = make_toy_trainer(recipe_dir=recipe, algorithm={"advantage": advantage})
    with pytest.raises(
        ConfigError, match=r"needs token_rewards \(trainer\.algorithm\.kl\.placement"
    ):
        await alone.train(drawn(service))


@pytest.mark.parametrize(
    ("name", "shown"),
    [("misspelt", r"'valuess'.*values"), ("bare", r"must be a tuple of names, got 'values'")],
)
def test_what_an_advantage_needs_is_checked_before_anything_starts(
    recipe: Path, name: str, shown: str
) -> None:
    with pytest.raises(ConfigError, match=rf"advantage.name: mine.py:{name} needs .*{shown}"):
        make_toy_trainer(recipe_dir=recipe, algorithm={"advantage": {"name": f"mine.py:{name}"}})


@pytest.mark.parametrize("part", ["advantage", "loss"])
def test_a_path_that_leads_nowhere_is_refused_before_anything_starts(
    recipe: Path, part: str
) -> None:
    with pytest.raises(ConfigError, match=f"{part}.name: .*has no 'absent'"):
        make_toy_trainer(recipe_dir=recipe, algorithm={part: {"name": "mine.py:absent"}})


async def test_an_own_loss_reads_the_teacher_that_is_configured(tmp_path: Path) -> None:
    """docs/own-code.md: `teacher_logprobs` are there where there is a teacher."""
    service, teacher = ToyTrainService(), tmp_path / "teacher"
    await service.publish_weights("actor", PolicyVersion(), str(teacher))
    (teacher / "config.json").write_text("{}")
    (tmp_path / "own.py").write_text(
        "def loss(outputs, inputs, settings):\n"
        "    return outputs['logprobs'] - inputs['teacher_logprobs']\n"
    )
    algorithm = {"loss": {"name": "own.py:loss"}, "teacher": {"path": str(teacher)}}
    trainer = make_toy_trainer(service, recipe_dir=tmp_path, algorithm=algorithm)
    await trainer.setup()
    assert (await trainer.train(drawn(service)))["loss/total"] == pytest.approx(0.0, abs=1e-6)
