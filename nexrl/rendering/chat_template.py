"""Chat templates without transformers: compile a folder's template and turn messages into text.

`renderer.py` uses it. Importing transformers' tokenizers costs seconds and pulls in torch; the
template language is Jinja with a handful of additions, which are given here. A parity test
holds the result equal to `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jinja2 import Template

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The compiled template(s) of one model folder.

    Invariant: rendering never changes the messages it is given, and the same messages give the
    same text (but for a template that asks for today's date).
    """

    def __init__(
        self, templates: Mapping[str, str], *, special_tokens: Mapping[str, str], origin: str
    ) -> None:
        """`templates` by name: `default`, and `tool_use` where tools have one of their own."""
        self._templates = {name: _compile(text, origin) for name, text in templates.items()}
        self._special_tokens = dict(special_tokens)
        self._origin = origin

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """Messages as text; DataError with the template's own words when it refuses them."""
        from jinja2 import TemplateError

        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise ConfigError(
                f"{self._origin}: no template named 'default', only {sorted(self._templates)}"
            )
        try:
            return template.render(
                **{
                    **self._special_tokens,
                    "messages": [_plain_message(message) for message in messages],
                    "tools": None if tools is None else _plain(list(tools)),
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (TemplateError, TypeError) as error:
            roles = [message.get("role") for message in messages]
            raise DataError(
                f"the chat template {self._origin} refuses messages with roles {roles}: {error}"
            ) from error


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a model folder, or None when it has none.

    Files (`chat_template.jinja`, `additional_chat_templates/*.jinja`) win over the key
    `chat_template` of tokenizer_config.json, as in transformers.
    """
    templates: dict[str, str] = {}
    main, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
    origin = str(main if main.is_file() else folder / "tokenizer_config.json")
    if main.is_file():
        templates["default"] = main.read_text(encoding="utf-8")
    if more.is_dir():
        for path in sorted(more.glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
    if not templates:
        given = tokenizer_config.get("chat_template")
        if isinstance(given, str):
            templates["default"] = given
        elif isinstance(given, list):
            templates = {entry["name"]: entry["template"] for entry in given}
    if not templates:
        return None
    return ChatTemplate(templates, special_tokens=special_tokens, origin=origin)


def _compile(text: str, origin: str) -> Template:
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks what the assistant says; here it only groups its body."""

        tags = {"generation"}  # noqa: RUF012 - the attribute is declared by Jinja

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"chat template {origin}:{error.lineno} does not compile: {error.message}"
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change what the model reads."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(date_format: str) -> str:
    return datetime.now().astimezone().strftime(date_format)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of plain values without None, with reasoning under the names templates read."""
    plain: dict[str, Any] = _plain({key: v for key, v in message.items() if v is not None})
    reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: Any) -> Any:
    """Plain containers and scalars: a template from a stranger gets no objects with methods."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    item: Callable[[], Any] | None = getattr(value, "item", None)
    return _plain(item()) if callable(item) else f"<{type(value).__name__}>"
