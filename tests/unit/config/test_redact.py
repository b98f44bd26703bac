"""Secrets stay out of dumps, logs and trackers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.config.loader import load_run_config
from nexrl.config.redact import is_secret_key, redact, redact_text
from nexrl.config.schema import InferenceServiceConfig

MakeRecipe = Callable[..., Path]


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "apiKey", "X-Api-Key", "OPENAI_API_KEY", "HF_TOKEN", "token", "password"),
        *("client_secret", "AWS_SECRET_ACCESS_KEY", "Authorization", "wandb.api_key", "cookie"),
    ],
)
def test_keys_that_name_a_secret(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key",
    [
        *("max_tokens", "eos_token", "eos_token_id", "tokenizer", "prompt_key", "num_tokens"),
        *("item_id_key", "tokens_per_s", "micro_batch_tokens", "key", "token_ids"),
    ],
)
def test_keys_of_a_language_model_are_no_secrets(key: str) -> None:
    assert not is_secret_key(key)


def test_nested_values_below_secret_keys_are_masked() -> None:
    value = {"a": [{"api_key": "sk-1", "n": 1}], "headers": {"authorization": "Basic x"}}
    assert redact(value) == {"a": [{"api_key": "***", "n": 1}], "headers": {"authorization": "***"}}


def test_an_unset_secret_stays_visible_as_unset() -> None:
    assert redact({"api_key": None, "token": ""}) == {"api_key": None, "token": ""}


def test_a_configuration_section_is_masked() -> None:
    section = InferenceServiceConfig(url="http://h/v1", api_key="sk-123456")
    assert redact(section)["api_key"] == "***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET http://me:pw@host/v1", "GET http://***@host/v1"),
        ("https://tok123@host", "https://***@host"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer ***"),
        ("api_key=sk-1 max_tokens=5", "api_key=*** max_tokens=5"),
        ('{"password": "a b"}', '{"password": ***}'),
        ("eos_token: </s>, token: 17", "eos_token: </s>, token: 17"),
        ("value: s3cr3t!", "value: ***"),
    ],
)
def test_texts_are_masked_by_shape_and_by_value(text: str, shown: str) -> None:
    assert redact_text(text, secrets={"s3cr3t!"}) == shown


def test_a_very_short_value_does_not_blank_out_unrelated_text() -> None:
    assert redact_text("a banana", secrets={"a"}) == "a banana"


def test_the_dump_of_a_run_holds_no_secret_however_it_got_in(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXRL_TEST_API_KEY", "hunter2hunter2")
    recipe = make_recipe(
        """
        service:
          inference_service:
            url: http://host/v1?k=${oc.env:NEXRL_TEST_API_KEY}
            api_key: ${oc.env:NEXRL_TEST_API_KEY}
        rollout_worker: {arguments: {judge: "key ${oc.env:NEXRL_TEST_API_KEY}", password: swordfish}}
        """
    )
    loaded = load_run_config(recipe)
    dump = json.dumps(redact(loaded.config, secrets=loaded.secrets))
    assert loaded.config.service.inference_service.api_key == "hunter2hunter2"
    assert {"hunter2hunter2", "swordfish"} <= loaded.secrets
    assert "hunter2" not in dump + repr(loaded.secrets and loaded.recipe_dir)
    assert "swordfish" not in dump


def test_the_dump_is_complete(make_recipe: MakeRecipe) -> None:
    dumped = redact(load_run_config(make_recipe()).config)
    assert dumped["validate"]["sampling"]["temperature"] == 0.0
    assert dumped["data"]["batch_size"] == 4
