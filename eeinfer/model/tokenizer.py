"""Text to token ids and back, from a model folder's `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from eeinfer.errors import ModelError, RequestError
from eeinfer.model.folder import read_json_if_present

_INCOMPLETE = "\ufffd"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """The tokenizer and chat template of a model folder.

    Args:
        folder: holds `tokenizer.json`; `tokenizer_config.json`, `generation_config.json` and `config.json` are read
            too.
        vocab_size: rows of the model's vocabulary matrix.

    Attributes:
        eos_token_ids: tokens that end an answer.

    Raises:
        ModelError: a file is missing or malformed, or the tokenizer knows more tokens than the model.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._fast = _load(folder / "tokenizer.json")
        size = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if size > vocab_size:
            raise ModelError(
                f"{folder / 'tokenizer.json'} has {size} tokens, but the model's vocabulary has {vocab_size}: "
                f"the tokenizer belongs to another model"
            )
        config = read_json_if_present(folder / "tokenizer_config.json")
        special = {name: _token_text(config.get(name)) for name in _SPECIAL}
        self._special = {name: text for name, text in special.items() if text is not None}
        from eeinfer.model.chat_template import ChatTemplate, read_template  # with jinja2

        template = read_template(folder, config)
        self._template = None if template is None else ChatTemplate(*template, self._special)
        self.eos_token_ids = self._find_eos()

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the begin-of-sequence token the model wants, once."""
        ids = self._fast.encode(text).ids
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] == self._id("bos_token") else ids

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of chat turns. The template brings its own begin-of-sequence token, so none is added.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        if self._template is None:
            raise RequestError(f"{self._folder} has no chat template: give `prompt` instead of `messages`")
        return self._fast.encode(self._template.render(messages), add_special_tokens=False).ids

    def stream(self) -> TextStream:
        """A decoder for the tokens of one answer."""
        return TextStream(self._fast)

    def token_text(self, token: int) -> str:
        """The text of one token by itself, of a special one too; \ufffd where it is no whole character."""
        return self._fast.decode([token], skip_special_tokens=False)

    def _id(self, name: str) -> int | None:
        text = self._special.get(name)
        return None if text is None else self._fast.token_to_id(text)

    def _find_eos(self) -> frozenset[int]:
        """End-of-sequence ids: of the generation config, else of the model's config, else of the tokenizer's."""
        for name in ("generation_config.json", "config.json"):
            found = read_json_if_present(self._folder / name).get("eos_token_id")
            if found is None:
                continue
            ids = found if isinstance(found, list) else [found]
            if any(type(i) is not int for i in ids):
                raise ModelError(
                    f"{self._folder / name}: eos_token_id is {found!r}; it must be a token id or a list of them"
                )
            return frozenset(ids)
        own = self._id("eos_token")
        return frozenset() if own is None else frozenset([own])


class TextStream:
    """Text of one answer, token by token, never cut inside a character; special tokens have no text.

    A token's text can depend on the one before it (spaces, bytes of one character), so each piece is the difference
    between decoding the tokens since the last piece with and without the new ones. The library's own stream does the
    same, but gives up for good on bytes that are no UTF-8, which models do emit.
    """

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._before: list[int] = []  # the tokens of the last piece
        self._fresh: list[int] = []  # tokens since then

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._fresh.append(token)
        known = self._fast.decode(self._before)
        text = self._fast.decode(self._before + self._fresh)
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return ""
        self._before, self._fresh = self._fresh, []
        return text[len(known) :]


class NoTokenizer:
    """In place of a tokenizer where there is none, as with random weights: token ids in, no text out, no end."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """Refuses text with a RequestError."""
        raise RequestError(f"the model has no tokenizer, so it cannot read {text[:20]!r}: give token ids")

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Refuses messages with a RequestError."""
        return self.encode(str(messages))

    def stream(self) -> NoTokenizer:
        """Itself: it holds nothing."""
        return self

    def push(self, token: int) -> str:  # noqa: ARG002 - the interface of TextStream
        """No text."""
        return ""

    def token_text(self, token: int) -> str:
        """No text."""
        return self.push(token)


def _load(path: Path) -> FastTokenizer:
    if not path.is_file():
        raise ModelError(f"{path} is missing: the model folder needs a tokenizer in the `tokenizers` format")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises bare Exception)
        raise ModelError(f"{path} is not a readable tokenizer: {error}") from None
    # Left in the file by whoever trained with it; prompts are never cut or padded here.
    fast.no_truncation()
    fast.no_padding()
    return fast


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry
