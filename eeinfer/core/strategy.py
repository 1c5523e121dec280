"""Batching strategies: who leaves at an exit. Short, torch-free programs over readiness.

`full` has no exits. `split` lets each ready row leave and the rest go on as a smaller batch. The others move the
batch as one: `all-exit` is the rule of *An Efficient Inference Framework for Early-exit Large Language Models* (arXiv
2407.20272), memoryless as in CALM's decoding loop unless `sticky`; `any`, `majority` and `mean` are the baselines
that DREX (arXiv 2512.15705) compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isnan


@dataclass(frozen=True, slots=True)
class LeaveRule:
    """Who leaves, from the confidences of one pass.

    Attributes:
        name: of the strategy.
        together: the batch leaves or stays as one.
        sticky: a row that was ready at an earlier exit of the iteration counts as ready; where rows leave one by one it
            has left by then.
    """

    name: str
    together: bool
    sticky: bool = False

    def leaving(self, confidences: Sequence[float], thresholds: Sequence[float], flagged: Sequence[bool]) -> list[bool]:
        """One verdict a row. A row whose confidence is NaN has failed: it neither leaves nor counts for the others.

        Args:
            confidences: one a row, in [0, 1] or NaN.
            thresholds: of this exit, one a row.
            flagged: rows that were ready before; ignored unless sticky.
        """
        rows = zip(confidences, thresholds, flagged, strict=True)
        if not self.together:
            return [c >= threshold for c, threshold, _ in rows]
        ready = [c >= threshold or (self.sticky and f) for c, threshold, f in rows]
        alive = [i for i, c in enumerate(confidences) if not isnan(c)]
        votes, margins = [ready[i] for i in alive], [confidences[i] - thresholds[i] for i in alive]
        together = bool(alive) and self._agreed(votes, margins)
        return [not isnan(c) and together for c in confidences]

    def _agreed(self, votes: list[bool], margins: list[float]) -> bool:
        match self.name:
            case "all-exit":
                return all(votes)
            case "any":
                return any(votes)
            case "majority":
                return 2 * sum(votes) > len(votes)
            case "mean":
                return fsum(margins) >= 0  # the mean confidence reaches the mean threshold
        raise AssertionError(f"no quorum is known for {self.name}")


def leave_rule(strategy: str, *, sticky: bool) -> LeaveRule:
    """The rule of a strategy of `eeinfer.config.schema.Strategy`."""
    return LeaveRule(strategy, together=strategy not in {"full", "split"}, sticky=sticky)
