"""The roofline: work counted by hand, floors on a fake clock, and probes that measure something."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
import torch

from eeinfer import LLM
from eeinfer.bench import probes as probing
from eeinfer.bench.measure import measure
from eeinfer.bench.probes import Probes, last_level_cache, probe
from eeinfer.bench.record import Run
from eeinfer.bench.roofline import Measured, Work, WorkCounter, best_rates, cell_entry, rates_entry
from eeinfer.core.request import Request, SamplingParams
from eeinfer.core.step import Step
from eeinfer.errors import ConfigError
from eeinfer.model.families import ModelConfig

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    num_layers=4,
    hidden_size=8,
    intermediate_size=12,
    vocab_size=20,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=64,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling={"rope_type": "default"},
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied=True,
    dtype="float32",
)
# By hand, for one layer: q, k and v; output; gate and up; down. Two norms are read, too.
MATRICES = (8 + 4 + 4) * 8 + 8 * 8 + 2 * 12 * 8 + 8 * 12
LAYER_BYTES = (MATRICES + 2 * 8) * 4
KV_BYTES = 2 * 4 * 4  # K and V of a token, one KV head of 4 numbers, 4 bytes each
VOCABULARY = 20 * 8
PROBES = Probes(read={"sum": 1e3, "dot": 2e3}, matrix={"square": 1e6}, llc_bytes=None)


def a_pass(stage: int, rows: int, context: int, seconds: float = 1.0, produced: Sequence[str] = ()) -> Step:
    return Step("pass", stage, rows, context, seconds, 0.0, tuple(produced), ())


def a_prefill(rows: int, seconds: float, produced: Sequence[str] = ()) -> Step:
    return Step("prefill", -1, rows, 0, seconds, 0.0, tuple(produced), ())


def a_run(*steps: Step, preemptions: int = 0) -> Run:
    return Run(0.0, steps, (), 0, 0, preemptions, 0, None)


def counter(*stage_layers: int, measure: str = "max-prob", config: ModelConfig = CONFIG) -> WorkCounter:
    return WorkCounter(config, torch.float32, stage_layers, measure)


# Work


def test_work_of_full_depth() -> None:
    assert counter(4).of_pass(a_pass(0, rows=3, context=30)) == Work(
        4 * LAYER_BYTES + 4 * 30 * KV_BYTES + VOCABULARY * 4,
        4 * 2 * MATRICES * 3 + 4 * 4 * 30 * 2 * 4 + 2 * VOCABULARY * 3,
    )


@pytest.mark.parametrize(
    ("measure", "produced", "rows_to_vocabulary"),
    [
        ("max-prob", "", 3),
        ("margin", "a", 3),
        ("entropy", "ab", 3),
        ("similarity", "", 0),
        ("similarity", "ab", 2),
        ("gate", "a", 1),
    ],
)
def test_work_of_an_exit(measure: str, produced: str, rows_to_vocabulary: int) -> None:
    work = counter(1, 3, measure=measure).of_pass(a_pass(0, rows=3, context=30, produced=produced))
    assert work == Work(
        LAYER_BYTES + 30 * KV_BYTES + (VOCABULARY * 4 if rows_to_vocabulary else 0),
        2 * MATRICES * 3 + 4 * 30 * 2 * 4 + 2 * VOCABULARY * rows_to_vocabulary,
    )


def test_the_last_stage_ends_at_the_vocabulary_whatever_the_measure() -> None:
    one = counter(1, 3, measure="similarity").of_pass(a_pass(1, rows=2, context=20))
    assert one.read_bytes == 3 * (LAYER_BYTES + 20 * KV_BYTES) + VOCABULARY * 4


def test_biases_and_norms_are_read_but_are_no_matrices() -> None:
    traits = replace(CONFIG, qkv_bias=True, qk_norm=True)
    plain, more = (counter(4, config=config).of_pass(a_pass(0, 1, 1)) for config in (CONFIG, traits))
    assert more == Work(plain.read_bytes + 4 * (16 + 2 * 4) * 4, plain.operations)


# Rates


def test_the_best_rate_is_of_a_probe_unless_a_step_beats_it() -> None:
    slow = Measured("full, batch 1", counter(4), [a_run(a_prefill(8, 1e3, "a"), a_pass(0, 1, 9, seconds=1e3))])
    rates = best_rates(PROBES, [slow])
    assert (rates.read, rates.matrix) == ((2e3, "dot"), (1e6, "square"))
    assert best_rates(PROBES, []) == rates


def test_a_pass_can_hold_the_best_read_rate() -> None:
    cell = Measured("split, batch 2", counter(1, 3), [a_run(a_pass(0, 2, 8, 0.5), a_pass(1, 1, 4, 1.0))])
    best = best_rates(PROBES, [cell]).read
    assert best == (3 * (LAYER_BYTES + 4 * KV_BYTES) + VOCABULARY * 4, "a pass of split, batch 2")


def test_prefills_can_hold_the_best_matrix_rate() -> None:
    # The first part of a prompt, which picks no token, may seem to take no time: together they are timed well.
    prefills = a_run(a_prefill(50, 1e-5), a_prefill(50, 1e-2 - 1e-5, "ab"))
    best = best_rates(PROBES, [Measured("full", counter(1, 3), [prefills])]).matrix
    assert best.rate == pytest.approx((4 * 2 * MATRICES * 100 + 2 * VOCABULARY * 2) / 1e-2)
    assert best.by == "the prefills of full"
    replayed = a_run(a_prefill(100, 1e-2), preemptions=1)
    assert best_rates(PROBES, [Measured("full", counter(1, 3), [replayed])]).matrix.by == "square"


# Floors


def test_the_floor_sums_the_longer_part_of_each_pass() -> None:
    work = counter(1, 3)
    steps = (
        a_prefill(8, 50.0, "ab"),
        a_pass(0, 2, 8, 10.0, "a"),
        a_pass(1, 1, 4, 20.0, "b"),
        Step("complete", -1, 1, 0, 4.0, 0.0, (), ()),
        a_pass(0, 1, 5, 6.0, "b"),
    )
    cell = Measured("split", work, [a_run(*steps), a_run(*steps)])
    rates = best_rates(PROBES, [])
    passes = [work.of_pass(step) for step in steps if step.kind == "pass"]
    assert all(w.read_bytes / 2e3 > w.operations / 1e6 for w in passes)
    floor = sum(w.read_bytes for w in passes) / 2e3 / 2
    assert cell_entry(rates, cell) == pytest.approx(
        {
            "floor_seconds_per_iteration": floor,
            "measured_seconds_per_iteration": 20.0,  # passes and completions of two iterations, 40 seconds
            "ratio": 20.0 / floor,
            "bound": "read",
        }
    )


def test_many_rows_are_bound_by_operations() -> None:
    cell = Measured("full", counter(4), [a_run(a_pass(0, 1000, 1000, 1e5))])
    entry = cell_entry(best_rates(replace(PROBES, matrix={"square": 1e3}), []), cell)
    assert entry is not None
    assert entry["bound"] == "matrix"
    operations = 4 * 2 * MATRICES * 1000 + 4 * 4 * 1000 * 2 * 4 + 2 * VOCABULARY * 1000
    assert entry["floor_seconds_per_iteration"] == pytest.approx(operations / 1e3)


def test_a_ratio_under_one_is_reported_as_a_bug() -> None:
    cell = Measured("full", counter(4), [a_run(a_pass(0, 1, 9, seconds=1e-3))])
    without = cell_entry(best_rates(PROBES, []), cell)
    assert without is not None
    assert without["ratio"] < 1
    assert "under 1" in without["bug"]
    counted = cell_entry(best_rates(PROBES, [cell]), cell)
    assert counted is not None
    assert counted["ratio"] == pytest.approx(1)
    assert "bug" not in counted


def test_nothing_decoded_has_no_floor() -> None:
    assert cell_entry(best_rates(PROBES, []), Measured("full", counter(4), [a_run(a_prefill(8, 1.0, "a"))])) is None
    assert cell_entry(best_rates(PROBES, []), Measured("full", counter(4), [])) is None


def test_a_real_run_is_never_below_its_floor(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm(exits=(2, 4), threshold=0.5, measure="similarity").engine
    requests = [Request(str(i), prompt_token_ids=(i, 5, 9), sampling=SamplingParams(max_tokens=6)) for i in range(5)]
    run = measure(engine, requests)
    decoder = engine.runner.decoder
    work = WorkCounter(decoder.config, decoder.dtype, [len(s) for s in engine.runner.stages], "similarity")
    cell = Measured("split", work, [run])
    rates = best_rates(PROBES, [cell])  # the probes are far slower than any machine: the run itself sets the rates
    entry = cell_entry(rates, cell)
    assert entry is not None
    assert entry["ratio"] >= 1
    assert "bug" not in entry
    assert json.loads(json.dumps(rates_entry(PROBES, rates), allow_nan=False))["read"]["by"] == "a pass of split"


# Probes


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One with a cache of 4 KiB, so that the buffers are small."""
    monkeypatch.setattr(probing, "_CPUS", tmp_path)
    monkeypatch.setattr(probing, "_SMALLEST_BUFFER", 2**14)
    monkeypatch.setattr(probing, "_usable_cpus", lambda: {0, 1, 2})
    monkeypatch.setitem(probing._SIZES, "cpu", probing._Sizes(4, 16, (8,), 1))
    for cpu, index, level, shared, size in (
        (0, 0, "1", "0", "1K"),
        (0, 3, "3", "0-1", "4K"),
        (1, 3, "3", "0-1", "4K"),
        (2, 3, "3", "2-3", "4K"),
        (9, 3, "3", "8-9", "4K"),
    ):
        folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("shared_cpu_list", shared), ("size", size)):
            (folder / name).write_text(text + "\n", encoding="ascii")
    return tmp_path


def test_last_level_caches_of_the_usable_cpus_count_once_each(small_machine: Path) -> None:
    assert last_level_cache(CPU) == 8 * 1024
    for path in small_machine.glob("cpu*/cache/*/size"):
        path.unlink()
    assert last_level_cache(CPU) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_probes_measure_something(small_machine: Path, dtype: torch.dtype) -> None:
    assert small_machine.is_dir()
    found = probe(CONFIG, dtype, CPU, seconds=0.02)
    assert found.llc_bytes == 8 * 1024
    name = str(dtype).removeprefix("torch.")
    assert {"sum of float32", f"{name} weights by 1 row"} <= set(found.read)
    assert set(found.matrix) == {f"{name} 4 x 8 x 16", f"{name} 4 x 12 x 8", f"{name} 8 x 8 x 8"}
    assert all(isfinite(rate) and rate > 0 for rate in (*found.read.values(), *found.matrix.values()))


def test_probes_that_do_not_fit_say_so(small_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert small_machine.is_dir()
    monkeypatch.setattr(probing, "free_memory", lambda _: 2**16)
    with pytest.raises(ConfigError, match=r"--roofline needs .* MiB .* leave --roofline out"):
        probe(CONFIG, torch.float32, CPU)
