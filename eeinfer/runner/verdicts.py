"""What the host makes of the numbers of an exit: who leaves, and the verdict on every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan

from eeinfer.core.plan import Outcome, Pass, Row, Verdict
from eeinfer.core.readiness import Readiness
from eeinfer.core.request import TokenLogprob
from eeinfer.exits.check import Exit

# Tokens of rows by their place in the pass, and by place the log-probabilities that were asked for.
Picked = tuple[list[int], dict[int, tuple[TokenLogprob, ...]]]


def exit_verdicts(
    plan: Pass,
    exit_: Exit,
    confidences: list[float],
    readiness: Readiness | None,
    pick: Callable[[list[int]], Picked],
) -> Outcome:
    """The verdicts on the rows of a pass that ended at an exit.

    Args:
        plan: the pass.
        exit_: where it ended.
        confidences: one a row, NaN where the numbers were not finite.
        readiness: decides who is ready in place of the measure.
        pick: picks the tokens of the rows at these places, which leave.
    """
    if readiness is not None:
        confidences = _decided(plan.rows, confidences, exit_.head.layers_executed, readiness)
    thresholds = exit_.thresholds(plan.rows)
    leaving = plan.rule.leaving(confidences, thresholds, plan.flagged)
    places = [i for i, leaves in enumerate(leaving) if leaves]
    picked, told = pick(places) if places else ([], {})
    tokens = dict(zip(places, picked, strict=True))
    return tuple(
        Verdict(
            token=tokens.get(i),
            confidence=confidence,
            ready=confidence >= threshold,
            failed=isnan(confidence),
            logprobs=told.get(i),
        )
        for i, (confidence, threshold) in enumerate(zip(confidences, thresholds, strict=True))
    )


def _decided(rows: Sequence[Row], checked: list[float], depth: int, readiness: Readiness) -> list[float]:
    """Certainty for the rows that are ready, none for the others; NaN stays a failure."""
    pairs = zip(rows, checked, strict=True)
    return [c if isnan(c) else float(readiness.ready(row, depth)) for row, c in pairs]
