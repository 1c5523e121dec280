"""Picks tokens from logits: the argmax, or a draw from the tempered distribution; both after what a request asks for.

Meanings and order are vLLM's (see `eeinfer.core.request.SamplingParams`), with two ties settled: `top_p` takes equally
likely tokens by id, and `top_k` all that are as likely as its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import torch
from torch import Tensor

from eeinfer.core.plan import Draw, Shaping
from eeinfer.core.request import TokenLogprob
from eeinfer.ops.norm import at_least_float32

_FEW = 1024  # tokens; most of the mass of most distributions


def sample(logits: Tensor, draws: Sequence[Draw], argmax: Tensor | None = None) -> Tensor:
    """Token ids, int64 [n].

    A draw takes the argmax after adding Gumbel noise that depends on its own seed only (Gumbel-max). So a row's token
    depends on nothing but its logits and its draw, and rounding in the logits changes it as seldom as can be: inverting
    the cumulative distribution would hand the error of all tokens before to each token.

    Args:
        logits: [n, V].
        draws: one a row.
        argmax: [n], if it is known already.
    """
    tokens = logits.argmax(dim=-1) if argmax is None else argmax.clone()
    for row, draw in enumerate(draws):
        if draw.temperature > 0 or draw.shaping is not None or draw.banned:
            tokens[row] = _draw(logits[row], draw)
    return tokens


def token_logprobs(logits: Tensor, draws: Sequence[Draw], tokens: Tensor) -> dict[int, tuple[TokenLogprob, ...]]:
    """Log-probabilities of the rows that ask for them, by row: of the token picked, then of the likeliest ones.

    Args:
        logits: [n, V], as the head gave them: before penalties, bias and temperature.
        draws: one a row.
        tokens: [n], the tokens picked.
    """
    return {
        row: _logprobs(logits[row], tokens[row], logits.shape[1] if draw.logprobs < 0 else draw.logprobs)
        for row, draw in enumerate(draws)
        if draw.logprobs is not None
    }


def _logprobs(logits: Tensor, token: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    logprobs = logits.log_softmax(dim=-1, dtype=at_least_float32(logits.dtype))
    own = logprobs[token]
    top, ids = logprobs.topk(count)
    chosen = TokenLogprob(int(token), float(own), int((logprobs > own).sum()) + 1)
    values = top.tolist()
    ranks = {value: rank for rank, value in reversed([*enumerate(values, start=1)])}  # equally likely: the same rank
    return (chosen, *(TokenLogprob(i, value, ranks[value]) for i, value in zip(ids.tolist(), values, strict=True)))


def _draw(logits: Tensor, draw: Draw) -> Tensor:
    wide = at_least_float32(logits.dtype)
    info = torch.finfo(wide)
    row = _adjusted(logits.to(wide), draw)
    if draw.temperature == 0:
        return row.argmax()
    # Shifting by the largest first keeps tiny temperatures from overflowing; both are clamped to what the type can
    # divide by, since 0 / 0 and -inf / inf would be NaN.
    tempered = (row - row.max()) / min(max(draw.temperature, info.tiny), info.max)
    if draw.shaping is not None:
        tempered = _truncated(tempered, draw.shaping)
    generator = torch.Generator(logits.device).manual_seed(draw.seed)
    exponential = torch.empty_like(tempered).exponential_(generator=generator).clamp_min_(info.tiny)
    return (tempered - exponential.log()).argmax()


def _adjusted(row: Tensor, draw: Draw) -> Tensor:
    """The logits [V] of one row without what is banned, with its bias and its penalties."""
    if draw.shaping is None and not draw.banned:
        return row
    row = row.clone()
    if draw.banned:
        row[torch.tensor(draw.banned, device=row.device)] = -inf
    if draw.shaping is None:
        return row
    if draw.shaping.logit_bias:
        ids, bias = zip(*draw.shaping.logit_bias, strict=True)
        row[torch.tensor(ids, device=row.device)] += torch.tensor(bias, dtype=row.dtype, device=row.device)
    return _penalised(row, draw.shaping, draw) if draw.shaping.penalises else row


def _penalised(row: Tensor, shaping: Shaping, draw: Draw) -> Tensor:
    info = torch.finfo(row.dtype)
    generated = torch.tensor(draw.generated, dtype=torch.int64, device=row.device)
    if shaping.repetition_penalty != 1:
        penalty = min(max(shaping.repetition_penalty, info.tiny), info.max)
        seen = torch.cat((torch.tensor(draw.prompt, dtype=torch.int64, device=row.device), generated))
        logits = row[seen]
        # A token that was seen twice is written twice, with the same value.
        row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty).clamp_max(info.max)
    ids, counts = generated.unique(return_counts=True)
    row[ids] -= shaping.frequency_penalty * counts + shaping.presence_penalty
    return row


def _truncated(tempered: Tensor, shaping: Shaping) -> Tensor:
    """Tempered logits [V], of which the largest is 0, with -inf for the tokens that are not to be drawn."""
    if shaping.min_p > 0:
        tempered = tempered.masked_fill(tempered < log(shaping.min_p), -inf)
    if 0 < shaping.top_k < len(tempered):
        tempered = tempered.masked_fill(tempered < tempered.topk(shaping.top_k).values[-1], -inf)
    if shaping.top_p < 1:
        kept = _nucleus(tempered, shaping.top_p)
        tempered = torch.full_like(tempered, -inf).index_copy_(0, kept, tempered[kept])
    return tempered


def _nucleus(tempered: Tensor, top_p: float) -> Tensor:
    """Ids of the likeliest tokens up to the one with which their probabilities reach `top_p`."""
    # In float64, or the sum of a long tail would be off by more than the tail.
    ids = tempered.isfinite().nonzero().squeeze(1)
    total = tempered[ids].double().exp().sum()
    if len(ids) > _FEW:  # sorting a vocabulary takes ten times as long as all the rest
        few = ids[tempered[ids] >= tempered.topk(_FEW).values[-1]]
        if tempered[few].double().exp().sum() >= top_p * total:
            ids = few
    values, order = tempered[ids].sort(descending=True, stable=True)
    mass = values.double().exp().cumsum(dim=0) / total
    return ids[order[: 1 + int((mass[:-1] < top_p).sum())]]
