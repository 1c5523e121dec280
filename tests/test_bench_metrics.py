"""Figures of runs on a fake clock, each worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
from sample_report import FakeClock, cell, output, plain_run, report

from eeinfer import LLM, Request, SamplingParams
from eeinfer.bench.metrics import (
    Percentiles,
    Ratio,
    exit_efficiency,
    full_of,
    percentiles,
    ratio,
    run_figures,
    summarise,
)
from eeinfer.bench.record import Run


def busy_run() -> Run:
    """Two prompts at once, one that joins later, one that is refused, one that breaks; a preemption in between."""
    clock = FakeClock()
    clock.prefill(1.0, "a", "b")  # ends at 101
    clock.stage(0, 0.5, "a")  # 101.5: a leaves early, b goes on
    clock.stage(1, 0.3, "b")  # 101.8: b has its second and last token
    clock.complete(0.2)  # 102
    clock.prefill(1.0)  # 103: a chunk of a long prompt, no token yet
    clock.prefill(2.0, "c", "d")  # 105: c and d join; c has one token only
    clock.stage(0, 0.5, "a")  # 105.5
    clock.prefill(0.7)  # 106.2: a comes back after preemption
    clock.stage(0, 0.5)  # 106.7
    clock.stage(1, 0.3, "a", "d")  # 107
    clock.stage(0, 0.5)  # 107.5: d breaks
    return clock.run(
        output("a", [30, 18, 18, 30]),
        output("b", [30, 30]),
        output("c", [30], prompt=10),
        output("refused", [], prompt=0, error="too long"),
        output("d", [30, 30], error="NaN"),
    )


def test_times_and_amounts_of_a_run() -> None:
    found = run_figures(busy_run())
    assert found.seconds == pytest.approx(7.5)
    assert found.prefill_seconds == pytest.approx(4.7)
    assert found.decode_seconds == pytest.approx(2.8)
    assert (found.requests, found.failed_requests, found.prompt_tokens) == (5, 2, 22)
    assert (found.generated_tokens, found.decode_tokens, found.decode_iterations) == (9, 5, 4)
    assert found.tokens_per_second == pytest.approx(9 / 7.5)
    assert found.decode_tokens_per_second == pytest.approx(5 / 2.8)
    assert found.requests_per_second == pytest.approx(3 / 7.5)
    assert (found.involuntary_exits, found.involuntary_stays, found.preemptions, found.peak_blocks) == (1, 2, 3, 40)


def test_latency_counts_from_the_start_and_tpot_leaves_out_the_first_token() -> None:
    found = run_figures(busy_run())
    assert found.ttft == pytest.approx((1.0, 1.0, 5.0, None, 5.0))
    assert found.tpot == pytest.approx(((107 - 101) / 3, 0.8, None, None, 2.0))


def test_depth_is_that_of_decode_tokens() -> None:
    found = run_figures(busy_run())
    assert found.mean_layers == pytest.approx((18 + 18 + 30 + 30 + 30) / 5)
    assert found.exit_shares == {18: 0.4, 30: 0.6}


def test_one_token_an_answer_has_no_decode_figures() -> None:
    clock = FakeClock()
    clock.prefill(2.0, "a", "b")
    found = run_figures(clock.run(output("a", [30]), output("b", [30])))
    assert found.tokens_per_second == 1
    assert (found.decode_tokens_per_second, found.mean_layers, found.exit_shares) == (None, None, {})
    assert found.tpot == (None, None)


def test_a_run_of_refusals_has_no_speed() -> None:
    found = run_figures(FakeClock().run(output("a", [], error="too long")))
    assert (found.seconds, found.tokens_per_second, found.requests_per_second) == (0, 0, 0)


@pytest.mark.parametrize("num_blocks", [64, 4])
def test_a_real_run_adds_up(make_llm: Callable[..., LLM], num_blocks: int) -> None:
    engine = make_llm(num_blocks=num_blocks, max_num_batched_tokens=5).engine
    for i in range(4):
        sampling = SamplingParams(max_tokens=1 + 3 * i, ignore_eos=True)
        engine.add(Request(id=str(i), prompt_token_ids=(5, 6, 7, 8 + i), sampling=sampling))
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    outputs = tuple(sorted((out for step in steps for out in step.finished), key=lambda out: out.id))
    started = steps[0].ended - steps[0].seconds
    found = run_figures(Run(started, tuple(steps), outputs, 0, 0, engine.stats.preemptions, 0, None))
    assert (engine.stats.preemptions > 0) == (num_blocks == 4)
    assert (found.generated_tokens, found.decode_tokens) == (1 + 4 + 7 + 10, 3 + 6 + 9)
    assert sum(found.exit_shares.values()) == pytest.approx(1)
    assert found.prefill_seconds + found.decode_seconds == pytest.approx(engine.stats.seconds)
    assert [at is None for at in found.tpot] == [True, False, False, False]


def test_percentiles_are_those_of_numpy() -> None:
    values = [0.3, None, 0.1, 0.9, 0.4, None]
    found = percentiles(values)
    assert found is not None
    known = [0.3, 0.1, 0.9, 0.4]
    assert asdict(found) == pytest.approx({f"p{at}": np.percentile(known, at) for at in (50, 95, 99)})
    assert percentiles([None]) is None
    assert percentiles([2.0]) == Percentiles(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("values", "noise"),
    [([0.95, 1.02, 1.08], True), ([1.0, 1.1], True), ([1.01, 1.1], False), ([0.8, 0.9], False), ([1.0], False)],
)
def test_noise_is_repeats_on_both_sides_of_one(values: list[float], *, noise: bool) -> None:
    found = ratio(values)
    assert found is not None
    assert (found.in_noise, found.pairs) == (noise, len(values))


def test_speed_up_is_paired_by_repeat() -> None:
    made = report(cell(seconds=(2.0, 4.0, 3.0)), cell("split", (1.0, 4.0, 2.0)))
    full, split = made["cells"]
    found = summarise(split, full, 30)
    assert found.speed_up == Ratio(pytest.approx(1.5), pytest.approx(1.0), pytest.approx(2.0), 3)
    assert found.decode_speed_up is not None
    assert found.decode_speed_up.median == pytest.approx(2.9 / 1.9)
    assert summarise(full, full, 30).speed_up is None


def test_a_summary_takes_medians_and_the_highest_of_peaks() -> None:
    made = report(cell(seconds=(2.0, 4.0, 3.0)))
    repeats = made["cells"][0]["repeats"]
    for repeat, peak, blocks in zip(repeats, (5, None, 9), (10, 30, 20), strict=True):
        repeat["peak_memory"], repeat["peak_blocks"] = peak, blocks
    found = summarise(made["cells"][0], made["cells"][0], 30)
    assert found.tokens_per_second is not None
    assert asdict(found.tokens_per_second) == pytest.approx({"median": 5 / 3, "low": 5 / 4, "high": 5 / 2})
    assert (found.repeats, found.peak_memory, found.peak_blocks) == (3, 9, 30)
    assert found.ttft == Percentiles(*(pytest.approx(0.1),) * 3)
    assert found.tpot == Percentiles(*(pytest.approx(2.9 / 4),) * 3)


def test_shares_of_repeats_that_differ_add_up_to_one() -> None:
    made = report(cell(seconds=(2.0,)), cell("split", (2.0,)))
    split = made["cells"][1]
    split["repeats"] = [run_as_dict([18, 30, 30, 30]), run_as_dict([21, 21, 30, 30])]
    found = summarise(split, made["cells"][0], 30)
    assert found.exit_shares == pytest.approx({18: 0.125, 21: 0.25, 30: 0.625})
    assert found.mean_layers == pytest.approx((27 + 25.5) / 2)


def run_as_dict(depths: list[int]) -> dict[str, object]:
    return asdict(run_figures(plain_run(2.0, depths)))


def test_exit_efficiency_by_hand() -> None:
    # Of 8 s of decoding, 6 are in layers; half of the layers are skipped: 3 s saved, 8/5 at best.
    found = exit_efficiency(1.2, layer_share=0.75, mean_layers=15, num_layers=30)
    assert found == pytest.approx(1.2 * 5 / 8)


def test_exit_efficiency_of_a_cell_takes_the_breakdown_of_full() -> None:
    made = report(cell(seconds=(2.0,)), cell("split", (1.5,), (15, 15, 15, 15)))
    full, split = made["cells"]
    found = summarise(split, full, 30)
    assert found.exit_efficiency is not None
    assert found.decode_speed_up is not None
    saved = 0.7 * 0.5  # 14 of the 20 ms of a step are stages and attention
    assert found.exit_efficiency.median == pytest.approx(found.decode_speed_up.median * (1 - saved))
    assert summarise(split, full | {"breakdown": None}, 30).exit_efficiency is None
    assert summarise(full | {"key": split["key"]}, full, 30).exit_efficiency is None  # no layer is skipped


def test_a_cell_without_repeats_has_no_figures() -> None:
    made = report(cell(seconds=()), cell("split", ()))
    found = summarise(made["cells"][1], made["cells"][0], 30)
    assert found.repeats == 0
    assert {value for name, value in asdict(found).items() if name not in {"repeats", "exit_shares"}} == {None}


def test_each_group_has_its_own_full() -> None:
    made = report(cell(batch=1), cell("split", batch=1), cell(batch=8), cell("split", batch=8))
    assert [full_of(made["cells"], c["key"])["key"]["batch"] for c in made["cells"]] == [1, 1, 8, 8]
