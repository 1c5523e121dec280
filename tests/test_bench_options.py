"""The command line of a benchmark: lists, defaults, and options that exclude each other."""

from __future__ import annotations

import io
from math import inf
from pathlib import Path
from typing import Any

import pytest
from test_bench_suite import options

from eeinfer.bench.curve import CURVE_THRESHOLDS
from eeinfer.bench.sweep import Group, Sweep, counts
from eeinfer.bench.workload import drawn, read_requests
from eeinfer.core.request import Request
from eeinfer.errors import ConfigError, EeinferError


def test_defaults_are_one_group_of_three_strategies() -> None:
    chosen = options()
    (group,) = chosen.sweep.groups()
    assert group == Group(batch=32, input_len=None, output_len=32)
    assert [cell["batching.strategy"] for cell in chosen.sweep.cells(group)] == ["full", "all-exit", "split"]
    assert all(cell["batching.max_num_seqs"] == 32 for cell in chosen.sweep.cells(group))
    assert (chosen.source, chosen.ignore_eos) == ("packaged prompts", False)


def test_every_combination_is_a_cell_but_full_is_there_once() -> None:
    sweep = options(
        batch=["1,8", "32"],
        strategy=["split,full"],
        exits=["4,8", "12"],
        threshold=["0.5", "inf"],
        input_len=["16,64"],
        output_len=["8"],
    ).sweep
    groups = list(sweep.groups())
    assert [(g.batch, g.input_len, g.output_len) for g in groups] == [
        (1, 16, 8), (1, 64, 8), (8, 16, 8), (8, 64, 8), (32, 16, 8), (32, 64, 8),
    ]  # fmt: skip
    cells = [(c["batching.strategy"], c.get("exits.layers"), c.get("exits.threshold")) for c in sweep.cells(groups[0])]
    assert cells == [
        ("full", None, None),
        ("split", (4, 8), 0.5),
        ("split", (4, 8), inf),
        ("split", (12,), 0.5),
        ("split", (12,), inf),
    ]


def test_one_threshold_an_exit_is_one_value() -> None:
    assert options(threshold=["0.9,0.8"]).sweep.thresholds == ((0.9, 0.8),)


def test_random_ids_have_a_length_and_no_end() -> None:
    chosen = options(random_weights="qwen3-0.6b")
    assert chosen.sweep.input_lens == (64,)
    assert chosen.ignore_eos
    assert not options(input_len=["5"], ignore_eos=False).ignore_eos


def test_a_curve_has_a_grid() -> None:
    sweep = options(curve=True).sweep
    assert sweep.thresholds == CURVE_THRESHOLDS
    assert sweep.strategies == ("full", "split")
    assert options(curve=True, threshold=["0.7", "0.6"]).sweep.thresholds == (0.7, 0.6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": ["0"]}, "--batch: '0' must be an integer from 1 on"),
        ({"batch": ["8,,1"]}, "--batch '8,,1' has an empty entry"),
        ({"output_len": ["-3"]}, "--output-len: '-3' must be"),
        ({"input_len": ["1.5"]}, "--input-len: '1.5' must be"),
        ({"strategy": ["splt"]}, "--strategy: unknown strategy 'splt'; did you mean 'split'"),
        ({"exits": ["8,4"]}, "--exits"),
        ({"threshold": ["nan"]}, "--threshold"),
        ({"simulate_exits": "0.5"}, "--simulate-exits: '0.5' is not RATE@LAYERS"),
        ({"simulate_exits": "0.5@3", "exits": ["3"]}, "--simulate-exits and --exits exclude each other"),
        ({"simulate_exits": "0.5@3", "threshold": ["1"]}, "--threshold and simulated exits exclude"),
        ({"simulate_exits": "0.5@3", "replay_trace": Path("t")}, "--simulate-exits and --replay-trace"),
        ({"prompts": "p.jsonl", "input_len": ["3"]}, "--prompts and --input-len"),
        ({"prompts": "p.jsonl", "random_weights": "x"}, "--prompts and --random-weights"),
        ({"curve": True, "quality": False}, "--curve and --no-quality"),
        ({"curve": True, "simulate_exits": "0.5@3"}, "--curve and simulated exits"),
        ({"curve": True, "random_weights": "x"}, "--curve and --random-weights"),
        ({"replay_trace": Path("t"), "output_len": ["3"]}, "--replay-trace and --output-len"),
        ({"replay_trace": Path("t"), "input_len": ["3"]}, "--replay-trace and synthetic prompts"),
    ],
)
def test_bad_options_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(".", r"\.")):
        options(**given)


def test_counts_are_kept_once_in_order() -> None:
    assert counts(["8, 1", "8"], "--batch") == (8, 1)


def prompt_file(*lines: str) -> io.BytesIO:
    return io.BytesIO("\n".join(lines).encode())


def encode(request: Request) -> list[int]:
    return list((request.prompt or "").encode())


def test_prompts_are_drawn_by_the_seed() -> None:
    lines = [f'{{"id": "{i}", "prompt": "x{i}"}}' for i in range(40)]
    group = Group(batch=3, input_len=None, output_len=4)
    ids = [[r.id for r in drawn(read_requests(prompt_file(*lines), seed), group, None, encode)] for seed in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 8  # at least
    assert len(drawn(read_requests(prompt_file(*lines), 0), group, 20, encode)) == 20
    with pytest.raises(ConfigError, match="--num-prompts 41: there are 40 prompts"):
        drawn(read_requests(prompt_file(*lines), 0), group, 41, encode)


def test_a_bad_prompt_stops_a_benchmark() -> None:
    with pytest.raises(EeinferError, match=r"--prompts: line 2: .*needs every line"):
        read_requests(prompt_file('{"prompt": "a"}', "{"), 0)


def test_full_alone_is_a_benchmark() -> None:
    sweep = Sweep((1,), (None,), (4,), ("full",))
    assert [cell["batching.strategy"] for cell in sweep.cells(next(sweep.groups()))] == ["full"]
