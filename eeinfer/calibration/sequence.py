"""Choices along a path: fixed-sequence testing, where it starts, and the step that meets a budget of layers.

Fixed-sequence testing (Learn then Test, arXiv 2110.01052, section 3.2) needs no correction for the number of tests, as
the order of the tests is fixed without the data they are made on: hypotheses are tested one after the other at the
full level, and the first that cannot be rejected ends it. An accepted step is false only if some false hypothesis was
rejected, and the first false one in the order is tested at level delta. The order may begin anywhere that was chosen
without those data; so it begins at a step that the path's own prompts put just inside the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from statistics import fmean, stdev
from typing import NamedTuple

from eeinfer.calibration.bounds import hoeffding_bentkus
from eeinfer.errors import EeinferError

_MARGIN = 2.0  # standard errors
_UNSEEN = 0.1  # loss of one prompt that the pilot did not happen to have: few prompts without loss prove little


class Verdict(NamedTuple):
    """One test. `step` is its place on the path; `passed`: that the risk is above the tolerance was rejected."""

    step: int
    loss: float
    p_value: float
    passed: bool


def fixed_sequence(
    losses_at: Callable[[int], Sequence[float]], steps: Sequence[int], *, tolerance: float, delta: float
) -> list[Verdict]:
    """Test the steps in order until one fails. The last that passed, if any, is certified.

    Args:
        losses_at: losses of the certifying prompts at a step, each in [0, 1]; called for the steps that are tested.
        steps: in an order that was fixed without the certifying prompts.
        tolerance: that the mean loss must not exceed.
        delta: the chance of certifying any step that does.

    Raises:
        EeinferError: a loss is not a number in [0, 1], or there is none.
    """
    verdicts: list[Verdict] = []
    for step in steps:
        losses = losses_at(step)
        if not losses or any(isnan(loss) or not 0 <= loss <= 1 for loss in losses):
            raise EeinferError(
                f"step {step} of the path has a loss that is no number in 0 … 1; nothing can be certified"
            )
        mean = fmean(losses)
        p_value = float(hoeffding_bentkus(mean, len(losses), tolerance))
        verdicts.append(Verdict(step, mean, p_value, p_value <= delta))
        if not verdicts[-1].passed:
            break
    return verdicts


def starting_step(expected: Sequence[float], losses_at: Callable[[int], Sequence[float]], limit: float) -> int:
    """Where on the path the sequence begins: the last step that the path's prompts put inside `limit` with a margin.

    Args:
        expected: mean loss of each step on the traces, in the order of the path.
        losses_at: free-running losses of the path's prompts at a step; called for a few steps, by bisection.
        limit: the largest mean loss that the certifying prompts could certify.
    """
    proposed = [step for step, loss in enumerate(expected) if loss <= limit]
    return _last(proposed[-1] if proposed else 0, lambda step: _upper(losses_at(step)) <= limit)


def within_budget(steps: int, layers_at: Callable[[int], float], budget: float) -> int | None:
    """The first step of a path whose mean layers are within the budget, by bisection; None when the last is not."""
    if layers_at(steps - 1) <= budget:
        if layers_at(0) <= budget:
            return 0
        return _last(steps - 1, lambda step: layers_at(step) > budget) + 1
    return None


def _upper(losses: Sequence[float]) -> float:
    supposed = [*losses, _UNSEEN]
    return fmean(supposed) + _MARGIN * stdev(supposed) / len(supposed) ** 0.5


def _last(high: int, holds: Callable[[int], bool]) -> int:
    """The last of 0 … `high` for which `holds`, which holds up to some step and not beyond; 0 if for none."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
