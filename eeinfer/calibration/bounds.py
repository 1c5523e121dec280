"""P-values for "the mean loss is above the tolerance", from the losses of n exchangeable prompts, each in [0, 1].

A p-value p is valid when P(p <= u) <= u for every u whenever the true mean is above the tolerance. Both bounds below
limit the probability that the observed mean is so low; the smaller of two such limits on the same statistic is valid as
well (Bates et al., arXiv 2101.02703, section 3.1; Angelopoulos et al., Learn then Test, arXiv 2110.01052).
"""

from __future__ import annotations

from math import ceil, e, log, log1p

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import bdtr, rel_entr

FloatArray = NDArray[np.float64]
_MOST_TABULATED = 3_000_000  # numbers of prompts tried one by one
_ROUNDING = 9  # decimals to which a sum of losses is exact: 1/3 + 1/3 + 1/3 must count as 1


def hoeffding(mean: ArrayLike, n: ArrayLike, tolerance: ArrayLike) -> FloatArray:
    """exp(-n h(min(mean, tolerance), tolerance)), h being the relative entropy of two coins (Hoeffding 1963, thm 1).

    Args:
        mean: observed mean loss, in [0, 1]. NaN gives NaN, which is below no level.
        n: prompts, at least 1.
        tolerance: in (0, 1].
    """
    tolerance = np.asarray(tolerance, dtype=np.float64)
    low = np.minimum(np.asarray(mean, dtype=np.float64), tolerance)
    return np.exp(-np.asarray(n) * (rel_entr(low, tolerance) + rel_entr(1 - low, 1 - tolerance)))


def bentkus(mean: ArrayLike, n: ArrayLike, tolerance: ArrayLike) -> FloatArray:
    """min(1, e P(Bin(n, tolerance) <= ceil(n mean))), after Bentkus 2004.

    Arguments as for `hoeffding`.
    """
    total = np.ceil(np.round(np.asarray(n) * np.asarray(mean, dtype=np.float64), _ROUNDING))
    return np.minimum(1.0, e * bdtr(total, np.asarray(n), np.asarray(tolerance, dtype=np.float64)))


def hoeffding_bentkus(mean: ArrayLike, n: ArrayLike, tolerance: ArrayLike) -> FloatArray:
    """The smaller of both. Arguments as for `hoeffding`."""
    return np.minimum(hoeffding(mean, n, tolerance), bentkus(mean, n, tolerance))


def smallest_tolerance(n: int, delta: float) -> float:
    """The tolerance that n prompts without any loss certify at level `delta`: (1 - t)^n = delta."""
    return float(-np.expm1(log(delta) / n))


def largest_mean(n: int, tolerance: float, delta: float) -> float | None:
    """The largest mean loss of n prompts that `hoeffding_bentkus` still certifies; None when not even 0 does."""
    if tolerance >= 1:
        return float(np.nextafter(1, 0))
    if float(hoeffding(0, n, tolerance)) > delta:
        return None
    low = brentq(lambda mean: n * _entropy(mean, tolerance) + log(delta), 0.0, tolerance, xtol=1e-12)
    low = max(0.0, low - 1e-12)  # the root may lie on the wrong side by the precision it was found with
    counts = np.arange(n + 1)
    whole = np.flatnonzero(bentkus(counts / n, n, tolerance) <= delta)
    return max(low, float(counts[whole[-1]]) / n) if whole.size else low


def prompts_needed(tolerance: float, delta: float, loss: float = 0.0) -> int | None:
    """Prompts from which on a mean loss of `loss` certifies `tolerance` at level `delta`; None when it never does.

    Where that takes millions, it is what Hoeffding's bound alone asks for.
    """
    if not 0 <= loss < tolerance:
        return None
    if tolerance >= 1:
        return 1
    enough = ceil(-log(delta) / _entropy(loss, tolerance))  # by Hoeffding, which only falls with n
    if enough > _MOST_TABULATED:
        return enough
    n = np.arange(1, enough + 1)
    failing = np.flatnonzero(hoeffding_bentkus(loss, n, tolerance) > delta)
    return int(n[failing[-1]]) + 1 if failing.size else 1


def _entropy(mean: float, tolerance: float) -> float:
    if mean == 0:
        return -log1p(-tolerance)
    return float(rel_entr(mean, tolerance) + rel_entr(1 - mean, 1 - tolerance))
