"""What goes in and what comes out: SamplingParams, Request, RequestOutput. Plain data, no tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from reprlib import repr as brief
from sys import float_info
from typing import Any, NamedTuple

from eeinfer.errors import RequestError


class FinishReason(StrEnum):
    """Why a sequence ended.

    `stop` (end-of-sequence or stop token, stop string), `length` (max_tokens), `error` or `abort` (cancelled).
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class _Range(NamedTuple):
    """What a parameter may be: its type, its bounds (the low one excluded where it is `open`), and all in words."""

    kind: type[int | float]
    low: float
    high: float
    words: str
    open: bool = False


MAX_SEQUENCES = 16384  # of one request

_RANGES = {
    "max_tokens": _Range(int, 1, inf, "an integer from 1 on"),
    "temperature": _Range(float, 0, inf, "a number from 0 on"),
    "seed": _Range(int, -inf, inf, "an integer"),
    "top_p": _Range(float, 0, 1, "a number above 0 and up to 1", open=True),
    "top_k": _Range(int, -1, inf, "an integer from 1 on, or 0 for all tokens"),
    "min_p": _Range(float, 0, 1, "a number from 0 to 1"),
    "repetition_penalty": _Range(float, 0, inf, "a number above 0", open=True),
    "presence_penalty": _Range(float, -2, 2, "a number from -2 to 2"),
    "frequency_penalty": _Range(float, -2, 2, "a number from -2 to 2"),
    "min_tokens": _Range(int, 0, inf, "an integer from 0 on"),
    "logprobs": _Range(int, -1, inf, "an integer from 0 on, or -1 for the whole vocabulary"),
    "n": _Range(int, 1, MAX_SEQUENCES, f"an integer from 1 to {MAX_SEQUENCES}"),
}
_NEVER_NONE = ("min_tokens", "n")
_BIAS = 100
_ID = re.compile("[0-9]{1,18}")
_FLAGS = ("ignore_eos", "include_stop_str_in_output")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled; names and meanings are vLLM's. `None` takes the run's setting.

    A token is picked from the logits at the exit where it leaves, in this order: tokens that `min_tokens` forbids,
    `logit_bias`, `repetition_penalty`, `frequency_penalty` and `presence_penalty`, `temperature`, `min_p`, `top_k`,
    `top_p`. Whether it leaves there is decided before all of them.

    Attributes:
        max_tokens: most new tokens, at least 1. `None`: the run's default, cut to what the context leaves.
        temperature: 0 is greedy, which makes `top_p`, `top_k` and `min_p` idle; otherwise logits are divided by it.
        top_p: keep the likeliest tokens until their probabilities sum to this, in (0, 1]; 1 keeps all.
        top_k: keep this many likeliest tokens, and those as likely as the last of them; 0 (or -1) keeps all.
        min_p: keep tokens at least this times as likely as the likeliest, in [0, 1]; 0 keeps all.
        repetition_penalty: positive logits of tokens in the prompt or the answer are divided by this, others are
            multiplied; above 0, 1 does nothing.
        presence_penalty: taken from the logits of the answer's tokens, in [-2, 2].
        frequency_penalty: the same for each time they occur in it, in [-2, 2].
        logit_bias: added to the logits of these token ids, each in [-100, 100].
        seed: of this request's draws; they do not depend on its batch or order.
        min_tokens: before this many tokens no end-of-sequence or stop token is generated, and no stop string counts.
        stop: strings that end the text, or one string; the match and what follows are cut off.
        stop_token_ids: tokens that end the answer beside those of the model; their text is left out.
        ignore_eos: go on after an end-of-sequence token, up to `max_tokens`; for benchmarks.
        include_stop_str_in_output: keep the stop string, or the text of the stop token, in the text.
        logprobs: for each token, tell its log-probability and those of this many likeliest ones; -1: of all. They are
            of the logits at the exit where the token left, before everything above.
        n: answers to give, each with a seed of its own: the first has `seed`, the next `seed + 1`, …

    Raises:
        RequestError: a value that means nothing.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)  # the way of frozen dataclasses to normalise a field
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        for name, range_ in _RANGES.items():
            value = getattr(self, name)
            if not (_within(value, range_) or (value is None and name not in _NEVER_NONE)):
                raise RequestError(f"{name} is {value!r}; it must be {range_.words}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop is {stop}; it must be non-empty strings")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        if self.temperature == 0 and self.n > 1:
            raise RequestError(f"n is {self.n}; it must be 1 when sampling is greedy: give a temperature above 0")


def _within(value: Any, range_: _Range) -> bool:
    return (
        _is_number(value, range_.kind)
        and range_.low <= value <= range_.high
        and not (range_.open and value == range_.low)
    )


def _is_number(value: Any, kind: type[int | float]) -> bool:
    """Whether `value` is a finite number of this kind; an integer is a float too, but true and false are neither."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if kind is int else isinstance(value, int | float) and abs(value) <= float_info.max


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(_is_number(token, int) and token >= 0 for token in value):
        raise RequestError(f"stop_token_ids is {value!r}; it must be a list of token ids")
    return tuple(dict.fromkeys(value))


def _logit_bias(value: Any) -> dict[int, float]:
    """Token ids may be text, as they are in JSON."""
    whole = isinstance(value, Mapping)
    bias = {int(t) if isinstance(t, str) and _ID.fullmatch(t) else t: b for t, b in value.items()} if whole else {}
    pairs_hold = all(
        _is_number(t, int) and t >= 0 and _is_number(b, float) and abs(b) <= _BIAS for t, b in bias.items()
    )
    if not whole or len(bias) < len(value) or not pairs_hold:
        raise RequestError(f"logit_bias is {brief(value)}; it must map token ids to numbers from -{_BIAS} to {_BIAS}")
    return bias


GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
"""The likeliest token each time, whatever the run's settings say."""


@dataclass(frozen=True, slots=True)
class BatchCall:
    """What a line of an OpenAI batch file asks of which endpoint; the answer to it has that endpoint's shape.

    `model` is what the answer names as its model.
    """

    url: str
    model: str | None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: exactly one of `prompt` (text), `messages` (chat turns) and `prompt_token_ids` is set.

    `line` is its line in a prompt file, for messages. `reference` is an answer that its source gives, for judging.
    `call` is the OpenAI call that it came as, if it did. `index` tells the `n` sequences of one request apart.
    """

    id: str
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    line: int | None = None
    reference: str | None = None
    call: BatchCall | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was: its log-probability, and its place among all tokens from the likeliest, 1, on.

    `text` is the token's own, which need not be whole characters.
    """

    token_id: int
    logprob: float
    rank: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One generated token.

    Attributes:
        token_id: its id.
        text: the text it completed; empty while a character is still incomplete and for special tokens.
        layers_executed: layers run for it.
        confidence: at the exit where it left; `None` at full depth, where nothing is checked.
        logprobs: of this token, then of the likeliest ones, by the logits where it left; `None` unless asked for.
    """

    token_id: int
    text: str
    layers_executed: int
    confidence: float | None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What a calibration promises: with probability `confidence`, a prompt's expected loss is at most `tolerance`."""

    tolerance: float
    confidence: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one Request. With `finish_reason` ERROR, `error` says why and `tokens` holds what came before.

    `certified` is what the calibration in use promises for this answer, or in words why it promises nothing; `None`
    when no calibration is in use. Where a request asked for `n` > 1 answers, `outputs` holds them all in the order of
    their `index`, and the fields here are those of the first, or of the first that failed.
    """

    id: str
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    tokens: tuple[TokenRecord, ...]
    error: str | None = None
    certified: Guarantee | str | None = None
    index: int = 0
    outputs: tuple[RequestOutput, ...] = ()

    @property
    def sequences(self) -> tuple[RequestOutput, ...]:
        """Every answer to the request: `outputs`, or this one alone."""
        return self.outputs or (self,)

    @property
    def mean_layers(self) -> float | None:
        """Layers run per generated token, on average; `None` without tokens."""
        depths = [token.layers_executed for output in self.sequences for token in output.tokens]
        return sum(depths) / len(depths) if depths else None

    @property
    def exit_shares(self) -> dict[int, float]:
        """Share of the generated tokens per depth (layers executed), shallowest first."""
        counts = Counter(token.layers_executed for output in self.sequences for token in output.tokens)
        return {depth: counts[depth] / counts.total() for depth in sorted(counts)}
