"""How well confidence sorts right tokens from wrong ones: thresholds, coverage, AUROC, and layers saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import torch
from scipy.stats import rankdata
from torch import Tensor

PRECISION = 0.98
MIN_LEAVING = 50  # tokens above a threshold, below which its precision says nothing


@dataclass(frozen=True, slots=True)
class Costs:
    """What a token pays, in layers of the model: parameters read, as a share of a layer's.

    Attributes:
        num_layers: of the model.
        vocabulary: the product with the vocabulary matrix.
        completion: K and V of one skipped layer.
        exits: layers executed at each exit.
        heads: the head at each exit, without the vocabulary.
        gates: the gate at each exit; zeros without gates.
    """

    num_layers: int
    vocabulary: float
    completion: float
    exits: tuple[int, ...]
    heads: tuple[float, ...]
    gates: tuple[float, ...]

    @property
    def full(self) -> float:
        """A token at full depth."""
        return self.num_layers + self.vocabulary

    def check(self, index: int, measure: str) -> float:
        """A look at an exit: the gate, or for max-prob the head and all logits."""
        return self.gates[index] if measure == "gate" else self.heads[index] + self.vocabulary

    def leave(self, index: int, measure: str) -> float:
        """What a token that leaves at an exit pays beside the layers it ran and the checks."""
        skipped = self.num_layers - self.exits[index]
        token = self.heads[index] + self.vocabulary if measure == "gate" else 0.0
        return token + self.completion * skipped


@dataclass(frozen=True, slots=True)
class Joint:
    """All exits in turn.

    Attributes:
        measure: `max-prob` or `gate`.
        thresholds: one per exit; inf where nothing leaves, and nothing is checked.
        leaving: share of all tokens that leave at each exit.
        precision: share of the tokens that left whose token is the full model's; None when none left.
        skipped: layers skipped per token, before anything is charged.
        saved: layers saved per token, with checks, heads and completion charged.
        speedup: that this implies where time goes like parameters read.
    """

    measure: str
    thresholds: tuple[float, ...]
    leaving: tuple[float, ...]
    precision: float | None
    skipped: float
    saved: float
    speedup: float


def joint(
    measure: str, confidence: Tensor, agree: Tensor, costs: Costs, thresholds: Sequence[float] | None = None
) -> Joint:
    """Let tokens leave at the first exit that is sure of them.

    Args:
        measure: `max-prob` or `gate`.
        confidence: [k, n], of each exit.
        agree: [k, n] bool, whether its token is the full model's.
        costs: of this model and these exits.
        thresholds: one per exit; by default each is the smallest that keeps `PRECISION` among the tokens that reach it.
    """
    here, right, found = torch.ones_like(agree[0]), 0, []
    paid, leaving = 0.0, []
    for i, depth in enumerate(costs.exits):
        chosen = smallest_threshold(confidence[i][here], agree[i][here], digits=DIGITS[measure])
        threshold = chosen if thresholds is None else thresholds[i]
        found.append(threshold)
        leaves = here & (confidence[i] >= threshold)
        reached, left = float(here.double().mean()), float(leaves.double().mean())
        paid += 0.0 if threshold == inf else reached * costs.check(i, measure)
        paid += left * (depth + costs.leave(i, measure))
        right += int(agree[i][leaves].sum())
        leaving.append(left)
        here = here & ~leaves
    gone = sum(leaving)
    saved = costs.full - (paid + (1 - gone) * costs.full)
    skipped = sum(left * (costs.num_layers - depth) for left, depth in zip(leaving, costs.exits, strict=True))
    precision = right / int((~here).sum()) if gone else None
    return Joint(measure, tuple(found), tuple(leaving), precision, skipped, saved, costs.full / (costs.full - saved))


DIGITS = {"max-prob": 4, "gate": 6}  # of thresholds; gates are sure near 1


def smallest_threshold(confidence: Tensor, agree: Tensor, precision: float = PRECISION, digits: int = 4) -> float:
    """Smallest threshold (rounded up to so many digits) with `precision` among the tokens at or above it; inf if none.

    Args:
        confidence: [n].
        agree: [n] bool, whether the token is the full model's.
        precision: share of them that must agree.
        digits: after the point.
    """
    count, lowest = _most_that_may_leave(confidence, agree, precision)
    if not count:
        return inf
    return min(1.0, ceil(lowest * 10**digits) / 10**digits)


def coverage(confidence: Tensor, agree: Tensor, precision: float) -> float:
    """Largest share of tokens, the surest first, of which a share of `precision` agrees. Shapes as above."""
    return _most_that_may_leave(confidence, agree, precision)[0] / max(1, len(confidence))


def _most_that_may_leave(confidence: Tensor, agree: Tensor, precision: float) -> tuple[int, float]:
    ordered, order = confidence.sort(descending=True)
    counts = torch.arange(1, len(order) + 1)
    kept = agree[order].double().cumsum(0) / counts
    # Equals leave together, so only the last of them can be where to stop.
    last_of_equals = torch.ones(len(order), dtype=torch.bool)
    last_of_equals[:-1] = ordered[:-1] > ordered[1:]
    enough = (kept >= precision) & (counts >= MIN_LEAVING) & last_of_equals
    if not enough.any():
        return 0, inf
    last = int(enough.nonzero()[-1])
    return last + 1, float(ordered[last].double())


def auroc(confidence: Tensor, agree: Tensor) -> float | None:
    """Chance that a token that agrees is surer than one that does not, equals counting half; None without both.

    The Mann-Whitney statistic, from ranks. Shapes as above.
    """
    right = int(agree.sum())
    wrong = len(agree) - right
    if not right or not wrong:
        return None
    ranks = torch.from_numpy(rankdata(confidence.double().numpy()))
    return float((ranks[agree].sum() - right * (right + 1) / 2) / (right * wrong))
