"""What one step of the engine did: the raw material of every figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eeinfer.core.plan import Pass, Plan, Prefill
from eeinfer.core.request import RequestOutput


@dataclass(frozen=True, slots=True)
class Step:
    """One plan carried out.

    Attributes:
        kind: of the plan.
        stage: of a pass, from 0; -1 for the others.
        rows: of a pass or completion; prompt (or replayed) tokens of a prefill.
        context: KV entries that the attention of a pass read: position + 1 summed over its rows; 0 for the others.
        seconds: it took.
        ended: clock at its end, in seconds.
        produced: ids of the requests that gained a token.
        finished: answers that are complete with it.
    """

    kind: Literal["prefill", "pass", "complete"]
    stage: int
    rows: int
    context: int
    seconds: float
    ended: float
    produced: tuple[str, ...]
    finished: tuple[RequestOutput, ...]


def step_of(
    plan: Plan, *, seconds: float, ended: float, produced: tuple[str, ...], finished: tuple[RequestOutput, ...]
) -> Step:
    """The record of `plan`."""
    match plan:
        case Prefill(spans):
            return Step("prefill", -1, sum(len(s.tokens) for s in spans), 0, seconds, ended, produced, finished)
        case Pass(stage, rows):
            context = sum(row.position + 1 for row in rows)
            return Step("pass", stage, len(rows), context, seconds, ended, produced, finished)
        case _:
            return Step("complete", -1, len(plan.rows), 0, seconds, ended, produced, finished)
