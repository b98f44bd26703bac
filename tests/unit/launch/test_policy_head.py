"""What the trained policy ends in, and that a run which trains scores starts no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nexrl.config.loader import StageConfig
from nexrl.config.schema import RunConfig
from nexrl.errors import ConfigError
from nexrl.launch.services import local_services, policy_head
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import Prompt, Sampling


def stages(*presets: str) -> list[StageConfig]:
    return [
        StageConfig(
            name=f"{number}-{preset}",
            config=RunConfig.model_validate({"trainer": {"algorithm": {"preset": preset}}}),
            provenance={},
        )
        for number, preset in enumerate(presets)
    ]


def test_reward_models_have_a_value_head_and_everything_else_an_output_head() -> None:
    assert policy_head(stages("reward_model", "process_reward_model")) == "value"
    assert policy_head(stages("sft", "dpo", "grpo")) == "lm"


async def test_a_run_of_a_value_policy_has_no_engine_and_says_so(tmp_path: Path) -> None:
    in_process: dict[str, Any] = {"placement": "in_process"}
    config = RunConfig.model_validate({"service": {"train_service": in_process}})
    model = make_micro_model(tmp_path / "model")
    async with local_services(config, model_folder=model, logs=tmp_path, head="value") as services:
        assert services.engines == ()
        assert services.children == ()
        assert (await services.inference.info()).name == "none"
        with pytest.raises(ConfigError, match=r"no inference engine to draw tokens.*reward model"):
            await services.inference.generate(Prompt(token_ids=[1]), sampling=Sampling())  # type: ignore[arg-type]
