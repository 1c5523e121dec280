"""Chat templates in a sandboxed Jinja, with the names that Hugging Face templates expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eeinfer.errors import ModelError, RequestError


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks answers in some templates; it is seen through here."""

    tags = {"generation"}  # noqa: RUF012 (the library's declaration)

    def parse(self, parser: Parser) -> list[Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders chat turns into a prompt.

    Args:
        source: the Jinja text.
        origin: the file it is from, for messages.
        special_tokens: `bos_token`, `eos_token`, … as strings, visible to the template.

    Raises:
        ModelError: the template does not parse.
    """

    def __init__(self, source: str, origin: Path, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{origin}: the chat template does not parse: {error}") from None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt of `messages`, ending where the assistant's answer begins.

        Raises:
            RequestError: the template refuses these messages.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except Exception as error:  # noqa: BLE001 (templates are programs and raise whatever Python does)
            raise RequestError(f"the model's chat template refuses these messages: {error}") from None


def read_template(folder: Path, tokenizer_config: dict[str, Any]) -> tuple[str, Path] | None:
    """The chat template of a model folder with the file it is in, or None.

    `chat_template.jinja` wins over `tokenizer_config.json`, whose entry is a string or a list of named templates.

    Raises:
        ModelError: the template file is not readable text.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: the chat template cannot be read ({error}); fetch the model again") from None
    found, path = tokenizer_config.get("chat_template"), folder / "tokenizer_config.json"
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return (found, path) if isinstance(found, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
