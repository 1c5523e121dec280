"""Choices along a path, and the guarantee itself on a population whose risks are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eeinfer.calibration.sequence import fixed_sequence, starting_step, within_budget
from eeinfer.errors import EeinferError

DRAWS, SIZE, DELTA = 2000, 300, 0.05
LOSSES = Path(__file__).parent / "data" / "losses_of_the_default_path.csv"


def constant(*losses: float, n: int = SIZE) -> tuple[Callable[[int], list[float]], list[int]]:
    """Losses at each step, the same for all prompts, and the steps that were asked for."""
    asked: list[int] = []

    def at(step: int) -> list[float]:
        asked.append(step)
        return [losses[step]] * n

    return at, asked


def test_the_sequence_ends_at_the_first_failure() -> None:
    at, asked = constant(0.0, 0.001, 0.03, 0.0)
    verdicts = fixed_sequence(at, range(4), tolerance=0.02, delta=DELTA)
    assert [(v.step, v.loss, v.passed) for v in verdicts] == [(0, 0.0, True), (1, 0.001, True), (2, 0.03, False)]
    assert asked == [0, 1, 2], "what comes after a failure is not even looked at"
    assert verdicts[0].p_value == pytest.approx(0.98**SIZE)


def test_the_sequence_may_begin_anywhere() -> None:
    at, asked = constant(0.5, 0.0, 0.001, 0.03)
    assert [v.passed for v in fixed_sequence(at, range(1, 4), tolerance=0.02, delta=DELTA)] == [True, True, False]
    assert asked == [1, 2, 3]
    at, _ = constant(0.0, 0.03, 0.0)
    assert [v.passed for v in fixed_sequence(at, [1, 2], tolerance=0.02, delta=DELTA)] == [False]


def test_all_steps_may_pass() -> None:
    at, _ = constant(0.0, 0.0)
    assert [v.passed for v in fixed_sequence(at, range(2), tolerance=0.02, delta=DELTA)] == [True, True]


@pytest.mark.parametrize("bad", [[math.nan], [0.1, math.nan, 0.2], [1.5], [-0.1], []])
def test_a_loss_that_is_no_share_is_an_error(bad: list[float]) -> None:
    with pytest.raises(EeinferError, match=r"step 0 of the path has a loss that is no number in 0 … 1"):
        fixed_sequence(lambda _: bad, range(3), tolerance=0.02, delta=DELTA)


@pytest.mark.parametrize("border", range(8))
def test_the_start_is_the_last_step_inside_the_limit(border: int) -> None:
    losses = [0.001] * (border + 1) + [0.02] * (7 - border)
    at, asked = constant(*losses)
    assert starting_step(losses, at, 0.008) == border
    assert len(asked) <= 3, "by bisection"


def test_the_pilot_overrules_the_traces() -> None:
    at, _ = constant(0.001, 0.02, 0.03, 0.04)
    assert starting_step([0.0] * 4, at, 0.008) == 0


def test_the_pilot_needs_a_margin() -> None:
    """A mean just inside the limit, of which nobody can be sure."""
    assert starting_step([0.0, 0.0], lambda step: [0.0] * 99 + [0.7 * step], 0.008) == 0
    assert starting_step([0.0, 0.0], lambda step: [0.004 * step] * 100, 0.008) == 1
    assert starting_step([0.0, 0.0], lambda _: [0.0] * 10, 0.008) == 0, "ten prompts without a loss prove little"


@pytest.mark.parametrize("budget", range(10, 21))
def test_the_first_step_within_a_budget(budget: int) -> None:
    layers = [20, 18, 18, 15, 12, 11]
    expected = next((i for i, n in enumerate(layers) if n <= budget), None)
    assert within_budget(len(layers), lambda step: layers[step], budget) == expected


# The guarantee


def population(tolerance: float, steps: int = 14) -> np.ndarray:
    """Losses [steps, prompts] as the engine gives them: shares of 20 to 128 tokens, some prompts far worse than others.

    The mean of the steps passes the tolerance halfway.
    """
    rng = np.random.default_rng(1)
    lengths, hardness = rng.integers(20, 129, 623), rng.gamma(0.4, 1 / 0.4, 623)
    risks = tolerance * np.geomspace(0.05, 4, steps)
    return rng.binomial(lengths, np.minimum(risks[:, None] * hardness, 1)) / lengths


def certified(losses: np.ndarray, tolerance: float) -> int | None:
    verdicts = fixed_sequence(lambda step: losses[step].tolist(), range(len(losses)), tolerance=tolerance, delta=DELTA)
    return next((v.step for v in reversed(verdicts) if v.passed), None)


def naive(losses: np.ndarray, tolerance: float) -> int | None:
    """The most eager step whose mean loss is under the tolerance."""
    return max(np.flatnonzero(losses.mean(axis=1) <= tolerance), default=None)


def measured() -> np.ndarray:
    """Losses [steps, prompts] of the default model on 623 prompts along its path, safest step first.

    Written by `scripts/collect_losses.py` from the answers that `calibrate-thresholds` judged.
    """
    return np.loadtxt(LOSSES, delimiter=",").T


def just_above(losses: np.ndarray, tolerance: float) -> np.ndarray:
    """The hardest case for a tolerance: losses scaled so that the first step above it, or the last, lies just above."""
    risks = losses.mean(axis=1)
    above = np.flatnonzero(risks > tolerance)
    return np.minimum(losses * 1.001 * tolerance / risks[above[0] if above.size else -1], 1.0)


@pytest.mark.parametrize("tolerance", [0.02, 0.05, 0.10])
@pytest.mark.parametrize("source", ["drawn", "measured"])
def test_the_guarantee_holds_and_the_naive_choice_breaks_it(source: str, tolerance: float) -> None:
    losses = just_above(population(tolerance) if source == "drawn" else measured(), tolerance)
    risks = losses.mean(axis=1)
    above = int(np.flatnonzero(risks > tolerance)[0])
    assert above > 0
    rng = np.random.default_rng(2)
    broken = {certified: 0, naive: 0}
    useful = 0
    for _ in range(DRAWS):
        drawn = losses[:, rng.integers(0, losses.shape[1], SIZE)]
        for choose in broken:
            step = choose(drawn, tolerance)
            broken[choose] += step is not None and risks[step] > tolerance
            useful += choose is certified and step is not None
    margin = 3 * math.sqrt(DELTA * (1 - DELTA) / DRAWS)
    assert broken[certified] / DRAWS <= DELTA + margin
    assert broken[naive] / DRAWS > 0.25
    assert useful / DRAWS > 0.8, "a guarantee that never gives anything is none"
