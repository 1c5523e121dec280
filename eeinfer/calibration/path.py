"""A path of joint thresholds, from the safest to the most eager, fixed before any certifying prompt is seen.

Each step aims at a selective risk: of the tokens that leave at an exit, the share that loses. Each exit in turn gets
the smallest threshold that keeps it among the tokens that reach the exit. Before the first such step come some at which
fewer of its tokens leave, the surest: a sample of tokens without a loss does not say which of them are safer. No
threshold ever rises along the path.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from eeinfer.calibration.traces import Traces

RISKS = tuple(float(risk) for risk in np.geomspace(0.0005, 1.0, 44))  # steps of 19 %
SAFER = (0.1, 0.2, 0.4, 0.7)  # shares of the tokens that leave at the first of them
_LEAST_LEAVING = 20  # tokens above a threshold, below which its selective risk says nothing
_DIGITS = 1e6  # thresholds are rounded up to six decimals


@dataclass(frozen=True, slots=True)
class Point:
    """One step.

    Attributes:
        thresholds: one an exit; inf where nothing leaves.
        expected_loss: mean over prompts on the traces: what the path's prompts propose, not what holds.
        expected_layers: per decode token, on the traces.
    """

    thresholds: tuple[float, ...]
    expected_loss: float
    expected_layers: float


def build_path(traces: Traces, decay: float) -> list[Point]:
    """The path; empty when no threshold of any exit keeps any of `RISKS`.

    Args:
        traces: of the path's prompts.
        decay: of the thresholds along an answer (`exits.decay`).
    """
    confidence = _constant(traces, decay)
    thresholds = np.full(len(traces.layers), inf)
    points: dict[tuple[float, ...], Point] = {}
    for risk in RISKS:
        thresholds = _step(confidence, traces.loses, thresholds, risk)
        if thresholds.min() == inf:
            continue
        steps = [] if points else [_safer(confidence, thresholds, share) for share in SAFER]
        for step in (*steps, thresholds):
            key = tuple(step.tolist())
            if key not in points:
                points[key] = _point(traces, confidence, key)
    return list(points.values())


def _constant(traces: Traces, decay: float) -> NDArray[np.float64]:
    """The constant threshold up to which each token leaves, [k, t].

    With decay, token number t of at most N leaves at confidence >= 0.9 threshold + 0.1 exp(-decay t / N) (CALM, arXiv
    2207.07061): solved for the threshold, which is 1 at most.
    """
    if decay == 0:
        return traces.confidence
    return np.minimum((traces.confidence - 0.1 * np.exp(-decay * traces.progress)) / 0.9, 1.0)


def _step(
    confidence: NDArray[np.float64], loses: NDArray[np.bool_], before: NDArray[np.float64], risk: float
) -> NDArray[np.float64]:
    here = np.ones(confidence.shape[1], dtype=bool)
    thresholds = before.copy()
    for i in range(len(before)):
        thresholds[i] = min(before[i], _smallest_threshold(confidence[i][here], loses[i][here], risk))
        here &= confidence[i] < thresholds[i]
    return thresholds


def _safer(confidence: NDArray[np.float64], thresholds: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Thresholds at which this share of the tokens that leave at each exit leaves there, the surest ones."""
    here = np.ones(confidence.shape[1], dtype=bool)
    safer = thresholds.copy()
    for i, threshold in enumerate(thresholds):
        leaving = confidence[i][here & (confidence[i] >= threshold)]
        here &= confidence[i] < threshold
        if leaving.size:
            safer[i] = max(threshold, _rounded_up(np.quantile(leaving, 1 - share)))
    return safer


def _smallest_threshold(confidence: NDArray[np.float64], loses: NDArray[np.bool_], risk: float) -> float:
    """The smallest threshold, rounded up, at which at most `risk` of the tokens at or above it lose; inf if none."""
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order]
    counts = np.arange(1, len(order) + 1)
    # Equals leave together, so only the last of them can be where to stop.
    last_of_equals = np.append(ordered[:-1] > ordered[1:], True)[: len(order)]
    enough = (np.cumsum(loses[order]) <= risk * counts) & (counts >= _LEAST_LEAVING) & last_of_equals
    if not enough.any():
        return inf
    return _rounded_up(ordered[np.flatnonzero(enough)[-1]])


def _rounded_up(threshold: float) -> float:
    return float(np.ceil(threshold * _DIGITS) / _DIGITS)


def _point(traces: Traces, confidence: NDArray[np.float64], thresholds: tuple[float, ...]) -> Point:
    leaves = confidence >= np.array(thresholds)[:, None]
    first = np.where(leaves.any(axis=0), leaves.argmax(axis=0), len(traces.layers))
    tokens = np.arange(len(first))
    lost = np.vstack((traces.loses, np.zeros(len(first), dtype=bool)))[first, tokens]
    depths = np.array([*traces.layers, traces.num_layers])[first]
    per_answer = np.bincount(traces.owner, weights=lost, minlength=len(traces.lengths))
    return Point(
        thresholds=thresholds,
        expected_loss=float(np.mean(per_answer / np.maximum(traces.lengths, 1))),
        expected_layers=float(depths.mean()),
    )
