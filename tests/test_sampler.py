"""The sampler: argmax at temperature 0, else the tempered distribution, whatever else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from eeinfer.core.plan import Draw
from eeinfer.runner.sampler import sample

inf = math.inf
BELOW_ONE = 1 - 2.0**-53  # the largest uniform that a sequence draws


def uniforms(n: int, seed: int = 0) -> list[float]:
    return [float(u) for u in np.random.default_rng(seed).random(n)]


def pick(row: list[float], temperature: float, uniform: float, dtype: torch.dtype = torch.float32) -> int:
    (token,) = sample(torch.tensor([row], dtype=dtype), [Draw(temperature, uniform)]).tolist()
    return int(token)


def counts(row: list[float], temperature: float, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = torch.tensor(row, dtype=dtype).expand(n, -1)
    tokens = sample(logits, [Draw(temperature, u) for u in uniforms(n)])
    assert tokens.dtype is torch.int64
    return torch.bincount(tokens, minlength=len(row))


# Greedy


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 7.0, 7.0], [3.0, 3.0, 3.0], [-1.0, -2.0, -0.5]])
    assert sample(logits, [Draw()] * 3).tolist() == [1, 0, 2]


def test_a_known_argmax_is_taken_and_left_alone() -> None:
    logits, argmax = torch.zeros(3, 4), torch.tensor([3, 2, 1])
    out = sample(logits, [Draw(), Draw(1.0, 0.1), Draw()], argmax)
    assert out.tolist() == [3, 0, 1]
    assert argmax.tolist() == [3, 2, 1]


# Drawing


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    row = [math.log(p) for p in (0.125, 0.25, 0.5, 0.125)]
    expected = {0.0: 0, 0.12: 0, 0.13: 1, 0.37: 1, 0.38: 2, 0.87: 2, 0.88: 3, BELOW_ONE: 3}
    assert {u: pick(row, 1.0, u) for u in expected} == expected


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_distribution(temperature: float, dtype: torch.dtype) -> None:
    row = [0.0, 1.0, -1.0, 2.0, 0.5, -0.25]
    observed = counts(row, temperature, 20_000, dtype)
    expected = 20_000 * special.softmax(np.array(row) / temperature)
    assert stats.chisquare(observed.numpy(), expected).pvalue > 1e-3


def test_distribution_over_a_large_vocabulary_with_a_long_tail() -> None:
    # Half of the probability in one token, half spread over 50,000: rounding of the running sum must not eat the tail.
    row = [math.log(50_000.0), *[0.0] * 50_000]
    tokens = sample(torch.tensor(row).expand(400, -1), [Draw(1.0, u) for u in uniforms(400)])
    tail = tokens[tokens > 0]
    assert 160 < len(tail) < 240
    octiles = torch.bincount((tail - 1) // 6250, minlength=8)
    assert stats.chisquare(octiles.numpy()).pvalue > 1e-3


def test_each_row_has_its_own_temperature_and_uniform() -> None:
    row = [math.log(p) for p in (0.1, 0.2, 0.7)]
    draws = [Draw(1.0, 0.05), Draw(1.0, 0.25), Draw(1.0, 0.5), Draw(), Draw(100.0, 0.3), Draw(0.01, 0.05)]
    assert sample(torch.tensor([row] * 6), draws).tolist() == [0, 1, 2, 2, 0, 2]


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(9, 1000, generator=torch.Generator().manual_seed(3))
    draws = [Draw(0.0 if i % 3 == 0 else 0.5 + i / 4, u) for i, u in enumerate(uniforms(9))]
    batched = sample(logits, draws).tolist()
    assert batched == [int(sample(logits[i : i + 1], [draws[i]])) for i in range(9)]
    order = [4, 8, 0, 2, 6, 1, 7, 3, 5]
    assert sample(logits[order], [draws[i] for i in order]).tolist() == [batched[i] for i in order]


def test_a_row_does_not_depend_on_a_failed_companion() -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 9.0, 1.0]])
    assert sample(logits, [Draw(1.0, 0.5)] * 2)[1] == 1


# Extremes


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-37, 1e-44, 1e-46, 1e-200, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    row = [0.0, 1.0, 3.0, 2.0]
    assert [pick(row, temperature, u, dtype) for u in (0.0, 0.5, BELOW_ONE)] == [2, 2, 2]


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e39, 1e308])
def test_huge_temperature_is_uniform(temperature: float) -> None:
    row = [0.0, 30.0, -30.0, 5.0]
    assert [pick(row, temperature, u) for u in (0.1, 0.3, 0.6, 0.9)] == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1e30, 1e39])
def test_impossible_tokens_are_never_drawn(temperature: float) -> None:
    row = [-inf, 0.0, -inf, 0.0, -inf]
    assert {pick(row, temperature, u) for u in (0.0, 0.2, 0.49999, 0.5, 0.7, 0.9999999, BELOW_ONE)} == {1, 3}


@pytest.mark.parametrize("uniform", [1 - 2.0**-20, 1 - 2.0**-25, BELOW_ONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_uniform_just_below_one_stays_inside(uniform: float, dtype: torch.dtype) -> None:
    assert pick([0.0] * 1000, 1.0, uniform, dtype) == 999
    assert pick([0.0, 0.0, -inf, -inf], 1.0, uniform, dtype) == 1
    assert pick([0.0, 0.0, -200.0, -200.0], 1.0, uniform, dtype) == 1


def test_uniform_zero_takes_the_first_possible_token() -> None:
    assert pick([-inf, -inf, 1.0, 5.0], 1.0, 0.0) == 2


@pytest.mark.parametrize("logits", [[3e38, 0.0, -3e38], [3e4, 3e4 - 100, -3e4]])
def test_logits_of_any_size(logits: list[float]) -> None:
    assert [pick(logits, 1.0, u) for u in (0.0, 0.5, BELOW_ONE)] == [0, 0, 0]


def test_one_token_in_the_vocabulary() -> None:
    assert pick([0.5], 1.0, 0.9) == 0
