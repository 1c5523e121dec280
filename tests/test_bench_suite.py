"""The benchmark on tiny models: what is run in which order, what is judged, simulated exits and traces that hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from eeinfer.bench import suite as suite_module
from eeinfer.bench.breakdown import SectionTimer
from eeinfer.bench.collect import collect
from eeinfer.bench.measure import measure
from eeinfer.bench.metrics import SECTIONS, run_figures
from eeinfer.bench.options import Given, Options
from eeinfer.bench.report import read_report, write_report
from eeinfer.bench.subject import load_subject, locate_random
from eeinfer.bench.suite import Suite
from eeinfer.bench.sweep import Group
from eeinfer.bench.workload import check_fits, limited, synthetic
from eeinfer.config.load import load_settings
from eeinfer.core.request import Request
from eeinfer.engine.build import build_engine, build_runner, load_model, locate, plan_exits
from eeinfer.errors import ConfigError, EeinferError

NOTHING: dict[str, Any] = {
    "batch": (),
    "strategy": (),
    "exits": (),
    "threshold": (),
    "input_len": (),
    "output_len": (),
    "prompts": None,
    "num_prompts": None,
    "warmup": 1,
    "repeats": 2,
    "ignore_eos": None,
    "simulate_exits": None,
    "replay_trace": None,
    "random_weights": None,
    "quality": True,
    "roofline": False,
    "curve": False,
}
FLAGS = {"model.dtype": "float64", "model.device": "cpu", "cache.block_size": 4, "cache.num_blocks": 200}
SWEEP = {"batch": ["3"], "input_len": ["7"], "output_len": ["6"], "exits": ["2,4"], "threshold": ["0.05"]}


def options(settings: dict[str, Any] | None = None, **given: Any) -> Options:
    return Given(**(NOTHING | given)).options(load_settings(flags=settings or {}, environ={}).settings)


class Bench:
    """A suite on a tiny model, with its notes and the order of its runs."""

    def __init__(self, model: Path, given: dict[str, Any], **settings: Any) -> None:
        self.flags = FLAGS | {"model.name": str(model)} | settings
        self.notes: list[str] = []
        self.news: list[str] = []
        located = locate(self.resolve({}).model, self.notes.append)
        self.suite = Suite(options(self.flags, **given), located, self.resolve, self.notes.append)
        self.subject = load_subject(self.resolve({}).model, located, 0, self.notes.append)

    def resolve(self, cell: Any) -> Any:
        return load_settings(flags={**self.flags, **cell}, environ={}).settings

    def report(self) -> dict[str, Any]:
        self.suite.run(self.subject, self.news.append)
        values = load_settings(flags=self.flags, environ={}).values()
        return collect(self.suite, self.subject, command=["eeinfer", "bench"], settings=values)


@pytest.fixture
def bench(tiny_model: Callable[[str], Path]) -> Callable[..., Bench]:
    return lambda given=None, variant="gqa", **settings: Bench(tiny_model(variant), given or SWEEP, **settings)


def test_cells_take_turns_full_first_and_every_repeat_is_kept(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def recorded(engine: Any, requests: Any) -> Any:
        order.append((len(engine.runner.exits), requests[0].sampling.max_tokens))
        return measure(engine, requests)

    monkeypatch.setattr(suite_module, "measure", recorded)
    report = bench(SWEEP | {"strategy": ["split"]}).report()
    assert order == [(0, 4), (2, 4), (0, 6), (2, 6), (2, 6), (0, 6)]  # a short warm-up round, then A B B A
    assert [cell["key"]["strategy"] for cell in report["cells"]] == ["full", "split"]
    assert all(len(cell["repeats"]) == 2 and cell["warmup_seconds"] > 0 for cell in report["cells"])
    for cell in report["cells"]:
        for figures in cell["repeats"]:
            assert figures["generated_tokens"] == 8 * 6
            assert figures["decode_tokens"] == 8 * 5
            assert figures["requests"] == 8


def test_no_warm_up_means_none(bench: Callable[..., Bench]) -> None:
    done = bench(SWEEP | {"warmup": 0, "repeats": 1})
    assert all(cell["warmup_seconds"] == 0 for cell in done.report()["cells"])
    assert not any("warm-up" in news for news in done.news)


def test_full_is_judged_faithful_and_a_careless_threshold_is_not(bench: Callable[..., Bench]) -> None:
    report = bench(SWEEP | {"strategy": ["split"], "threshold": ["-inf", "1.5"], "repeats": 1}).report()
    full, always, never = (cell["quality"] for cell in report["cells"])
    assert full["loss"] == full["strict_loss"] == 0
    assert full["identical"] == 1
    assert never == full
    assert always["loss"] > 0.3
    assert always["identical"] < 1
    shares = [cell["repeats"][0]["exit_shares"] for cell in report["cells"]]
    assert shares == [{"6": 1.0}, {"2": 1.0}, {"6": 1.0}]


def test_the_breakdown_accounts_for_the_step(bench: Callable[..., Bench]) -> None:
    report = bench(SWEEP | {"strategy": ["split"], "threshold": ["-inf"], "repeats": 1}).report()
    full, split = (cell["breakdown"] for cell in report["cells"])
    assert list(full) == list(SECTIONS)
    assert full["checks"] == full["completion"] == 0
    assert all(full[name] > 0 for name in ("stages", "attention", "vocabulary", "sampling", "host"))
    assert all(seconds > 0 for seconds in split.values())


def test_timed_parts_change_no_answer(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    done = bench(SWEEP | {"strategy": ["split"], "repeats": 1})
    outputs: list[Any] = []

    def kept(engine: Any, *_: Any) -> None:
        outputs.append(measure(engine, done.suite.requests[next(iter(done.suite.groups))]).outputs)

    monkeypatch.setattr(suite_module, "breakdown", kept)
    done.report()
    (cells,) = done.suite.groups.values()
    assert outputs == [cell.runs[0].outputs for cell in cells]


@pytest.mark.parametrize("strategy", ["split", "all-exit"])
def test_simulated_rates_are_met(bench: Callable[..., Bench], strategy: str) -> None:
    """Rows leave at the rates asked for; all-exit on one row at a time is the same."""
    given = SWEEP | {
        "strategy": [strategy],
        "exits": (),
        "threshold": (),
        "simulate_exits": "0.3@2,0.5@4",
        "batch": ["1" if strategy == "all-exit" else "6"],
        "output_len": ["33"],
        "num_prompts": 24,
        "repeats": 1,
        "warmup": 0,
    }
    report = bench(given, **{"cache.num_blocks": 400}).report()
    figures = report["cells"][1]["repeats"][0]
    tokens = figures["decode_tokens"]
    assert tokens == 24 * 32
    for depth, rate in (("2", 0.3), ("4", 0.2), ("6", 0.5)):
        assert abs(figures["exit_shares"][depth] - rate) < 3.5 * sqrt(rate * (1 - rate) / tokens)
    assert report["cells"][1]["quality"] is None
    assert report["workload"]["simulate_exits"] == "0.3@2,0.5@4"


def test_simulated_exits_do_not_depend_on_the_batch(bench: Callable[..., Bench]) -> None:
    given = SWEEP | {"strategy": ["split"], "exits": (), "threshold": (), "simulate_exits": "0.3@2,0.5@4"}
    done = bench(given | {"batch": ["1,5"], "repeats": 1, "quality": False})
    done.report()
    depths = [[[t.layers_executed for t in out.tokens] for out in cells[1].runs[0].outputs] for cells in done_of(done)]
    assert depths[0] == depths[1]


def done_of(done: Bench) -> list[Any]:
    return list(done.suite.groups.values())


def test_a_trace_is_replayed(bench: Callable[..., Bench], tmp_path: Path) -> None:
    prompts = [{"id": f"p{i}", "prompt": "abc" * (i + 1)} for i in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    depths = {"p0": [6, 2, 4, 6], "p1": [6, 6, 2], "p2": [6, 4, 4, 2, 2]}
    lines = [{"id": name, "tokens": [{"layers_executed": d} for d in own]} for name, own in depths.items()]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given = {
        "batch": ["2"],
        "strategy": ["split"],
        "exits": ["2,4"],
        "prompts": str(tmp_path / "prompts.jsonl"),
        "replay_trace": tmp_path / "trace.jsonl",
        "repeats": 1,
    }
    done = bench(given)
    report = done.report()
    (cells,) = done_of(done)
    assert {o.id: [t.layers_executed for t in o.tokens] for o in cells[1].runs[0].outputs} == depths
    assert report["workload"]["trace"] == "trace.jsonl"
    assert {cell["key"]["output_len"] for cell in report["cells"]} == {5}
    assert all(cell["key"]["threshold"] == [] for cell in report["cells"])


def test_an_interruption_keeps_whole_rounds(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = 0

    def interrupted(engine: Any, requests: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 6:  # 2 warm-ups, 2 in round 1, the second cell of round 2
            raise KeyboardInterrupt
        return measure(engine, requests)

    monkeypatch.setattr(suite_module, "measure", interrupted)
    report = bench(SWEEP | {"strategy": ["split"], "repeats": 3}).report()
    assert report["interrupted"]
    assert [len(cell["repeats"]) for cell in report["cells"]] == [1, 1]
    assert [cell["breakdown"] for cell in report["cells"]] == [None, None]


def test_a_report_survives_its_file(bench: Callable[..., Bench], tmp_path: Path) -> None:
    report = bench(SWEEP | {"threshold": ["-inf"], "repeats": 1, "roofline": False}).report()
    write_report(tmp_path / "r.json", report)
    assert read_report(tmp_path / "r.json", pytest.fail) == report


def test_a_batch_that_does_not_fit_names_the_largest(bench: Callable[..., Bench]) -> None:
    with pytest.raises(ConfigError, match=r"--batch 8 needs 40 KV blocks.*has 17.*largest batch that fits is 3"):
        bench(SWEEP | {"batch": ["8"]}, **{"cache.num_blocks": 17}).report()


def test_the_largest_batch_that_fits_runs_without_preemption(bench: Callable[..., Bench]) -> None:
    report = bench(SWEEP | {"batch": ["3"], "repeats": 1}, **{"cache.num_blocks": 17}).report()
    assert [cell["repeats"][0]["preemptions"] for cell in report["cells"]] == [0, 0, 0]
    assert [cell["repeats"][0]["decode_iterations"] for cell in report["cells"]] == [15, 15, 15]  # 3 + 3 + 2 requests


def test_all_groups_are_checked_before_the_first_runs(bench: Callable[..., Bench]) -> None:
    for wrong, message in (
        ({"batch": ["1,8"]}, "--batch 8 needs 40 KV blocks"),
        ({"input_len": ["7,500"]}, "has 500 prompt tokens and up to 6 new ones, the model's context is 160"),
    ):
        done = bench(SWEEP | wrong, **{"cache.num_blocks": 17})
        with pytest.raises(ConfigError, match=message):
            done.report()
        assert not any("round" in news for news in done.news)


def test_a_failure_on_the_way_keeps_what_is_measured(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(engine: Any, requests: Any) -> Any:
        if engine.runner.shape.max_num_seqs == 3:
            raise EeinferError("out of luck")
        return measure(engine, requests)

    monkeypatch.setattr(suite_module, "measure", failing)
    done = bench(SWEEP | {"batch": ["2,3"], "repeats": 1})
    report = done.report()
    assert report["interrupted"]
    assert str(done.suite.failure) == "out of luck"
    assert [len(cell["repeats"]) for cell in report["cells"]] == [1, 1, 1, 0, 0, 0]


def test_equal_cells_are_measured_once(bench: Callable[..., Bench]) -> None:
    done = bench(SWEEP | {"strategy": ["split"], "threshold": ["0.5", "0.5,0.5", "inf"]})
    (cells,) = done.suite.groups.values()
    assert [(cell.key.strategy, cell.key.threshold) for cell in cells] == [
        ("full", ()),
        ("split", (0.5, 0.5)),
        ("split", ()),
    ]


@pytest.mark.parametrize("given", [{"threshold": ["0.5"]}, {"threshold": ["0.5", "inf"]}, {"strategy": ["full"]}])
def test_a_curve_without_points_is_refused_early(bench: Callable[..., Bench], given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--curve: no strategy with exits has several thresholds"):
        bench(SWEEP | {"curve": True} | given)


def test_fitting_takes_the_longest_requests() -> None:
    requests = limited([Request(str(n), prompt_token_ids=(1,) * n) for n in (1, 30, 2, 12)], 4, ignore_eos=True)
    check_fits(requests, 2, num_blocks=16, block_size=4)  # 10 of the longest and 5 of the next, each with its spare
    with pytest.raises(ConfigError, match="largest batch that fits is 1"):
        check_fits(requests, 2, num_blocks=14, block_size=4)


def test_synthetic_prompts_come_from_the_seed() -> None:
    group = Group(batch=2, input_len=5, output_len=3)
    first, again, other = (synthetic(group, 9, 50, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert {len(r.prompt_token_ids or ()) for r in first} == {5}
    assert len({r.prompt_token_ids for r in first}) == 9
    assert all(0 <= t < 50 for r in first for t in r.prompt_token_ids or ())


def test_random_weights_need_no_files() -> None:
    located = locate_random("smollm2-135m")
    small = replace(located.config, num_layers=3, hidden_size=48, intermediate_size=64, vocab_size=300, num_heads=4)
    small = replace(small, num_kv_heads=2, head_dim=12, dtype="float32")
    located = replace(located, config=small)
    settings = load_settings(flags={"model.device": "cpu"}, environ={}).settings
    chosen = options(random_weights="smollm2-135m", simulate_exits="0.5@1", output_len=["4"], repeats=1, batch=["2"])

    def resolve(cell: Any) -> Any:
        return load_settings(flags={"cache.num_blocks": 99, "model.device": "cpu", **cell}, environ={}).settings

    done = Suite(chosen, located, resolve, lambda _: None)
    subject = load_subject(settings.model, located, 0, lambda _: None)
    done.run(subject, lambda _: None)
    report = collect(done, subject, command=[], settings={})
    assert report["model"]["random_weights"]
    assert report["workload"]["source"] == "synthetic"
    assert report["workload"]["prompt_tokens"] == 8 * 64
    assert [cell["quality"] for cell in report["cells"]] == [None] * 3
    assert 0 < report["cells"][2]["repeats"][0]["exit_shares"]["1"] < 1


def test_a_refusal_stops_a_benchmark_and_a_failure_is_counted(tiny_model: Callable[[str], Path]) -> None:
    settings = load_settings(flags=FLAGS | {"model.name": str(tiny_model("gqa"))}, environ={}).settings
    located = locate(settings.model, pytest.fail)
    model = load_model(settings.model, located, pytest.fail)
    engine = build_engine(settings, model, build_runner(settings, model, plan_exits(settings, located, lambda _: None)))
    too_long = limited([Request("long", prompt_token_ids=(1,) * 150)], 50, ignore_eos=True)
    with pytest.raises(EeinferError, match="request long cannot be served"):
        measure(engine, too_long)
    model.decoder.weights.final_norm.fill_(torch.nan)
    figures = run_figures(measure(engine, limited([Request("x", prompt_token_ids=(1, 2))], 3, ignore_eos=True)))
    assert (figures.requests, figures.failed_requests, figures.generated_tokens) == (1, 1, 0)


def test_metrics_on_a_fake_clock(tiny_model: Callable[[str], Path]) -> None:
    """Every reading of the clock is one second later, so that times can be told by counting."""
    seconds = iter(range(10**6))
    settings = load_settings(flags=FLAGS | {"model.name": str(tiny_model("gqa"))}, environ={}).settings
    settings = replace(settings, batching=replace(settings.batching, strategy="full", max_num_seqs=1))
    model = load_model(settings.model, locate(settings.model, pytest.fail), pytest.fail)
    engine = build_engine(settings, model, build_runner(settings, model, []))
    engine._clock = lambda: float(next(seconds))
    requests = limited([Request(n, prompt_token_ids=(1, 2)) for n in "ab"], 3, ignore_eos=True)
    figures = run_figures(measure(engine, requests, clock=engine._clock))
    # Started at 0; each step reads the clock twice. One row at a time: prefill, pass, pass; then the other's.
    assert figures.seconds == 12
    assert figures.prefill_seconds == 2
    assert figures.decode_seconds == 4
    assert figures.ttft == (2.0, 8.0)
    assert figures.tpot == (2.0, 2.0)
    assert figures.tokens_per_second == 6 / 12
    assert figures.decode_tokens_per_second == 1.0


def test_time_belongs_to_the_innermost_section() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 20.0, 23.0])
    timer = SectionTimer(lambda: None, lambda: next(times))
    with timer.section("stages"), timer.section("attention"):
        pass
    with timer.section("completion"), timer.section("stages"):
        pass
    assert timer.take() == {"stages": 1.0 + 4.0, "attention": 2.0, "completion": 3.0}
    assert timer.take() == {}
