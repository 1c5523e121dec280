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


def pick(row: list[float], temperature: float, seed: int, dtype: torch.dtype = torch.float32) -> int:
    (token,) = sample(torch.tensor([row], dtype=dtype), [Draw(temperature, seed)]).tolist()
    return int(token)


def counts(row: list[float], temperature: float, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = torch.tensor(row, dtype=dtype).expand(n, -1)
    tokens = sample(logits, [Draw(temperature, seed) for seed in range(n)])
    assert tokens.dtype is torch.int64
    return torch.bincount(tokens, minlength=len(row))


# Greedy


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 7.0, 7.0], [3.0, 3.0, 3.0], [-1.0, -2.0, -0.5]])
    assert sample(logits, [Draw()] * 3).tolist() == [1, 0, 2]


def test_a_known_argmax_is_taken_and_left_alone() -> None:
    logits, argmax = torch.zeros(3, 4), torch.tensor([3, 2, 1])
    out = sample(logits, [Draw(), Draw(1e-9, 1), Draw()], argmax)
    assert out.tolist()[::2] == [3, 1]
    assert argmax.tolist() == [3, 2, 1]


# Drawing


def test_rounding_in_the_logits_hardly_ever_changes_a_token() -> None:
    """Other batches, other rounding: with noise of 1e-5 on a real vocabulary's logits, draws stay what they were."""
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(300, 20_000, generator=generator)
    noisy = logits + 1e-5 * torch.randn(logits.shape, generator=generator)
    draws = [Draw(0.8, seed) for seed in range(300)]
    assert int((sample(logits, draws) != sample(noisy, draws)).sum()) <= 1


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
    tokens = sample(torch.tensor(row).expand(400, -1), [Draw(1.0, seed) for seed in range(400)])
    tail = tokens[tokens > 0]
    assert 160 < len(tail) < 240
    octiles = torch.bincount((tail - 1) // 6250, minlength=8)
    assert stats.chisquare(octiles.numpy()).pvalue > 1e-3


def test_each_row_has_its_own_temperature_and_seed() -> None:
    row = [math.log(p) for p in (0.1, 0.2, 0.7)]
    draws = [Draw(1.0, seed) for seed in range(40)] + [Draw(), Draw(100.0, 3), Draw(0.01, 5)]
    together = sample(torch.tensor([row] * len(draws)), draws).tolist()
    assert together == [pick(row, draw.temperature, draw.seed) for draw in draws]
    assert set(together[:40]) == {0, 1, 2}
    assert (together[40], together[42]) == (2, 2)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(9, 1000, generator=torch.Generator().manual_seed(3))
    draws = [Draw(0.0 if i % 3 == 0 else 0.5 + i / 4, 100 + i) for i in range(9)]
    batched = sample(logits, draws).tolist()
    assert batched == [int(sample(logits[i : i + 1], [draws[i]])) for i in range(9)]
    order = [4, 8, 0, 2, 6, 1, 7, 3, 5]
    assert sample(logits[order], [draws[i] for i in order]).tolist() == [batched[i] for i in order]


def test_a_row_does_not_depend_on_a_failed_companion() -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 9.0, 1.0]])
    assert sample(logits, [Draw(0.01, 5)] * 2)[1] == 1


# Extremes


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-37, 1e-44, 1e-46, 1e-200, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    row = [0.0, 1.0, 3.0, 2.0]
    assert [pick(row, temperature, seed, dtype) for seed in range(20)] == [2] * 20


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e39, 1e308])
def test_huge_temperature_is_uniform(temperature: float) -> None:
    observed = counts([0.0, 30.0, -30.0, 5.0], temperature, 4_000)
    assert stats.chisquare(observed.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1e30, 1e39])
def test_impossible_tokens_are_never_drawn(temperature: float) -> None:
    row = [-inf, 0.0, -inf, 0.0, -inf]
    assert {pick(row, temperature, seed) for seed in range(300)} == {1, 3}


@pytest.mark.parametrize("logits", [[3e38, 0.0, -3e38], [3e4, 3e4 - 100, -3e4]])
def test_logits_of_any_size(logits: list[float]) -> None:
    assert [pick(logits, 1.0, seed) for seed in range(20)] == [0] * 20


def test_one_token_in_the_vocabulary() -> None:
    assert pick([0.5], 1.0, 9) == 0
