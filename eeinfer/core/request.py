"""What goes in and what comes out: SamplingParams, Request, RequestOutput. Plain data, no tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from eeinfer.errors import RequestError


class FinishReason(StrEnum):
    """Why a sequence ended: `stop` (end-of-sequence token or stop string), `length` (max_tokens), `error`, `abort`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. `None` takes the run's setting.

    Attributes:
        max_tokens: most new tokens, at least 1. `None`: the run's default, cut to what the context leaves.
        temperature: 0 is greedy; otherwise logits are divided by it.
        seed: of this request's draws; they do not depend on its batch or order.
        stop: strings that end the text, or one string; the match and what follows are cut off.
        ignore_eos: go on after an end-of-sequence token, up to `max_tokens`; for benchmarks.

    Raises:
        RequestError: a value that means nothing.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)  # the way of frozen dataclasses to normalise a field
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.temperature is not None and not 0 <= self.temperature < inf:
            raise RequestError(f"temperature is {self.temperature}; it must be a number from 0 on")
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop is {stop}; it must be non-empty strings")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: exactly one of `prompt` (text), `messages` (chat turns) and `prompt_token_ids` is set.

    `line` is its line in a prompt file, for messages. `reference` is an answer that its source gives, for judging.
    """

    id: str
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    line: int | None = None
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One generated token.

    Attributes:
        token_id: its id.
        text: the text it completed; empty while a character is still incomplete and for special tokens.
        layers_executed: layers run for it.
        confidence: at the exit where it left; `None` at full depth, where nothing is checked.
    """

    token_id: int
    text: str
    layers_executed: int
    confidence: float | None


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What a calibration promises: with probability `confidence`, a prompt's expected loss is at most `tolerance`."""

    tolerance: float
    confidence: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one Request. With `finish_reason` ERROR, `error` says why and `tokens` holds what came before.

    `certified` is what the calibration in use promises for this answer, or in words why it promises nothing; `None`
    when no calibration is in use.
    """

    id: str
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    tokens: tuple[TokenRecord, ...]
    error: str | None = None
    certified: Guarantee | str | None = None

    @property
    def mean_layers(self) -> float | None:
        """Layers run per generated token, on average; `None` without tokens."""
        return sum(t.layers_executed for t in self.tokens) / len(self.tokens) if self.tokens else None

    @property
    def exit_shares(self) -> dict[int, float]:
        """Share of the generated tokens per depth (layers executed), shallowest first."""
        counts = Counter(t.layers_executed for t in self.tokens)
        return {depth: counts[depth] / len(self.tokens) for depth in sorted(counts)}
