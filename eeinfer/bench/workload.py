"""The requests of a benchmark: prompts drawn from a file, or synthetic token ids. Tokenised before any clock runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import BinaryIO

from eeinfer.bench.sweep import Group
from eeinfer.core.request import GREEDY, Request
from eeinfer.engine.prompt_file import read_prompt_file
from eeinfer.errors import ConfigError, EeinferError, RequestError

Encode = Callable[[Request], list[int]]
LEAST_PROMPTS = 8


def read_requests(source: Path | BinaryIO, seed: int) -> list[Request]:
    """All requests of a prompt file, shuffled by `seed`, so that the first N are a sample of it.

    Raises:
        EeinferError: a file or line that cannot be read; a benchmark runs on good prompts only.
    """
    requests = []
    for entry in read_prompt_file(source):
        if not isinstance(entry, Request):
            raise EeinferError(f"--prompts: {entry.message}; a benchmark needs every line to be a prompt")
        requests.append(entry)
    Random(seed).shuffle(requests)  # noqa: S311 - not for secrets
    return requests


def drawn(requests: Sequence[Request], group: Group, num_prompts: int | None, encode: Encode) -> list[Request]:
    """The first prompts of a shuffled file as token ids; as many as sequences in flight, at least 8, unless told.

    Raises:
        ConfigError: more prompts are asked for than there are.
        EeinferError: a prompt that cannot be encoded.
    """
    wanted = num_prompts or min(max(group.batch, LEAST_PROMPTS), len(requests))
    if wanted > len(requests):
        raise ConfigError(
            f"--num-prompts {wanted}: there are {len(requests)} prompts; ask for fewer, give a longer --prompts file, "
            f"or pass --input-len for synthetic ones"
        )
    return [_encoded(request, encode) for request in requests[:wanted]]


def traced(
    requests: Sequence[Request], depths: Mapping[str, Sequence[int]], num_prompts: int | None, encode: Encode
) -> list[Request]:
    """The prompts of a recorded trace as token ids, each answered with as many tokens as were recorded for it.

    Raises:
        ConfigError: the trace has no answer to any of the prompts, or to fewer than `num_prompts`.
        EeinferError: a prompt that cannot be encoded.
    """
    recorded = [request for request in requests if depths.get(request.id)]
    wanted = num_prompts or len(recorded)
    if not recorded or wanted > len(recorded):
        raise ConfigError(
            f"--replay-trace: the trace has answers to {len(recorded)} of the prompts, {wanted or 'some'} are wanted: "
            f"give the --prompts file that it was recorded on"
        )
    return [
        limited([_encoded(request, encode)], len(depths[request.id]), ignore_eos=True)[0]
        for request in recorded[:wanted]
    ]


def synthetic(group: Group, num_prompts: int | None, vocab_size: int, seed: int) -> list[Request]:
    """Prompts of `group.input_len` random token ids; as many as sequences in flight, at least 8, unless told."""
    assert group.input_len is not None
    random = Random(seed)  # noqa: S311 - not for secrets
    wanted = num_prompts or max(group.batch, LEAST_PROMPTS)
    ids = [tuple(random.choices(range(vocab_size), k=group.input_len)) for _ in range(wanted)]
    return [Request(id=f"synthetic-{i}", prompt_token_ids=tokens) for i, tokens in enumerate(ids)]


def limited(requests: Sequence[Request], max_tokens: int, *, ignore_eos: bool) -> list[Request]:
    """The same prompts, answered greedily with up to `max_tokens` tokens, whatever their own lines say."""
    sampling = replace(GREEDY, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return [replace(request, sampling=sampling) for request in requests]


def check_context(requests: Sequence[Request], max_position: int) -> None:
    """Refuse a request that is longer than the model's context.

    Raises:
        ConfigError: names it and its lengths.
    """
    for request in requests:
        assert request.prompt_token_ids is not None
        prompt, new = len(request.prompt_token_ids), request.sampling.max_tokens or 0
        if prompt + new > max_position:
            raise ConfigError(
                f"request {request.id} has {prompt} prompt tokens and up to {new} new ones, the model's context is "
                f"{max_position}: lower --input-len or --output-len, or shorten the prompt"
            )


def check_fits(requests: Sequence[Request], batch: int, num_blocks: int, block_size: int) -> None:
    """Refuse a batch whose longest requests cannot all be in the cache at once: nobody would run at full batch.

    Admission keeps one free block for each sequence in flight, so each counts one more than it fills.

    Raises:
        ConfigError: names the largest batch that fits.
    """
    needed = sorted((_blocks(request, block_size) for request in requests), reverse=True)[:batch]
    fitting, left = 0, num_blocks
    while fitting < len(needed) and needed[fitting] <= left:
        left -= needed[fitting]
        fitting += 1
    if fitting < len(needed):
        raise ConfigError(
            f"--batch {batch} needs {sum(needed)} KV blocks for its longest requests, the cache has {num_blocks}: the "
            f"largest batch that fits is {fitting}; lower --batch or the lengths, or raise --num-blocks"
        )


def _blocks(request: Request, block_size: int) -> int:
    assert request.prompt_token_ids is not None
    assert request.sampling.max_tokens is not None
    return -(-(len(request.prompt_token_ids) + request.sampling.max_tokens) // block_size) + 1


def _encoded(request: Request, encode: Encode) -> Request:
    try:
        tokens = tuple(encode(request))
    except RequestError as error:
        raise EeinferError(f"--prompts: line {request.line}, {request.id}: {error}") from None
    return replace(request, prompt=None, messages=None, prompt_token_ids=tokens)
