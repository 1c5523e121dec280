"""What a request's sampling parameters mean in this run: the run's settings filled in, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from eeinfer.config.schema import SamplingSettings
from eeinfer.core.plan import Shaping
from eeinfer.core.request import SamplingParams
from eeinfer.errors import RequestError

_DEFAULTED = tuple({field.name for field in fields(SamplingSettings)} - {"max_tokens", "seed"})
_PLAIN = Shaping()


def effective(params: SamplingParams, settings: SamplingSettings, max_tokens: int, vocab_size: int) -> SamplingParams:
    """The parameters with nothing left open but the seed.

    Args:
        params: of the request.
        settings: the run's.
        max_tokens: what the request's comes to.
        vocab_size: of the model.

    Raises:
        RequestError: they contradict each other or name tokens that the model does not have.
    """
    filled = {name: getattr(settings, name) for name in _DEFAULTED if getattr(params, name) is None}
    for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        if beyond := [token for token in tokens if token >= vocab_size]:
            raise RequestError(f"{name} has token {beyond[0]}, which is outside the vocabulary of {vocab_size}")
    if (params.logprobs or 0) > vocab_size:
        raise RequestError(f"logprobs is {params.logprobs}; the vocabulary has {vocab_size} tokens")
    return replace(params, max_tokens=max_tokens, **filled)


def shaping_of(params: SamplingParams) -> Shaping | None:
    """What effective parameters do to logits; None: nothing. The argmax needs no truncation."""
    names = [field.name for field in fields(Shaping) if field.name != "logit_bias"]
    if params.temperature == 0:
        names = [name for name in names if name.endswith("_penalty")]
    shaping = Shaping(logit_bias=tuple(params.logit_bias.items()), **{name: getattr(params, name) for name in names})
    return None if shaping == _PLAIN else shaping


def banned_tokens(params: SamplingParams, eos_token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Tokens that cannot be picked before `min_tokens`: those that would end the answer, ignored ones too."""
    ends = {token for token in eos_token_ids if token < vocab_size}  # a configuration may name more than there are
    return tuple(sorted(ends | set(params.stop_token_ids))) if params.min_tokens else ()
