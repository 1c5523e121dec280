"""Who leaves at an exit, against tables worked out by hand."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeinfer.core.strategy import LeaveRule, leave_rule

STRATEGIES = ("full", "all-exit", "split", "any", "majority", "mean")
TOGETHER = ("all-exit", "any", "majority", "mean")
Y, N = True, False

quick = settings(max_examples=200, deadline=None, database=None, derandomize=True)
confidences = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=9)


def leaving(strategy: str, confidence: list[float], threshold: float, flagged: list[bool] | None = None) -> list[bool]:
    rule = leave_rule(strategy, sticky=flagged is not None)
    return rule.leaving(confidence, [threshold] * len(confidence), flagged or [False] * len(confidence))


@pytest.mark.parametrize(
    ("confidence", "split", "all_exit", "any_", "majority", "mean"),
    [
        ([0.9], [Y], [Y], [Y], [Y], [Y]),
        ([0.4], [N], [N], [N], [N], [N]),
        ([0.5], [Y], [Y], [Y], [Y], [Y]),  # equal to the threshold is ready
        ([0.9, 0.4], [Y, N], [N, N], [Y, Y], [N, N], [Y, Y]),  # one of two is no majority; the mean is .65
        ([0.5, 0.4], [Y, N], [N, N], [Y, Y], [N, N], [N, N]),
        ([0.5, 0.5, 0.0], [Y, Y, N], [N, N, N], [Y, Y, Y], [Y, Y, Y], [N, N, N]),
        ([1.0, 0.3, 0.2], [Y, N, N], [N, N, N], [Y, Y, Y], [N, N, N], [Y, Y, Y]),  # mean exactly .5
        ([0.6, 0.7, 0.8], [Y, Y, Y], [Y, Y, Y], [Y, Y, Y], [Y, Y, Y], [Y, Y, Y]),
        ([0.1, 0.2, 0.3], [N, N, N], [N, N, N], [N, N, N], [N, N, N], [N, N, N]),
        # A failed row neither leaves nor counts.
        ([nan], [N], [N], [N], [N], [N]),
        ([nan, nan], [N, N], [N, N], [N, N], [N, N], [N, N]),
        ([0.9, nan], [Y, N], [Y, N], [Y, N], [Y, N], [Y, N]),
        ([0.4, nan], [N, N], [N, N], [N, N], [N, N], [N, N]),
        ([0.9, nan, 0.4], [Y, N, N], [N, N, N], [Y, N, Y], [N, N, N], [Y, N, Y]),
        ([0.9, nan, 0.9, 0.4], [Y, N, Y, N], [N, N, N, N], [Y, N, Y, Y], [Y, N, Y, Y], [Y, N, Y, Y]),
    ],
)
def test_hand_table(
    confidence: list[float],
    split: list[bool],
    all_exit: list[bool],
    any_: list[bool],
    majority: list[bool],
    mean: list[bool],
) -> None:
    expected = {"split": split, "all-exit": all_exit, "any": any_, "majority": majority, "mean": mean}
    assert {name: leaving(name, confidence, 0.5) for name in expected} == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_infinite_threshold_never_leaves(strategy: str) -> None:
    assert leaving(strategy, [1.0, 0.5, nan, 0.0], inf) == [N, N, N, N]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_negative_infinite_threshold_always_leaves_unless_failed(strategy: str) -> None:
    assert leaving(strategy, [1.0, 0.5, nan, 0.0], -inf) == [Y, Y, N, Y]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rows(strategy: str) -> None:
    assert leaving(strategy, [], 0.5) == []


@pytest.mark.parametrize(
    ("strategy", "confidence", "flagged", "expected"),
    [
        ("all-exit", [0.9, 0.1], [N, Y], [Y, Y]),
        ("all-exit", [0.9, 0.1, 0.1], [N, Y, N], [N, N, N]),
        ("all-exit", [0.1, 0.1], [Y, Y], [Y, Y]),
        ("all-exit", [0.9, nan], [N, Y], [Y, N]),
        ("any", [0.1, 0.1], [N, Y], [Y, Y]),
        ("any", [0.1, nan], [N, Y], [N, N]),  # the flag of a failed row is no vote
        ("majority", [0.9, 0.1, 0.1], [N, Y, N], [Y, Y, Y]),
        ("majority", [0.9, nan, 0.1], [N, Y, N], [N, N, N]),
        ("split", [0.1, nan], [N, Y], [N, N]),  # a failed row never leaves, flagged or not
    ],
)
def test_sticky(strategy: str, confidence: list[float], flagged: list[bool], expected: list[bool]) -> None:
    assert leaving(strategy, confidence, 0.5, flagged) == expected


@pytest.mark.parametrize("strategy", TOGETHER)
def test_flags_do_not_matter_unless_sticky(strategy: str) -> None:
    rule = leave_rule(strategy, sticky=False)
    assert rule.leaving([0.1, 0.1], [0.5, 0.5], [True, True]) == [N, N]


@pytest.mark.parametrize(
    ("confidence", "thresholds", "split", "all_exit", "any_", "majority", "mean"),
    [
        ([0.5, 0.5], [0.25, 0.75], [Y, N], [N, N], [Y, Y], [N, N], [Y, Y]),
        ([0.5, 0.5], [0.25, 0.875], [Y, N], [N, N], [Y, Y], [N, N], [N, N]),
        ([0.25, 0.75, 1.0], [0.25, 0.75, 1.0], [Y, Y, Y], [Y, Y, Y], [Y, Y, Y], [Y, Y, Y], [Y, Y, Y]),
        ([0.5, 0.5, 0.75], [0.5, 0.25, 1.0], [Y, Y, N], [N, N, N], [Y, Y, Y], [Y, Y, Y], [Y, Y, Y]),
        # The threshold of a failed row does not count either.
        ([0.25, nan], [0.5, 0.0], [N, N], [N, N], [N, N], [N, N], [N, N]),
        ([0.5, nan], [0.5, 1.0], [Y, N], [Y, N], [Y, N], [Y, N], [Y, N]),
    ],
)
def test_each_row_has_its_own_threshold(
    confidence: list[float],
    thresholds: list[float],
    split: list[bool],
    all_exit: list[bool],
    any_: list[bool],
    majority: list[bool],
    mean: list[bool],
) -> None:
    expected = {"split": split, "all-exit": all_exit, "any": any_, "majority": majority, "mean": mean}
    rules = {name: leave_rule(name, sticky=False) for name in expected}
    flags = [False] * len(confidence)
    assert {name: rule.leaving(confidence, thresholds, flags) for name, rule in rules.items()} == expected


@quick
@given(confidences, st.floats(-0.5, 1.5), st.lists(st.booleans(), min_size=9, max_size=9))
def test_the_batch_leaves_as_one(confidence: list[float], threshold: float, flags: list[bool]) -> None:
    for strategy in TOGETHER:
        for flagged in (None, flags[: len(confidence)]):
            assert len(set(leaving(strategy, confidence, threshold, flagged))) == 1


@quick
@given(confidences, st.floats(-0.5, 1.5))
def test_split_decides_each_row_alone(confidence: list[float], threshold: float) -> None:
    assert leaving("split", confidence, threshold) == [leaving("split", [c], threshold)[0] for c in confidence]


@quick
@given(confidences, st.floats(-0.5, 1.5))
def test_quorums_are_nested(confidence: list[float], threshold: float) -> None:
    all_, majority, any_ = (leaving(name, confidence, threshold)[0] for name in ("all-exit", "majority", "any"))
    assert all_ <= majority <= any_
    assert all_ <= leaving("mean", confidence, threshold)[0] <= any_


@quick
@given(st.floats(0, 1, width=32), st.floats(-0.5, 1.5), st.integers(1, 40))
def test_identical_rows_decide_like_one(confidence: float, threshold: float, rows: int) -> None:
    for strategy in STRATEGIES:
        for at in (threshold, confidence):
            assert leaving(strategy, [confidence] * rows, at) == [confidence >= at] * rows


@quick
@given(st.permutations(range(6)), st.lists(st.floats(0, 1, width=32) | st.just(nan), min_size=6, max_size=6))
def test_order_of_rows_does_not_matter(order: list[int], confidence: list[float]) -> None:
    for strategy in STRATEGIES:
        plain = leaving(strategy, confidence, 0.5)
        assert leaving(strategy, [confidence[i] for i in order], 0.5) == [plain[i] for i in order]


def test_rows_and_flags_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        leave_rule("split", sticky=False).leaving([0.5, 0.5], [0.5, 0.5], [False])
    with pytest.raises(ValueError, match="zip"):
        leave_rule("split", sticky=False).leaving([0.5, 0.5], [0.5], [False, False])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_leave_rule_names_its_strategy(strategy: str) -> None:
    assert leave_rule(strategy, sticky=True) == LeaveRule(strategy, together=strategy in TOGETHER, sticky=True)
