"""What happens at an exit: a confidence for every row, and what is needed to pick the tokens of those that leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from eeinfer.core.plan import Row
from eeinfer.exits.heads import ExitHead
from eeinfer.exits.measures import LOGIT_MEASURES, similarity
from eeinfer.exits.schedule import decayed
from eeinfer.ops.logit_stats import logit_stats
from eeinfer.ops.parts import Stats


class Checked(NamedTuple):
    """Confidence [n] in float32 or wider; the logits [n, V] and their argmax [n] where the measure computed them."""

    confidence: Tensor
    logits: Tensor | None
    argmax: Tensor | None


@dataclass(frozen=True, slots=True)
class Exit:
    """A place where tokens may leave.

    Attributes:
        head: gives the logits, and the probability of its gate where the measure is `gate`.
        measure: a name of `eeinfer.config.schema.Measure`.
        threshold: a row is ready at confidence >= threshold.
        stats: gives the statistics of logits, where the measure needs them.
        decay: how fast the threshold falls along an answer (see `eeinfer.exits.schedule`); 0: it is constant.
    """

    head: ExitHead
    measure: str
    threshold: float
    stats: Stats = field(default=logit_stats, kw_only=True)
    decay: float = field(default=0.0, kw_only=True)

    def thresholds(self, rows: Sequence[Row]) -> list[float]:
        """The threshold of each row. It depends on the row alone, not on its companions."""
        if self.decay == 0:
            return [self.threshold] * len(rows)
        return [decayed(self.threshold, self.decay, row.number, row.max_tokens) for row in rows]

    def check(self, hidden: Tensor, before: Tensor) -> Checked:
        """Check n rows.

        Args:
            hidden: [n, d] after the last layer of the stage.
            before: [n, d] before that layer.
        """
        if self.measure == "similarity":
            return Checked(similarity(hidden, before).clamp(0, 1), None, None)
        if self.measure == "gate":
            assert self.head.gate is not None, "exits are planned with gates where the measure needs them"
            return Checked(self.head.gate(hidden), None, None)
        measure = LOGIT_MEASURES[self.measure]
        logits = self.head.logits(hidden)
        stats = self.stats(logits, second=measure.second, mean=measure.mean)
        return Checked(measure.confidence(stats).clamp(0, 1), logits, stats.argmax)
