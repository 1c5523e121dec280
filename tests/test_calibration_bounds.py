"""P-values: valid under the null, monotone, right at the edges; and what they say before anything has run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from eeinfer.calibration.bounds import (
    bentkus,
    hoeffding,
    hoeffding_bentkus,
    largest_mean,
    prompts_needed,
    smallest_tolerance,
)

LEVELS = (0.005, 0.01, 0.05, 0.1, 0.5)


@pytest.mark.parametrize("n", [1, 5, 50, 311, 623])
@pytest.mark.parametrize("tolerance", [0.01, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("bound", [hoeffding, bentkus, hoeffding_bentkus])
def test_losses_of_0_and_1_are_never_below_their_level_too_often(bound: Any, n: int, tolerance: float) -> None:
    """Exactly, over all counts: at a true mean of `tolerance`, the hardest case of the null."""
    counts = np.arange(n + 1)
    p_values, chances = bound(counts / n, n, tolerance), binom.pmf(counts, n, tolerance)
    for level in LEVELS:
        assert chances[p_values <= level].sum() <= level + 1e-12


@pytest.mark.parametrize("tolerance", [0.02, 0.1])
def test_shares_of_tokens_are_never_below_their_level_too_often(tolerance: float) -> None:
    """By simulation: answers of uneven quality, losses in steps of a 40th, a true mean just above the tolerance."""
    rng = np.random.default_rng(0)
    rates = rng.beta(0.3, 0.3 * (1 / tolerance - 1), size=(4000, 150))
    means = (rng.binomial(40, rates) / 40).mean(axis=1)
    p_values = hoeffding_bentkus(means, 150, tolerance)
    for level in LEVELS:
        margin = 3 * math.sqrt(level * (1 - level) / len(means))
        assert (p_values <= level).mean() <= level + margin


def test_p_values_grow_with_the_mean_and_fall_with_the_tolerance() -> None:
    means = np.linspace(0, 1, 301)
    tolerances = np.linspace(0.001, 1, 300)
    for n in (1, 7, 300):
        for bound in (hoeffding, bentkus, hoeffding_bentkus):
            assert (np.diff(bound(means, n, 0.1)) >= 0).all()
            assert (np.diff(bound(0.03, n, tolerances)) <= 1e-12).all()
    sizes = np.arange(1, 400)
    assert (np.diff(hoeffding(0.01, sizes, 0.05)) < 0).all()


@pytest.mark.parametrize(
    ("mean", "n", "tolerance", "expected"),
    [
        (0.0, 100, 0.02, 0.98**100),
        (0.0, 1, 0.5, 0.5),
        (0.02, 100, 0.02, 1.0),
        (0.7, 100, 0.02, 1.0),
        (1.0, 3, 0.5, 1.0),
        (1.0, 3, 1.0, 1.0),
        (0.0, 3, 1.0, 0.0),
        (0.5, 3, 1.0, 0.0),
        (math.nan, 100, 0.02, math.nan),
    ],
)
def test_edges(mean: float, n: int, tolerance: float, expected: float) -> None:
    assert float(hoeffding_bentkus(mean, n, tolerance)) == pytest.approx(expected, nan_ok=True)


def test_bentkus_by_hand() -> None:
    expected = math.e * sum(math.comb(400, k) * 0.05**k * 0.95 ** (400 - k) for k in range(10 + 1))
    assert float(bentkus(9.4 / 400, 400, 0.05)) == pytest.approx(expected)
    assert float(hoeffding_bentkus(9.4 / 400, 400, 0.05)) <= expected


def test_rounding_of_a_sum_costs_no_whole_prompt() -> None:
    mean = sum([0.1] * 3) / 100
    assert mean * 100 > 0.3, "summed up, rounding makes it more"
    assert float(bentkus(mean, 100, 0.02)) == float(bentkus(0.01, 100, 0.02))
    whole = sum([0.1] * 10 + [1.1, 0.9]) + 4e-16
    assert whole > 3
    assert float(bentkus(whole / 100, 100, 0.2)) == float(bentkus(0.03, 100, 0.2))


@pytest.mark.parametrize(("n", "tolerance", "mean"), [(623, 0.01, 0.002), (623, 0.02, 0.008), (311, 0.02, 0.004)])
def test_what_a_number_of_prompts_can_certify(n: int, tolerance: float, mean: float) -> None:
    assert largest_mean(n, tolerance, 0.05) == pytest.approx(mean, abs=6e-4)


@pytest.mark.parametrize("n", [59, 60, 100, 311, 623])
@pytest.mark.parametrize("tolerance", [0.05, 0.1, 0.5, 1.0])
def test_the_largest_mean_is_the_border(n: int, tolerance: float) -> None:
    limit = largest_mean(n, tolerance, 0.05)
    assert limit is not None
    assert float(hoeffding_bentkus(limit, n, tolerance)) <= 0.05
    if tolerance < 1:
        assert float(hoeffding_bentkus(limit + 1e-6, n, tolerance)) > 0.05


def test_too_few_prompts_certify_nothing() -> None:
    assert largest_mean(148, 0.02, 0.05) is None
    assert largest_mean(149, 0.02, 0.05) is not None
    assert prompts_needed(0.02, 0.05) == 149
    assert smallest_tolerance(149, 0.05) < 0.02 < smallest_tolerance(148, 0.05)


@pytest.mark.parametrize("loss", [0.0, 0.001, 0.008, 0.015, 0.019])
def test_from_the_prompts_needed_on_every_number_will_do(loss: float) -> None:
    needed = prompts_needed(0.02, 0.05, loss)
    assert needed is not None
    assert float(hoeffding_bentkus(loss, needed - 1, 0.02)) > 0.05
    assert (hoeffding_bentkus(loss, np.arange(needed, 3 * needed), 0.02) <= 0.05).all()


def test_no_number_of_prompts_certifies_a_loss_above_the_tolerance() -> None:
    assert prompts_needed(0.02, 0.05, 0.02) is None
    assert prompts_needed(0.02, 0.05, 0.3) is None
    assert prompts_needed(1.0, 0.05, 0.9) == 1
