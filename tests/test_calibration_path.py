"""Traces against a computation answer by answer, and the path of thresholds made of them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import pytest
from tiny import bare_exits

from eeinfer.calibration import path as path_module
from eeinfer.calibration.path import build_path
from eeinfer.calibration.traces import Traces, trace
from eeinfer.exits.schedule import decayed
from eeinfer.model.decoder import Decoder
from eeinfer.training.traces import Answered, hidden_states

TIE = 0.05
ANSWERS = [
    ((256, 72, 105), (9, 4, 77, 30, 257)),
    ((256,), (8,)),  # its only token comes from the prompt
    ((256, *range(40, 71)), tuple(range(100, 131))),
]


@pytest.mark.parametrize("measure", ["max-prob", "margin", "similarity"])
def test_traces_are_what_each_exit_says_alone(measure: str, tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("gqa")
    exits = bare_exits(decoder, [2, 3], measure, 0.5)
    found = trace(decoder, exits, ANSWERS, 40, TIE)
    confidence: list[list[float]] = [[], []]
    loses: list[list[bool]] = [[], []]
    for prompt, answer in ANSWERS:
        runs = [Answered("", prompt + answer[:-1], len(prompt) - 1)]
        [[one, two, three, final]] = hidden_states(decoder, runs, [1, 2, 3, 6])
        for i, (exit_, before, hidden) in enumerate(zip(exits, (one, two), (two, three), strict=True)):
            for number in range(1, len(answer)):
                row = slice(number, number + 1)
                confidence[i].append(float(exit_.check(hidden[row], before[row]).confidence))
                full = decoder.logits(final[row]).softmax(-1)[0]
                token = int(exit_.head.logits(hidden[row]).argmax())
                loses[i].append(bool(full.max() - full[token] > TIE))
    np.testing.assert_allclose(found.confidence, confidence, rtol=1e-6)
    assert found.loses.tolist() == loses
    assert found.owner.tolist() == [0] * 4 + [2] * 30
    assert found.lengths.tolist() == [5, 1, 31]
    np.testing.assert_allclose(found.progress, np.array([*range(1, 5), *range(1, 31)]) / 40)
    assert (found.layers, found.num_layers) == ((2, 3), 6)


def test_nothing_to_trace(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("gqa")
    found = trace(decoder, bare_exits(decoder, [2], "max-prob", 0.5), ANSWERS[1:2], 40, TIE)
    assert found.confidence.shape == (1, 0)
    assert build_path(found, 0.0) == []


def made_up(tokens: int = 3000, seed: int = 0, layers: tuple[int, ...] = (10, 20)) -> Traces:
    """Exits whose confidence says how often they are right, deeper ones more often."""
    rng = np.random.default_rng(seed)
    confidence = np.round(rng.beta(2, 1, (len(layers), tokens)), 3)  # with equals
    loses = rng.random((len(layers), tokens)) > confidence ** (1 / np.arange(1, len(layers) + 1)[:, None])
    owner = np.sort(rng.integers(0, 50, tokens))
    lengths = np.bincount(owner, minlength=50) + 1
    progress = np.concatenate([np.arange(1, n) / 100 for n in lengths])
    return Traces(layers, 30, confidence, loses, owner, progress, lengths)


def effective(threshold: float, decay: float, progress: np.ndarray) -> np.ndarray:
    """The threshold of each token, as the engine has it."""
    return np.array([decayed(threshold, decay, round(100 * share), 100) for share in progress])


@pytest.mark.parametrize("decay", [0.0, 4.0])
def test_a_path_goes_from_safe_to_eager_and_tells_what_to_expect(decay: float) -> None:
    traces = made_up()
    path = build_path(traces, decay)
    assert len(path) > 10
    thresholds = np.array([point.thresholds for point in path])
    assert (thresholds[1:] <= thresholds[:-1]).all(), "monotone in all exits jointly"
    assert len({point.thresholds for point in path}) == len(path)
    layers = [point.expected_layers for point in path]
    assert layers == sorted(layers, reverse=True)
    for point in path[::5]:
        lost, depths = np.zeros(50), []
        gone = np.zeros(traces.confidence.shape[1], dtype=bool)
        for i, threshold in enumerate(point.thresholds):
            leaves = ~gone & (traces.confidence[i] >= effective(threshold, decay, traces.progress) - 1e-12)
            gone |= leaves
            depths += [traces.layers[i]] * int(leaves.sum())
            np.add.at(lost, traces.owner[leaves], traces.loses[i][leaves])
        depths += [30] * int((~gone).sum())
        assert point.expected_loss == pytest.approx((lost / traces.lengths).mean())
        assert point.expected_layers == pytest.approx(np.mean(depths))


def test_each_exit_keeps_the_selective_risk_among_the_tokens_that_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    risk = 0.1
    monkeypatch.setattr(path_module, "RISKS", (risk,))
    traces = made_up()
    *safer, point = build_path(traces, 0.0)
    assert len(safer) == len(path_module.SAFER)
    here = np.ones(3000, dtype=bool)
    for i, threshold in enumerate(point.thresholds):
        leaves = here & (traces.confidence[i] >= threshold)
        assert traces.loses[i][leaves].mean() <= risk
        for lower in np.unique(traces.confidence[i][here & (traces.confidence[i] < threshold)]):
            assert traces.loses[i][here & (traces.confidence[i] >= lower)].mean() > risk
        here &= ~leaves


def test_before_the_first_risk_fewer_tokens_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no token loses, selective risk cannot tell the tokens apart."""
    monkeypatch.setattr(path_module, "RISKS", (0.001,))
    traces = made_up()
    traces.loses[:] = False
    path = build_path(traces, 0.0)
    least = np.array([point.thresholds for point in path])[:, 0]
    leaving = (traces.confidence[0] >= least[:, None]).mean(axis=1)
    np.testing.assert_allclose(leaving, (*path_module.SAFER, 1), atol=0.01)
    assert {point.expected_loss for point in path} == {0.0}


def test_an_exit_that_is_never_right_is_left_shut() -> None:
    traces = made_up()
    traces.loses[0] = True
    path = build_path(traces, 0.0)
    assert [point.thresholds[0] for point in path[:-1]] == [inf] * (len(path) - 1)
    assert path[-1].thresholds[0] < inf, "a selective risk of 1 takes everything"
    assert path[0].thresholds[1] < inf


def test_the_same_tokens_at_some_of_the_exits() -> None:
    traces = made_up(layers=(5, 10, 20))
    part = traces.of((20, 5)[::-1])
    assert part.layers == (5, 20)
    np.testing.assert_array_equal(part.confidence, traces.confidence[[0, 2]])
    np.testing.assert_array_equal(part.loses, traces.loses[[0, 2]])
    assert part.owner is traces.owner


def test_few_tokens_propose_nothing() -> None:
    assert build_path(made_up(tokens=15), 0.0) == []
