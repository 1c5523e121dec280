"""Thresholds that fall along an answer: values by hand, and each row held to its own, whatever its companions."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf
from typing import Any

import pytest
from tiny import Loop, bare_exits, sequence

from eeinfer import LLM, Request, SamplingParams
from eeinfer.core.plan import Outcome, Pass, Plan
from eeinfer.core.scheduler import SchedulerStats
from eeinfer.core.sequence import Sequence
from eeinfer.exits.schedule import decayed
from eeinfer.model.decoder import Decoder

EXITS, DEPTH = (2, 3, 5), 6
THRESHOLD, DECAY = 0.3, 4.0
# Prompt tokens, most new tokens and arrival of sequences that are of different age whenever they meet.
LIVES = ((3, 14, 0), (9, 11, 0), (1, 20, 4), (6, 8, 9), (4, 16, 15))


@pytest.mark.parametrize(
    ("threshold", "decay", "number", "max_tokens", "expected"),
    [
        (0.8, 4.0, 0, 10, 0.82),
        (0.8, 4.0, 5, 10, 0.72 + 0.1 * 0.1353352832366127),
        (0.8, 4.0, 10, 10, 0.72 + 0.1 * 0.01831563888873418),
        (0.8, 1.0, 3, 12, 0.72 + 0.1 * 0.7788007830714049),
        (0.0, 2.0, 0, 7, 0.1),
        (0.8, 0.0, 5, 10, 0.8),
        # Clipped.
        (1.0, 4.0, 0, 10, 1.0),
        (1.2, 4.0, 9, 10, 1.0),
        (-0.5, 4.0, 0, 10, 0.0),
        # What decides alone stays.
        (1.2, 0.0, 9, 10, 1.2),
        (inf, 4.0, 3, 10, inf),
        (-inf, 4.0, 3, 10, -inf),
    ],
)
def test_values_by_hand(threshold: float, decay: float, number: int, max_tokens: int, expected: float) -> None:
    assert decayed(threshold, decay, number, max_tokens) == pytest.approx(expected, rel=1e-14)


def test_it_falls_towards_the_end() -> None:
    along = [decayed(0.9, DECAY, number, 32) for number in range(32)]
    assert along == sorted(along, reverse=True)
    assert len(set(along)) == 32


def expected_threshold(one: Sequence) -> float:
    """What the row that gives the next token of `one` is held to."""
    return 0.9 * THRESHOLD + 0.1 * exp(-DECAY * len(one.depths) / one.max_tokens)


def run(
    decoder: Decoder, strategy: str = "split", decay: float = DECAY, **options: Any
) -> tuple[SchedulerStats, int, list[Sequence]]:
    """All lives together, each verdict held against the threshold of its own row.

    Also gives the number of passes whose rows had different thresholds.
    """
    loop = Loop(decoder, bare_exits(decoder, EXITS, "max-prob", THRESHOLD, decay), strategy=strategy, **options)
    mixed = 0

    def held(plan: Plan, outcome: Outcome) -> None:
        nonlocal mixed
        if not isinstance(plan, Pass) or plan.stage == len(EXITS):
            return
        owners = [loop.owner(row.slot) for row in plan.rows]
        thresholds = [expected_threshold(one) if decay else THRESHOLD for one in owners]
        mixed += len(set(thresholds)) > 1
        for verdict, threshold in zip(outcome, thresholds, strict=True):
            assert verdict.confidence is not None
            assert verdict.ready == (verdict.confidence >= threshold)

    loop.after = held
    sequences = [sequence(str(i), range(10 * i, 10 * i + prompt), most) for i, (prompt, most, _) in enumerate(LIVES)]
    loop.run(sequences, [arrival for *_, arrival in LIVES])
    return loop.scheduler.stats, mixed, sequences


def answers(sequences: list[Sequence]) -> list[tuple[list[int], list[int]]]:
    return [(one.generated, one.depths) for one in sequences]


def test_each_row_is_held_to_its_own_threshold_and_replay_changes_nothing(
    tiny_decoder: Callable[..., Decoder],
) -> None:
    decoder = tiny_decoder("gqa")
    roomy, mixed, undisturbed = run(decoder)
    assert mixed >= 10, "rows of different age were checked together"
    assert {depth for one in undisturbed for depth in one.depths} == {*EXITS, DEPTH}
    tight, _, replayed = run(decoder, num_blocks=9)
    assert (roomy.preemptions, tight.preemptions > 0) == (0, True)
    assert answers(replayed) == answers(undisturbed)
    assert roomy.involuntary_exits == roomy.involuntary_stays == 0
    *_, constant = run(decoder, decay=0.0)
    assert answers(constant) != answers(undisturbed), "or the decay decided nothing"


@pytest.mark.parametrize("strategy", ["all-exit", "any", "majority", "mean"])
def test_quorums_count_by_the_rows_own_thresholds(strategy: str, tiny_decoder: Callable[..., Decoder]) -> None:
    stats, mixed, sequences = run(tiny_decoder("gqa"), strategy)
    assert mixed >= 10
    assert any(depth < DEPTH for one in sequences for depth in one.depths)
    assert (stats.involuntary_exits > 0) == (strategy != "all-exit")


def test_the_setting_reaches_the_exits(make_llm: Callable[..., LLM]) -> None:
    """Through LLM: what left did so at or above the threshold of its own token."""
    llm = make_llm(exits=EXITS, threshold=THRESHOLD, decay=DECAY)
    sampling = SamplingParams(max_tokens=20)
    requests = [Request(str(i), prompt_token_ids=(3 * i, 4 * i + 1), sampling=sampling) for i in range(4)]
    left = 0
    for output in llm.generate(requests):
        for number, token in enumerate(output.tokens):
            if token.confidence is not None:
                left += 1
                assert token.confidence >= 0.9 * THRESHOLD + 0.1 * exp(-DECAY * number / 20)
    assert left
