"""What requests ask of the sampler beside a temperature, against a plain reading of the definitions."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from eeinfer.core.plan import Draw, Shaping
from eeinfer.runner.sampler import _nucleus, sample, token_logprobs

inf = math.inf
LOGITS = [1.5, 0.0, -1.0, 2.0, 0.5, -0.25, 1.0, -2.0]


def weights(logits: list[float], draw: Draw) -> np.ndarray:
    """The distribution that `draw` means: vLLM's steps in vLLM's order, one token after the other."""
    shaping, scores = draw.shaping or Shaping(), list(logits)
    for token in draw.banned:
        scores[token] = -inf
    for token, bias in shaping.logit_bias:
        scores[token] += bias
    for token in {*draw.prompt, *draw.generated}:
        strength = shaping.repetition_penalty
        scores[token] = scores[token] / strength if scores[token] > 0 else scores[token] * strength
    for token, count in Counter(draw.generated).items():
        scores[token] -= shaping.frequency_penalty * count + shaping.presence_penalty
    if draw.temperature == 0:
        return np.eye(len(scores))[int(np.argmax(scores))]
    probabilities = special.softmax(np.array(scores) / draw.temperature)
    kept = probabilities >= shaping.min_p * probabilities.max() * (1 - 1e-12)
    if shaping.top_k:
        kth = sorted(probabilities[kept], reverse=True)[: shaping.top_k][-1]
        kept &= probabilities >= kth
    probabilities = np.where(kept, probabilities, 0) / probabilities[kept].sum()
    mass, nucleus = 0.0, []
    for token in sorted(range(len(scores)), key=lambda t: -probabilities[t]):
        if mass < shaping.top_p - 1e-12:
            nucleus.append(token)
        mass += probabilities[token]
    return np.array([p if t in nucleus else 0 for t, p in enumerate(probabilities)]) / probabilities[nucleus].sum()


def draws_of(draw: Draw, count: int) -> np.ndarray:
    rows = torch.tensor(LOGITS, dtype=torch.float64).expand(count, -1)
    tokens = sample(rows, [replace(draw, seed=seed) for seed in range(count)])
    return torch.bincount(tokens, minlength=len(LOGITS)).numpy()


@pytest.mark.parametrize(
    "draw",
    [
        Draw(1.0, shaping=Shaping(top_p=0.8)),
        Draw(0.8, shaping=Shaping(top_k=3)),
        Draw(1.3, shaping=Shaping(min_p=0.2)),
        Draw(1.0, shaping=Shaping(top_p=0.7, top_k=4, min_p=0.1)),
        Draw(1.0, shaping=Shaping(repetition_penalty=2.0), prompt=(2, 3), generated=(0, 3, 3)),
        Draw(1.0, shaping=Shaping(presence_penalty=1.0, frequency_penalty=0.5), prompt=(2, 3), generated=(0, 3, 3)),
        Draw(1.0, shaping=Shaping(logit_bias=((2, 2.5), (3, -100.0))), banned=(0,)),
        Draw(0.7, 0, Shaping(3, 0.9, 0.05, 1.3, -0.5, 0.25, ((1, 1.0),)), (1, 4), (6, 6), (5,)),
    ],
)
def test_draws_follow_the_distribution(draw: Draw) -> None:
    """Chi-square over 2,000 seeded draws; tokens without weight are never drawn."""
    expected, observed = weights(LOGITS, draw), draws_of(draw, 2_000)
    possible = expected > 0
    assert possible.sum() > 1
    assert not observed[~possible].any()
    assert stats.chisquare(observed[possible], 2_000 * expected[possible]).pvalue > 1e-3


TOKENS = st.lists(st.integers(0, 7), max_size=6).map(tuple)
SHAPINGS = st.builds(
    Shaping,
    top_k=st.integers(0, 9),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.3, 3),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 7), st.floats(-3, 3)).map(lambda bias: tuple(bias.items())),
)
DRAWS = st.builds(
    Draw,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    seed=st.integers(0, 10),
    shaping=st.none() | SHAPINGS,
    prompt=TOKENS,
    generated=TOKENS,
    banned=st.lists(st.integers(0, 7), max_size=3).map(tuple),
)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.lists(st.integers(-8, 8), min_size=8, max_size=8, unique=True), DRAWS)
def test_a_token_without_weight_is_never_drawn(numbers: list[int], draw: Draw) -> None:
    logits = [n / 2 + 0.01 * i for i, n in enumerate(numbers)]
    expected = weights(logits, draw)
    rows = torch.tensor(logits, dtype=torch.float64).expand(12, -1)
    drawn = set(sample(rows, [replace(draw, seed=seed) for seed in range(12)]).tolist())
    assert all(expected[token] > 0 for token in drawn)
    if (expected > 0).sum() == 1:
        assert drawn == {int(np.argmax(expected))}


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(st.lists(DRAWS, min_size=2, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_row_depends_on_its_own_logits_and_draw_alone(draws: list[Draw], dtype: torch.dtype) -> None:
    logits = torch.randn(len(draws), 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = logits.clone()
    together = sample(logits, draws).tolist()
    assert together == [int(sample(logits[i : i + 1], draws[i : i + 1])) for i in range(len(draws))]
    assert torch.equal(logits, before), "what is asked of one token is not done to the logits of others"


def test_equally_likely_tokens_at_the_edge() -> None:
    """top_k keeps all that are as likely as its last one; top_p takes them by id."""
    logits = torch.zeros(600, 6)
    seeds = range(600)
    assert set(sample(logits, [Draw(1.0, s, Shaping(top_k=2)) for s in seeds]).tolist()) == set(range(6))
    assert set(sample(logits, [Draw(1.0, s, Shaping(top_p=0.5)) for s in seeds]).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("spread", [0.01, 3.0])
@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_the_nucleus_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    """Flat and peaked distributions: the nucleus is the one that a sort of all tokens finds."""
    logits = spread * torch.randn(5000, generator=torch.Generator().manual_seed(2))
    tempered = logits - logits.max()
    values, order = tempered.double().sort(descending=True, stable=True)
    before = values.softmax(dim=0).cumsum(dim=0) - values.softmax(dim=0)
    assert _nucleus(tempered, top_p).tolist() == order[before < top_p].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_extreme_penalties_pick_a_token(dtype: torch.dtype, penalty: float, temperature: float) -> None:
    """Positive logits of seen tokens grow without bound for a penalty below 1, and vanish above it."""
    shaping = Shaping(repetition_penalty=penalty, top_p=0.9)
    row = torch.tensor([[2.0, 1.5, 0.0, -1.0]], dtype=dtype)
    token = int(sample(row, [Draw(temperature, 3, shaping, prompt=(1, 3))]))
    assert token in ({1} if penalty < 1 else {0, 1, 2} if temperature == 1 else {0})


def test_a_row_that_failed_takes_nothing_from_the_others() -> None:
    draws = [Draw(1.0, 5, Shaping(top_p=0.5, top_k=2, min_p=0.1, repetition_penalty=2.0), (1,), (0,))] * 2
    assert int(sample(torch.tensor([[0.0, math.nan, 1.0], [0.0, -9.0, 9.0]]), draws)[1]) == 2


# Log-probabilities


def test_log_probabilities_are_of_the_logits_as_they_came() -> None:
    logits = torch.tensor([LOGITS, LOGITS[::-1], LOGITS])
    shaping = Shaping(logit_bias=((7, 100.0),))
    draws = [Draw(logprobs=2), Draw(), Draw(0.0, 0, shaping, logprobs=-1)]
    tokens = sample(logits, draws)
    told = token_logprobs(logits, draws, tokens)
    expected = special.log_softmax(np.array(LOGITS))
    assert sorted(told) == [0, 2]
    assert [(one.token_id, one.rank) for one in told[0]] == [(3, 1), (3, 1), (0, 2)]
    assert [one.token_id for one in told[2][:3]] == [7, 3, 0]
    assert told[2][0].rank == len(LOGITS) == len(told[2]) - 1
    for one in (*told[0], *told[2]):
        assert one.logprob == pytest.approx(expected[one.token_id], abs=1e-6)


def test_equally_likely_tokens_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    [own, *top] = token_logprobs(logits, [Draw(logprobs=4)], torch.tensor([3]))[0]
    assert own.rank == 3
    assert [one.rank for one in top] == [1, 1, 3, 3]
    assert token_logprobs(logits, [Draw(logprobs=0)], torch.tensor([3]))[0] == (own,)
