"""Confidence: known values, range, order, and what NaN and infinities become."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch import Tensor

from eeinfer.exits.check import Checked, Exit
from eeinfer.exits.heads import ExitHead
from eeinfer.exits.measures import similarity

inf, nan = math.inf, math.nan
LOGIT = ("max-prob", "margin", "entropy")

quick = settings(max_examples=100, deadline=None, database=None, derandomize=True)
logit_rows = st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=12)


def same(hidden: Tensor) -> Tensor:
    return hidden


def check(measure: str, logits: Tensor, temperature: float = 1.0) -> Checked:
    """The check of an exit whose hidden states are its logits."""
    return Exit(ExitHead(1, same, same, temperature), measure, 0.5).check(logits, logits)


def confidence(measure: str, rows: list[list[float]], temperature: float = 1.0) -> list[float]:
    found = check(measure, torch.tensor(rows), temperature).confidence
    assert found.dtype is torch.float32
    return found.tolist()


def log(*probabilities: float) -> list[float]:
    return [math.log(p) if p else -inf for p in probabilities]


@pytest.mark.parametrize(
    ("probabilities", "max_prob", "margin", "entropy"),
    [
        ((0.25, 0.25, 0.25, 0.25), 0.25, 0.0, 0.0),
        ((0.7, 0.2, 0.1), 0.7, 0.5, 1 - 0.8018185525 / math.log(3)),
        ((0.5, 0.5, 0.0, 0.0), 0.5, 0.0, 0.5),  # H = ln 2 of ln 4
        ((0.9, 0.1), 0.9, 0.8, 1 - 0.3250829734 / math.log(2)),
        ((0.0, 1.0, 0.0), 1.0, 1.0, 1.0),
    ],
)
def test_known_values(probabilities: tuple[float, ...], max_prob: float, margin: float, entropy: float) -> None:
    found = [confidence(measure, [log(*probabilities)])[0] for measure in LOGIT]
    assert found == pytest.approx([max_prob, margin, entropy], abs=1e-6)


@pytest.mark.parametrize("vocabulary", [2, 1000, 49152, 128256])
def test_uniform_and_certain_at_real_vocabularies(vocabulary: int) -> None:
    logits = torch.zeros(2, vocabulary)
    logits[1, vocabulary // 2] = 200.0
    found = {measure: check(measure, logits).confidence.tolist() for measure in LOGIT}
    assert found["max-prob"] == pytest.approx([1 / vocabulary, 1], rel=1e-4)
    assert found["margin"] == pytest.approx([0, 1], abs=1e-6)
    assert found["entropy"] == pytest.approx([0, 1], abs=1e-6)


@pytest.mark.parametrize("measure", LOGIT)
def test_rounding_never_leaves_the_range(measure: str) -> None:
    for vocabulary in range(2, 300):
        logits = torch.cat(
            (torch.zeros(1, vocabulary), torch.full((1, vocabulary), 7.3), torch.eye(vocabulary)[:1] * 90)
        )
        found = check(measure, logits).confidence
        assert bool(((found >= 0) & (found <= 1)).all()), vocabulary


@quick
@given(logit_rows)
def test_against_scipy_and_in_range(row: list[float]) -> None:
    p = special.softmax(np.array(row))
    ordered = np.sort(p)
    expected = [ordered[-1], ordered[-1] - ordered[-2], 1 - stats.entropy(p) / math.log(len(row))]
    found = [confidence(measure, [row])[0] for measure in LOGIT]
    assert found == pytest.approx(expected, abs=2e-5)
    assert all(0 <= c <= 1 for c in found)


@quick
@given(logit_rows, st.floats(-100, 100, width=32))
def test_only_differences_of_logits_count(row: list[float], shift: float) -> None:
    for measure in LOGIT:
        plain, shifted = (confidence(measure, [[x + by for x in row]])[0] for by in (0.0, shift))
        assert shifted == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("measure", LOGIT)
@pytest.mark.parametrize(
    "row", [[0.0, nan, 1.0], [nan, nan, nan], [0.0, inf, 1.0], [inf, inf, 0.0], [-inf, -inf, -inf]]
)
def test_what_is_not_finite_is_nan_in_its_row_only(measure: str, row: list[float]) -> None:
    bad, good = confidence(measure, [row, [0.0, 2.0, 1.0]])
    assert math.isnan(bad)
    assert good == confidence(measure, [[0.0, 2.0, 1.0]])[0]


@pytest.mark.parametrize("measure", LOGIT)
def test_temperature_of_the_exit(measure: str) -> None:
    row = [3.0, 1.0, -2.0]
    colder, plain, warmer = (confidence(measure, [row], t)[0] for t in (0.5, 1.0, 4.0))
    assert colder > plain > warmer
    assert warmer == pytest.approx(confidence(measure, [[x / 4 for x in row]])[0], abs=1e-6)


def test_a_check_hands_on_logits_and_argmax_at_its_temperature() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0], [8.0, 0.0, 2.0]])
    checked = check("entropy", logits, 2.0)
    assert checked.logits is not None
    assert checked.argmax is not None
    assert torch.equal(checked.logits, logits / 2)
    assert checked.argmax.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("measure", LOGIT)
def test_narrow_logits_are_measured_in_float32(measure: str, dtype: torch.dtype) -> None:
    logits = (torch.arange(12.0).reshape(2, 6) / 8).sin().to(dtype)
    assert torch.equal(check(measure, logits).confidence, check(measure, logits.float()).confidence)


@pytest.mark.parametrize("measure", LOGIT)
def test_confidence_does_not_depend_on_the_batch(measure: str) -> None:
    logits = torch.randn(7, 500, generator=torch.Generator().manual_seed(1)) * 4
    batched = check(measure, logits).confidence
    assert torch.equal(batched, torch.cat([check(measure, logits[i : i + 1]).confidence for i in range(7)]))


# Similarity


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        ([1.0, 0.0], [5.0, 0.0], 1.0),
        ([1.0, 0.0], [-3.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 2.0], 0.5),
        ([1.0, 1.0], [1.0, 0.0], (1 + math.sqrt(0.5)) / 2),
        ([3.0, 4.0], [4.0, 3.0], 0.98),
    ],
)
def test_similarity(now: list[float], before: list[float], expected: float) -> None:
    assert similarity(torch.tensor([now]), torch.tensor([before])).tolist() == pytest.approx([expected], abs=1e-6)


def test_similarity_never_touches_the_vocabulary() -> None:
    def refuse(_: Tensor) -> Tensor:
        raise AssertionError("similarity needs no logits")

    exit_ = Exit(ExitHead(1, refuse, refuse), "similarity", 0.9)
    checked = exit_.check(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    assert (checked.logits, checked.argmax) == (None, None)
    assert checked.confidence.tolist() == pytest.approx([(1 + math.sqrt(0.5)) / 2])


def test_similarity_stays_in_range_and_wide() -> None:
    hidden = torch.randn(2000, 64, generator=torch.Generator().manual_seed(2))
    head = ExitHead(1, same, same)
    for scale, low, high in ((1.0, 0.99999, 1.0), (-1.0, 0.0, 0.00001)):
        found = Exit(head, "similarity", 0.5).check(hidden, hidden * scale).confidence
        assert found.dtype is torch.float32
        assert bool(((found >= low) & (found <= high)).all())
    huge = torch.full((1, 4), 60000.0, dtype=torch.float16)  # its square is inf in float16
    assert Exit(head, "similarity", 0.5).check(huge, huge).confidence.tolist() == pytest.approx([1.0])


def test_similarity_of_what_is_not_finite_is_nan() -> None:
    hidden = torch.tensor([[nan, 1.0], [inf, 1.0], [1.0, 1.0]])
    before = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    found = Exit(ExitHead(1, same, same), "similarity", 0.5).check(hidden, before).confidence
    assert found.isnan().tolist() == [True, True, False]


# Gate


def gated(gate: Callable[[Tensor], Tensor]) -> Exit:
    """An exit that has a gate and must not be asked for logits."""

    def refuse(_: Tensor) -> Tensor:
        raise AssertionError("a gate needs no logits")

    return Exit(ExitHead(1, refuse, refuse, gate=gate), "gate", 0.5)


def test_a_gate_is_the_confidence_and_never_touches_the_vocabulary() -> None:
    hidden = torch.tensor([[0.25, 9.0], [nan, 0.0], [1.0, 1.0]])
    checked = gated(lambda h: h[:, 0]).check(hidden, hidden)
    assert (checked.logits, checked.argmax) == (None, None)
    assert checked.confidence.tolist() == pytest.approx([0.25, nan, 1.0], nan_ok=True)
