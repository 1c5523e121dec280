"""Thresholds that fall along an answer: an early token changes all that follows, so CALM asks more of it.

This is the decaying threshold of the paper (Schuster et al., arXiv 2207.07061). The code released with it multiplies
the second term by the threshold as well.
"""

from __future__ import annotations

from math import exp, isfinite


def decayed(threshold: float, decay: float, number: int, max_tokens: int) -> float:
    """The threshold of one token: 0.9 threshold + 0.1 exp(-decay number / max_tokens), clipped to [0, 1].

    Args:
        threshold: of the exit; infinite ones stay as they are.
        decay: how fast it falls; 0 leaves the threshold as it is.
        number: index of the generated token, from 0.
        max_tokens: most generated tokens of its request.
    """
    if decay == 0 or not isfinite(threshold):
        return threshold
    return min(max(0.9 * threshold + 0.1 * exp(-decay * number / max_tokens), 0.0), 1.0)
