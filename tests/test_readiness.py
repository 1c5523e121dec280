"""Simulated exits and recorded traces: shares, nesting, independence, and what each bad input is told."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eeinfer.bench.readiness import RecordedTrace, SimulatedExits, check_trace, parse_simulated, read_trace
from eeinfer.core.plan import Draw, Row
from eeinfer.core.readiness import Readiness
from eeinfer.core.request import FinishReason, RequestOutput, TokenRecord
from eeinfer.engine.prompt_file import output_line
from eeinfer.errors import ConfigError, EeinferError

RATES = {15: 0.3, 22: 0.5}


def row(request_id: str, position: int, slot: int = 0) -> Row:
    draw = Draw()
    return Row(request_id, slot, token=0, position=position, block_table=(), draw=draw, number=1, max_tokens=9)


def ready_grid(readiness: Readiness, layers: int, requests: int = 100, positions: int = 200) -> np.ndarray:
    """[requests, positions], whether each row is ready."""
    rows = product(range(requests), range(positions))
    return np.array([readiness.ready(row(f"r{r}", p), layers) for r, p in rows]).reshape(requests, positions)


def within_error(count: int, n: int, rate: float) -> bool:
    return abs(count - n * rate) < 4 * (n * rate * (1 - rate)) ** 0.5


# Rates


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("0.3@15,0.5@22", {15: 0.3, 22: 0.5}),
        (" 0.3 @ 15 , .5@22 ", {15: 0.3, 22: 0.5}),
        ("0@1,0@2,1@3", {1: 0.0, 2: 0.0, 3: 1.0}),
    ],
)
def test_rates_are_read(text: str, rates: dict[int, float]) -> None:
    assert parse_simulated(text) == rates


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not RATE@LAYERS"),
        ("0.3@15,", "'' is not RATE@LAYERS"),
        ("15", "'15' is not RATE@LAYERS"),
        ("15@0.3", "'15@0.3' is not RATE@LAYERS"),
        ("nan@3", "'nan@3' is not RATE@LAYERS"),
        ("-0.1@3", "'-0.1@3' is not RATE@LAYERS"),
        ("1.5@3", "'1.5@3' is above 1"),
        ("0.1@0", "'0.1@0' has no layer before the exit"),
        ("0.1@3, 0.2@3", "'0.2@3' comes after an exit at 3 layers"),
        ("0.1@3,0.2@2", "'0.2@2' comes after an exit at 3 layers"),
        ("0.5@3,0.4@5", "'0.4@5' is below 0.5"),
    ],
)
def test_bad_rates_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^--simulate-exits: ") as caught:
        parse_simulated(text)
    assert said in str(caught.value)


# Simulated exits


@pytest.mark.parametrize("layers", RATES)
def test_shares_are_within_binomial_error(layers: int) -> None:
    grid = ready_grid(SimulatedExits(RATES, seed=0), layers)
    assert within_error(int(grid.sum()), grid.size, RATES[layers])
    # No request and no position is special: the counts along either axis scatter as independent draws do.
    for counts, n in ((grid.sum(axis=1), grid.shape[1]), (grid.sum(axis=0), grid.shape[0])):
        assert 0.6 < counts.var() / (n * RATES[layers] * (1 - RATES[layers])) < 1.5


@pytest.mark.parametrize("axis", [0, 1])
def test_neighbours_are_independent(axis: int) -> None:
    grid = ready_grid(SimulatedExits({3: 0.5}, seed=0), 3)
    both = grid.take(range(1, grid.shape[axis]), axis) & grid.take(range(grid.shape[axis] - 1), axis)
    assert within_error(int(both.sum()), both.size, 0.25)


def test_seeds_differ() -> None:
    one, other = (ready_grid(SimulatedExits({3: 0.5}, seed), 3) for seed in (0, 1))
    assert within_error(int((one & other).sum()), one.size, 0.25)


def test_who_is_ready_stays_ready_at_deeper_exits() -> None:
    simulated = SimulatedExits(RATES, seed=5)
    shallow, deep = ready_grid(simulated, 15), ready_grid(simulated, 22)
    assert not (shallow & ~deep).any()
    assert (deep & ~shallow).any()


def test_exits_that_are_not_named_add_nobody() -> None:
    simulated = SimulatedExits(RATES, seed=5)
    assert not ready_grid(simulated, 14).any()
    assert (ready_grid(simulated, 21) == ready_grid(simulated, 15)).all()


def test_rates_of_none_and_all() -> None:
    simulated = SimulatedExits({1: 0.0, 2: 1.0}, seed=0)
    assert not ready_grid(simulated, 1).any()
    assert ready_grid(simulated, 2).all()


def test_readiness_belongs_to_request_and_position() -> None:
    simulated = SimulatedExits({3: 0.5}, seed=0)
    assert {simulated.ready(row("a", 7, slot), 3) for slot in range(20)} in ({True}, {False})
    # Known answers: the hash is the same in every process and on every platform.
    known = [False, False, False, False, False, True, True, False]
    assert [simulated.ready(row("a", position), 3) for position in range(8)] == known


# Traces


def test_a_trace_is_replayed_token_by_token() -> None:
    trace = RecordedTrace({"a": (6, 2, 4, 6), "b": (6, 6)}, {"a": 10, "b": 3})
    # The row at the position after the prompt gives the second token.
    assert [[trace.ready(row("a", p), n) for n in (2, 4)] for p in (10, 11, 12)] == [
        [True, True],
        [False, True],
        [False, False],
    ]
    assert not trace.ready(row("b", 3), 4)
    assert not trace.ready(row("a", 13), 4)  # past the end


def test_requests_that_the_trace_lacks_are_named() -> None:
    with pytest.raises(ConfigError, match="no answer to request 'b'"):
        RecordedTrace({"a": (6,)}, {"a": 10, "b": 3})


def write(path: Path, *lines: bytes | dict[str, Any]) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def answer(request_id: str, *depths: int, error: str | None = None) -> dict[str, Any]:
    reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
    tokens = tuple(TokenRecord(5, "\u2028", depth, None) for depth in depths)
    output = RequestOutput(request_id, "text", reason, 3, tokens, error)
    return output_line(output, exits=True, token_details=True)


def test_answers_of_generate_are_read(tmp_path: Path) -> None:
    lines = (answer("a", 6, 2, 4), b"", answer("b", error="too long"), answer("c", 6))
    assert read_trace(write(tmp_path / "trace.jsonl", *lines)) == {"a": (6, 2, 4), "c": (6,)}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "the trace holds no answer"),
        ([answer("b", error="too long")], "the trace holds no answer"),
        ([answer("a", 6), b"{"], "line 2: not JSON"),
        ([b"\xff\xfe{"], "line 1: not JSON"),
        ([b"[" * 100_000], "line 1: not JSON"),
        ([b"3"], "line 1: not an answer with an id"),
        ([{"text": ""}], "line 1: not an answer with an id"),
        ([{"id": "a", "text": ""}], "line 1: the answer has no tokens; run generate with --token-details"),
        ([{"id": "a", "tokens": [{"layers_executed": 6}, {"layers_executed": True}]}], r"tokens\[1\]"),
        ([{"id": "a", "tokens": [{"layers_executed": 0}]}], r"tokens\[0\]"),
        ([{"id": "a", "tokens": [6]}], r"tokens\[0\]"),
        ([answer("a", 6), answer("a", 6)], "line 2: a second answer to 'a'"),
    ],
)
def test_bad_traces_are_named(tmp_path: Path, lines: list[Any], said: str) -> None:
    path = write(tmp_path / "trace.jsonl", *lines)
    with pytest.raises(EeinferError, match=said) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(EeinferError, match=r"no\.jsonl: cannot read the trace: No such file"):
        read_trace(tmp_path / "no.jsonl")


def test_depths_must_be_exits() -> None:
    depths = {"a": (30, 18), "b": (30, 21, 18)}
    check_trace(depths, (18, 21, 24), 30)
    with pytest.raises(ConfigError, match=r"request 'b' has 21 layers executed.*pass --exits 18,21$"):
        check_trace(depths, (18, 24), 30)
    with pytest.raises(ConfigError, match="replay it on the model"):
        check_trace(depths, (18, 21), 24)
