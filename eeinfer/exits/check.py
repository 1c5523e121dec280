"""What happens at an exit: a confidence for every row, and what is needed to pick the tokens of those that leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from eeinfer.exits.heads import ExitHead
from eeinfer.exits.measures import LOGIT_MEASURES, similarity
from eeinfer.ops.logit_stats import logit_stats


class Checked(NamedTuple):
    """Confidence [n] in float32 or wider; the logits [n, V] and their argmax [n] where the measure computed them."""

    confidence: Tensor
    logits: Tensor | None
    argmax: Tensor | None


@dataclass(frozen=True, slots=True)
class Exit:
    """A place where tokens may leave.

    Attributes:
        head: gives the logits.
        measure: a name of `eeinfer.config.schema.Measure`.
        threshold: a row is ready at confidence >= threshold.
    """

    head: ExitHead
    measure: str
    threshold: float

    def check(self, hidden: Tensor, before: Tensor) -> Checked:
        """Check n rows.

        Args:
            hidden: [n, d] after the last layer of the stage.
            before: [n, d] before that layer.
        """
        if self.measure == "similarity":
            return Checked(similarity(hidden, before).clamp(0, 1), None, None)
        measure = LOGIT_MEASURES[self.measure]
        logits = self.head.logits(hidden)
        stats = logit_stats(logits, second=measure.second, mean=measure.mean)
        return Checked(measure.confidence(stats).clamp(0, 1), logits, stats.argmax)
