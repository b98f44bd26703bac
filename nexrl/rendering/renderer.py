"""Messages and text to token ids and back, with the tokenizer of one model folder.

Stands between data items and inference: the single-turn worker renders a prompt here, the
engine is fed the ids, and drawn ids are decoded here for rewards. Built on the `tokenizers`
library and Jinja directly: loading takes a tenth of a second where `transformers.AutoTokenizer`
takes three, and the ids are the same (parity test).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nexrl.errors import ConfigError, DataError
from nexrl.rendering.chat_template import ChatTemplate, load_chat_template
from nexrl.types import BoolArray, IntArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL_TOKEN_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def load_renderer(model_folder: Path | str) -> HfRenderer:
    """The renderer of a Hugging Face model folder; ConfigError when it has no tokenizer.json."""
    folder = Path(model_folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"model folder {folder} has no tokenizer.json ({present}); save one there with "
            f"transformers' AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
        )
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    return HfRenderer(folder, tokenizer)


class HfRenderer:
    """A `nexrl.protocols.Renderer` over one model folder.

    Invariants: no rendering starts with two BOS (FR-014); nothing is truncated or padded;
    `decode` never rewrites spaces. Thread-safe: no state changes after construction.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        # A limit stored in tokenizer.json would cut prompts without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._folder = folder
        self._tokenizer = tokenizer
        config = _read_json(folder / "tokenizer_config.json")
        # Older folders name special tokens in a file of their own.
        special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        self.bos_token_id = self._id_of(special_tokens.get("bos_token"))
        """Id that begins a sequence, if there is one."""
        self.eos_token_ids = self._find_eos_ids(special_tokens.get("eos_token"))
        """Ids that end a sequence: those of generation_config.json (else config.json), then the
        tokenizer's own."""
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        """Largest token id plus one; a model's embedding may have further, unused rows."""
        self._adds_bos = _adds_bos(tokenizer, self.bos_token_id)
        self._template: ChatTemplate | None = load_chat_template(folder, config, special_tokens)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Chat messages as the text that the template makes of them."""
        if self._template is None:
            raise ConfigError(
                f"the tokenizer in {self._folder} has no chat template but the data has messages; "
                "either add the model's template to that folder as chat_template.jinja (or use "
                "the instruct version of the model), or give plain text: rows with a `prompt` "
                "string and rollout_worker.chat_template: false"
            )
        if not messages:
            raise DataError("cannot render a conversation without messages")
        return self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> IntArray:
        """Chat messages as ids; ConfigError when the tokenizer has no chat template."""
        text = self.render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> IntArray:
        """Text as ids. With `add_special_tokens` a BOS is put in front if this tokenizer does
        so and the text does not start with one; an EOS is never added."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        bos = self.bos_token_id
        if bos is not None:
            num_leading = next((i for i, token_id in enumerate(ids) if token_id != bos), len(ids))
            if num_leading > 1:
                ids = ids[num_leading - 1 :]
            elif num_leading == 0 and add_special_tokens and self._adds_bos:
                ids = [bos, *ids]
        return np.asarray(ids, np.int32)

    def decode(self, token_ids: IntArray, *, skip_special_tokens: bool = True) -> str:
        """Ids as text; a partial character at the end becomes U+FFFD."""
        return self._tokenizer.decode(
            [int(i) for i in token_ids], skip_special_tokens=skip_special_tokens
        )

    def render_supervised(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[IntArray, BoolArray]:
        """A whole conversation as ids, and a mask that is true where the assistant speaks.

        The span of an assistant message is what lies between the rendering of all before it
        (generation prompt included) and the rendering with it: its content and end marker, not
        its header nor the newline that a template puts after the marker (FR-016). ConfigError
        when the template does not render a conversation as an extension of its beginnings
        (FR-001, FR-007): then no honest mask over one row exists.
        """
        ids = self.render(messages, tools=tools, add_generation_prompt=False)
        mask = np.zeros(len(ids), np.bool_)
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:i], tools=tools) if i else ids[:0]
            through = self.render(messages[: i + 1], tools=tools, add_generation_prompt=False)
            for part, what in ((before, "up to"), (through, "through")):
                self._check_prefix(part, ids, f"{what} message {i} (assistant)")
            mask[len(before) : self._end_of_speech(ids, len(before), len(through))] = True
        return ids, mask

    def check_decomposable(self) -> None:
        """Start-up self-test for training on conversations: four messages must render as an
        extension of each of their beginnings; else ConfigError with the first difference."""
        roles = ("user", "assistant", "user", "assistant")
        self.render_supervised(
            [{"role": r, "content": c} for r, c in zip(roles, "abcd", strict=True)]
        )

    def _end_of_speech(self, ids: IntArray, start: int, end: int) -> int:
        """Just after the last end-of-sequence token in [start, end), or `end` if there is none."""
        markers = np.flatnonzero(np.isin(ids[start:end], self.eos_token_ids))
        return start + int(markers[-1]) + 1 if len(markers) else end

    def _check_prefix(self, part: IntArray, whole: IntArray, what: str) -> None:
        if len(part) <= len(whole) and np.array_equal(part, whole[: len(part)]):
            return
        shared = min(len(part), len(whole))
        differing = np.flatnonzero(part[:shared] != whole[:shared])
        index = int(differing[0]) if len(differing) else shared
        around = slice(max(index - 4, 0), index + 4)
        raise ConfigError(
            f"the chat template in {self._folder} is not decomposable: the conversation {what} is "
            f"not the beginning of the whole; first difference at token {index}: "
            f"{self.decode(part[around], skip_special_tokens=False)!r} against "
            f"{self.decode(whole[around], skip_special_tokens=False)!r}; give each turn a row of "
            "its own (messages up to it as the prompt, the turn as the answer)"
        )

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _find_eos_ids(self, eos_token: str | None) -> tuple[int, ...]:
        generation = self._folder / "generation_config.json"
        path = generation if generation.is_file() else self._folder / "config.json"
        given = _read_json(path).get("eos_token_id")
        ids = [given] if isinstance(given, int) else list(given or [])
        own = self._id_of(eos_token)
        if own is not None:
            ids.append(own)
        return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; each is a string or an object with `content`."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _adds_bos(tokenizer: Tokenizer, bos_id: int | None) -> bool:
    """What the post-processor does; `add_bos_token` of tokenizer_config.json has no effect beside
    a tokenizer.json, in transformers too."""
    return bool(tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_id])
