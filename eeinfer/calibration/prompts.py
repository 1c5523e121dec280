"""Which prompts fix the path, and which certify. A certifying prompt takes no part in anything before its test."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO

from eeinfer.core.request import Request
from eeinfer.engine.encode import encode
from eeinfer.engine.prompt_id import prompt_id
from eeinfer.errors import ConfigError, EeinferError, RequestError
from eeinfer.exits.files import CONFIG_NAME
from eeinfer.model.tokenizer import NoTokenizer, Tokenizer
from eeinfer.training.prompts import held_out, read_requests

PATH_SHARE = 0.25
MOST_PATH_PROMPTS = 300  # more fix the path no better

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids. `key` identifies them: 16 hex digits."""

    id: str
    key: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Prompts in a fixed order that depends on their ids alone, so that the first few are a sample."""

    path: list[Request]
    certify: list[Request]


def read_prompts(source: Path | BinaryIO, note: Note, *, limit: int | None = None) -> list[Request]:
    """The prompts of a file, each text once; bad lines are left out.

    Raises:
        EeinferError: the file cannot be read, or no line is a prompt.
    """
    requests = read_requests(source, limit, note)
    if not requests:
        raise EeinferError("no line of the prompts is usable; see `eeinfer generate --help` for what a line is")
    first: dict[str, Request] = {}
    for request in requests:
        first.setdefault(prompt_id(request), request)
    if len(first) < len(requests):
        note(f"{len(requests) - len(first)} prompts stand in the file twice and count once")
    return list(first.values())


def split(requests: Sequence[Request], path: float | Sequence[Request], note: Note) -> Split:
    """Path prompts and certifying prompts.

    Args:
        requests: to be split, or those that certify.
        path: the share of `requests` that fixes the path, by a hash of their ids; or prompts of their own for it, of
            which those that certify as well are left out.
        note: called with one-line notices.

    Raises:
        ConfigError: the share is not between 0 and 1.
        EeinferError: one of the two parts is empty.
    """
    ordered = sorted(requests, key=lambda request: _position(request.id))
    if isinstance(path, float):
        if not 0 < path < 1:
            raise ConfigError(f"--path-prompts {path:g}: give a share between 0 and 1, such as {PATH_SHARE}, or a file")
        found = Split(
            [request for request in ordered if _position(request.id) < path],
            [request for request in ordered if _position(request.id) >= path],
        )
    else:
        certifying = {prompt_id(request) for request in ordered}
        own = [request for request in path if prompt_id(request) not in certifying]
        if len(own) < len(path):
            note(f"{len(path) - len(own)} path prompts are among the certifying ones and take no part in the path")
        found = Split(sorted(own, key=lambda request: _position(request.id)), ordered)
    if not found.path or not found.certify:
        raise EeinferError(
            f"{len(requests)} prompts leave {len(found.path)} for the path and {len(found.certify)} to certify; "
            f"give more prompts"
        )
    return found


def _position(request_id: str) -> float:
    """A number in [0, 1) for each id, so that splits do not depend on the order or number of prompts."""
    return int.from_bytes(blake2b(f"calibration:{request_id}".encode(), digest_size=8).digest(), "big") / 2**64


def tuned_ids(heads: Path, note: Note) -> set[str]:
    """The `prompt_id` of each prompt that heads were tuned on; empty, and a notice, when their file does not say.

    Raises:
        EeinferError: the file cannot be read.
    """
    path = heads / CONFIG_NAME
    try:
        made_with = json.loads(path.read_text(encoding="utf-8")).get("made_with")
    except (OSError, ValueError) as error:
        raise EeinferError(f"{path} cannot be read: {error}") from None
    ids = made_with.get("prompt_ids") if isinstance(made_with, dict) else None
    if not isinstance(ids, list):
        note(
            f"{path} does not say which prompts the heads were tuned on: certify with prompts that were not among them"
        )
        return set()
    return set(map(str, ids))


def without_tuned(found: Split, tuned: Collection[str], note: Note, *, force: bool) -> Split:
    """See that the heads were not tuned on certifying prompts, and keep those they were tuned on out of the path too.

    Heads are too sure of what they were tuned on. A path from such prompts would be valid, but start too far, so it is
    made from them only if there are no others, and then from those that only judged the heads if there are some. It
    takes at most `MOST_PATH_PROMPTS`.

    Raises:
        EeinferError: certifying prompts are among the tuning data, and `force` is not given.
    """
    overlap = sum(prompt_id(request) in tuned for request in found.certify)
    if overlap:
        what = f"{overlap} of {len(found.certify)} certifying prompts are among those that the heads were tuned on"
        if not force:
            raise EeinferError(f"{what}, so nothing would be guaranteed for new ones; give other --prompts, or --force")
        note(f"{what}: on new prompts the loss may be above the tolerance")
    fresh = [request for request in found.path if prompt_id(request) not in tuned]
    judging = [request for request in found.path if held_out(request.id)]
    return replace(found, path=(fresh or judging or found.path)[:MOST_PATH_PROMPTS])


def encoded(
    requests: Sequence[Request], tokenizer: Tokenizer | NoTokenizer, vocab_size: int, max_position: int, note: Note
) -> list[Prompt]:
    """Prompts as token ids; those that the model cannot take are left out."""
    prompts: dict[str, Prompt] = {}
    refused: list[str] = []
    for request in requests:
        try:
            tokens = tuple(encode(request, tokenizer, vocab_size))
        except RequestError as error:
            refused.append(f"{request.id}: {error}")
            continue
        if len(tokens) >= max_position:
            refused.append(f"{request.id}: the prompt has {len(tokens)} tokens, the model's context {max_position}")
            continue
        key = prompt_key(tokens)
        prompts[key] = Prompt(request.id, key, tokens)
    if refused:
        note(f"{len(refused)} prompts that the model cannot take are left out; the first: {refused[0]}")
    return list(prompts.values())


def prompt_key(tokens: tuple[int, ...]) -> str:
    """Identifies a prompt by its token ids, 16 hex digits; `prompt_id` goes by the text, whatever the tokenizer."""
    return sha256(repr(tokens).encode()).hexdigest()[:16]


def data_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Identifies a set of prompts: "sha256:" and 64 hex digits."""
    return "sha256:" + sha256("\n".join(sorted(prompt.key for prompt in prompts)).encode()).hexdigest()
