"""One small record a row from which every logit-based confidence measure follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eeinfer.ops.norm import at_least_float32


@dataclass(frozen=True, slots=True, eq=False)
class LogitStats:
    """Statistics of n rows of logits; float32 (or wider) [n] but for `argmax`, int64 [n]. NaN logits give NaN.

    Attributes:
        largest: the largest logit.
        argmax: its index, the first of equals.
        log_sum_exp: log of the sum of exponentials.
        second: the second largest logit; -inf unless asked for.
        mean: probability-weighted mean logit (entropy is log_sum_exp - mean); NaN unless asked for.
        vocab_size: logits a row.
    """

    largest: Tensor
    argmax: Tensor
    log_sum_exp: Tensor
    second: Tensor
    mean: Tensor
    vocab_size: int


def logit_stats(logits: Tensor, *, second: bool, mean: bool) -> LogitStats:
    """Statistics of `logits` [n, vocabulary >= 2]; `second` and `mean` cost a pass each and are computed on request."""
    logits = logits.to(at_least_float32(logits.dtype))
    # topk leaves the order of equals open; max returns the first, as the greedy sampler does.
    largest, argmax = logits.max(dim=-1)
    return LogitStats(
        largest,
        argmax,
        logits.logsumexp(dim=-1),
        logits.topk(2, dim=-1).values[:, 1] if second else torch.full_like(largest, -torch.inf),
        _mean(logits) if mean else torch.full_like(largest, torch.nan),
        logits.shape[-1],
    )


def _mean(logits: Tensor) -> Tensor:
    # A logit of -inf has probability 0, and 0 * -inf must count as 0.
    finite = logits.clamp_min(torch.finfo(logits.dtype).min)
    return torch.linalg.vecdot(logits.softmax(dim=-1), finite)
