"""Statistics of logits, against scipy."""

from __future__ import annotations

import math
from math import inf, nan

import numpy as np
import pytest
import torch
from scipy import special
from test_ops import normal, same

from eeinfer.ops.logit_stats import logit_stats
from eeinfer.ops.norm import at_least_float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logit_stats_against_scipy(dtype: torch.dtype) -> None:
    logits = normal(20, 300, dtype=dtype) * 5
    stats = logit_stats(logits, second=True, mean=True)
    wide = logits.double().numpy()
    ordered = np.sort(wide, axis=1)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    same(stats.largest.double(), torch.from_numpy(ordered[:, -1].copy()))
    same(stats.second.double(), torch.from_numpy(ordered[:, -2].copy()))
    same(stats.log_sum_exp.double(), torch.from_numpy(special.logsumexp(wide, axis=1)), tolerance)
    same(stats.mean.double(), torch.from_numpy((special.softmax(wide, axis=1) * wide).sum(1)), tolerance)
    assert stats.argmax.tolist() == wide.argmax(1).tolist()
    assert stats.argmax.dtype is torch.int64
    assert stats.largest.dtype is at_least_float32(dtype)


def test_logit_stats_of_ties_take_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    stats = logit_stats(logits, second=True, mean=True)
    assert stats.argmax.tolist() == [1, 0]
    assert stats.second.tolist() == stats.largest.tolist() == [3.0, 2.0]
    same(stats.log_sum_exp[1], torch.tensor(2 + math.log(4)), 1e-6)
    same(stats.mean[1], torch.tensor(2.0), 1e-6)


def test_logit_stats_where_tokens_are_impossible() -> None:
    stats = logit_stats(torch.tensor([[-inf, 1.0, -inf], [-inf, 0.0, 0.0]]), second=True, mean=True)
    assert stats.largest.tolist() == [1.0, 0.0]
    assert stats.second.tolist() == [-inf, 0.0]
    same(stats.log_sum_exp, torch.tensor([1.0, math.log(2)]), 1e-6)
    same(stats.mean, torch.tensor([1.0, 0.0]), 1e-6)


def test_logit_stats_keep_nan_to_its_row() -> None:
    logits = torch.tensor([[0.0, nan, 1.0], [0.0, 5.0, 1.0]])
    stats = logit_stats(logits, second=True, mean=True)
    for name in ("largest", "log_sum_exp", "mean"):
        assert getattr(stats, name).isnan().tolist() == [True, False], name
    assert stats.argmax[1] == 1


def test_logit_stats_of_large_logits_do_not_overflow() -> None:
    stats = logit_stats(torch.tensor([[3e4, 3e4 - 1, -3e4]]), second=True, mean=True)
    same(stats.log_sum_exp - stats.largest, torch.tensor([math.log1p(math.exp(-1))]), 5e-3)
    assert stats.mean.isfinite().all()


def test_logit_stats_compute_on_request() -> None:
    stats = logit_stats(torch.tensor([[1.0, 2.0]]), second=False, mean=False)
    assert stats.second.tolist() == [-inf]
    assert stats.mean.isnan().all()
