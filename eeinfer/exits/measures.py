"""How confident an exit is: float32 in [0, 1], higher is surer. NaN in gives NaN out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from eeinfer.ops.logit_stats import LogitStats
from eeinfer.ops.norm import at_least_float32


@dataclass(frozen=True, slots=True)
class LogitMeasure:
    """A measure computed from statistics of a row's logits; `second` and `mean` say which optional ones it needs."""

    confidence: Callable[[LogitStats], Tensor]
    second: bool = False
    mean: bool = False


def max_prob(stats: LogitStats) -> Tensor:
    """The largest probability: CALM's and EE-LLM's softmax response."""
    return (stats.largest - stats.log_sum_exp).exp()


def margin(stats: LogitStats) -> Tensor:
    """The largest probability minus the second: CALM's softmax difference, and DREX's measure."""
    return (stats.largest - stats.log_sum_exp).exp() - (stats.second - stats.log_sum_exp).exp()


def entropy(stats: LogitStats) -> Tensor:
    """1 - H / ln V, so that a uniform distribution has 0 and a certain one 1."""
    return 1 - (stats.log_sum_exp - stats.mean) / math.log(stats.vocab_size)


def similarity(hidden: Tensor, before: Tensor) -> Tensor:
    """(1 + cosine of the last two layers' outputs) / 2: CALM's hidden-state saturation. [n, d] each, gives [n]."""
    wide = at_least_float32(hidden.dtype)
    return (1 + F.cosine_similarity(hidden.to(wide), before.to(wide), dim=-1)) / 2


LOGIT_MEASURES = {
    "max-prob": LogitMeasure(max_prob),
    "margin": LogitMeasure(margin, second=True),
    "entropy": LogitMeasure(entropy, mean=True),
}
