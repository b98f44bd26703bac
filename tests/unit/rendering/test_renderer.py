"""HfRenderer: messages and text to ids and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from nexrl.errors import ConfigError, DataError
from nexrl.protocols import Renderer
from nexrl.rendering.renderer import HfRenderer, load_renderer
from nexrl.testing.tiny_models import make_micro_model

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4"},
]
BOS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}"
    "{% endfor %}"
)
THINK_STRIPPING_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
TOOL_TEMPLATE = (
    "{% generation %}{{ tools | tojson }}{% endgeneration %}{% for message in messages %}"
    "{% if message.role == 'skip' %}{% continue %}{% endif %}{{ message.content or '' }}"
    "{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}"
    "{% for call in message.tool_calls or [] %}<{{ call.name }} {{ call.arguments }}>{% endfor %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro_model(tmp_path_factory.mktemp("chat"), vocab="chat", chat_template=True)


@pytest.fixture(scope="module")
def chat(chat_folder: Path) -> HfRenderer:
    return load_renderer(chat_folder)


def make_renderer(
    folder: Path, *, template: str | None = None, bos: bool = False, **generation: Any
) -> HfRenderer:
    """A chat renderer with another template, a BOS (the `<eos>` token) and a token put at the end
    by the tokenizer (`<unk>`), or other generation ids."""
    make_micro_model(folder, vocab="chat", chat_template=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if bos:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<eos>"}))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single="<eos> $A <unk>", special_tokens=[("<eos>", 1), ("<unk>", 2)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_renderer(folder)


def as_protocol(renderer: HfRenderer) -> Renderer:
    """The type checker proves the Protocol."""
    return renderer


@pytest.mark.parametrize("text", ["", " a  b ", "12+34=46\n", "<|im_start|>user\nhi<|im_end|>"])
def test_decode_gives_back_what_was_encoded(chat: HfRenderer, text: str) -> None:
    ids = as_protocol(chat).encode(text)
    assert ids.dtype == np.int32
    assert chat.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids_and_skipped_on_request(chat: HfRenderer) -> None:
    ids = chat.encode("4<|im_end|>")
    assert len(ids) == 2
    assert ids[-1] in chat.eos_token_ids
    assert chat.decode(ids) == "4"


def test_rendering_adds_the_generation_prompt_and_keeps_the_messages(chat: HfRenderer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert chat.decode(chat.render(messages), skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert messages == [{"role": "user", "content": "hi"}]


def test_prompt_length_counts_what_the_template_adds(chat: HfRenderer) -> None:
    """FR-082: a raw prompt within the limit may be beyond it once rendered."""
    raw, rendered = chat.encode("x" * 50), chat.render([{"role": "user", "content": "x" * 50}])
    assert len(rendered) == len(raw) + len("Suser\nE\nSassistant\n")


def test_no_template_names_the_folder_and_both_fixes(tmp_path: Path) -> None:
    renderer = load_renderer(make_micro_model(tmp_path))
    with pytest.raises(ConfigError) as caught:
        renderer.render([{"role": "user", "content": "1"}])
    for words in (str(tmp_path), "chat_template.jinja", "rollout_worker.chat_template: false"):
        assert words in str(caught.value)


def test_template_that_writes_bos_gives_exactly_one(tmp_path: Path) -> None:
    """FR-014: the text of a template encoded with special tokens on has one BOS, not two."""
    renderer = make_renderer(tmp_path, template=BOS_TEMPLATE, bos=True)
    messages = [{"role": "user", "content": "a"}]
    bos = renderer.bos_token_id
    assert list(renderer.render(messages)).count(bos) == 1
    text = renderer.render_text(messages)
    assert list(renderer.encode(text)) == list(renderer.render(messages))
    assert list(renderer.encode("<eos><eos>a")).count(bos) == 1


def test_bos_is_added_to_plain_text_only_when_special_tokens_are_wanted(tmp_path: Path) -> None:
    """FR-014: nor is it missing."""
    renderer = make_renderer(tmp_path, bos=True)
    assert renderer.encode("a")[0] == renderer.bos_token_id
    assert renderer.encode("a", add_special_tokens=False)[0] != renderer.bos_token_id


def test_eos_ids_join_the_generation_list_and_the_tokenizers_own(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path, eos_token_id=[9, 7])
    assert renderer.eos_token_ids == (9, 7, int(renderer.encode("<|im_end|>")[0]))


def test_a_limit_in_the_tokenizer_file_never_cuts_a_prompt(tmp_path: Path) -> None:
    make_micro_model(tmp_path)
    path = tmp_path / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": cut}))
    assert len(load_renderer(tmp_path).encode("1234567890")) == 10


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("chat_template.jinja", "{% for %}", "chat_template.jinja:1 does not compile"),
    ],
)
def test_damaged_folder_is_named(tmp_path: Path, file: str, text: str | None, named: str) -> None:
    make_micro_model(tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_renderer(tmp_path)


def test_template_that_refuses_messages_is_quoted(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"\['user'\]: roles must alternate"):
        renderer.render([{"role": "user", "content": "a"}])


def test_empty_conversation_is_refused(chat: HfRenderer) -> None:
    with pytest.raises(DataError, match="without messages"):
        chat.render([])


def test_tool_calls_reach_the_template_and_stay_in_the_message(tmp_path: Path) -> None:
    """FR-005: a stored message keeps its structured call, and the render shows it."""
    call = {"name": "add", "arguments": {"a": 1}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call], "name": None}]
    renderer = make_renderer(tmp_path, template=TOOL_TEMPLATE)
    assert renderer.render_text(messages, tools=[{"name": "add"}]) == (
        '[{"name": "add"}]<add {\'a\': 1}>'
    )
    assert messages[0]["tool_calls"] == [call]


# --- supervised -------------------------------------------------------------------------------


def trained_text(renderer: HfRenderer, messages: list[dict[str, str]]) -> str:
    ids, mask = renderer.render_supervised(messages)
    return renderer.decode(ids[mask], skip_special_tokens=False)


def test_supervised_mask_covers_what_the_assistant_says_and_its_end_marker(
    chat: HfRenderer,
) -> None:
    """FR-016: neither the role header nor the newline after the marker is trained."""
    assert trained_text(chat, CONVERSATION) == "2<|im_end|>4<|im_end|>"
    ids, mask = chat.render_supervised(CONVERSATION)
    assert list(ids) == list(chat.render(CONVERSATION, add_generation_prompt=False))
    assert len(mask) == len(ids)


def test_whole_conversation_is_not_the_messages_rendered_one_by_one(tmp_path: Path) -> None:
    """FR-007: a template that opens with BOS would repeat it at each message."""
    renderer = make_renderer(tmp_path, template=BOS_TEMPLATE, bos=True)
    ids, _ = renderer.render_supervised(CONVERSATION[1:])
    assert list(ids).count(renderer.bos_token_id) == 1
    assert trained_text(renderer, CONVERSATION[1:]) == "assistant:2assistant:4"


def test_template_that_strips_thinking_is_refused_with_the_first_difference(
    tmp_path: Path,
) -> None:
    """FR-001, FR-007: the start-up self-test fails loudly when rendering is not append-only."""
    renderer = make_renderer(tmp_path, template=THINK_STRIPPING_TEMPLATE)
    with pytest.raises(ConfigError, match=r"through message 1 .* first difference at token \d+"):
        renderer.check_decomposable()


def test_append_only_template_passes_the_self_test(chat: HfRenderer) -> None:
    chat.check_decomposable()


# --- parity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template", [None, BOS_TEMPLATE, THINK_STRIPPING_TEMPLATE, TOOL_TEMPLATE], ids=range(4)
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_ids_equal_those_of_transformers(
    tmp_path: Path, template: str | None, add_generation_prompt: bool
) -> None:
    from transformers import AutoTokenizer

    renderer = make_renderer(tmp_path, template=template, bos=True)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [*CONVERSATION[:4], {"role": "assistant", "content": "4", "thinking": "why"}]
    for conversation in (messages, messages[:2]):
        expected = theirs.apply_chat_template(
            conversation,
            tools=[{"name": "add", "about": "<b>&"}],
            add_generation_prompt=add_generation_prompt,
        )
        got = renderer.render(
            conversation,
            tools=[{"name": "add", "about": "<b>&"}],
            add_generation_prompt=add_generation_prompt,
        )
        assert list(got) == expected["input_ids"]
    # All but the token that this tokenizer puts after the text: a prompt must stay open.
    assert list(renderer.encode("a b\n")) == theirs("a b\n")["input_ids"][:-1]
