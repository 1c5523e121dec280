"""Memory on CUDA, on a machine without it: what steps take is measured on a small cache, and messages have figures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_memory import CONFIG
from tiny import bare_exits, load_decoder

from eeinfer.config.load import load_settings
from eeinfer.config.schema import CacheSettings, Settings
from eeinfer.core.plan import Outcome, Pass, Plan, Prefill
from eeinfer.engine import build, capturing
from eeinfer.engine.build import Model, build_runner, load_model, locate
from eeinfer.errors import ConfigError, EeinferError
from eeinfer.model import loader
from eeinfer.model.decoder import Decoder
from eeinfer.model.tokenizer import NoTokenizer
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.runner import capture, memory, sizing
from eeinfer.runner.capture import CudaCapture, DryCapture, Step
from eeinfer.runner.memory import check_weights
from eeinfer.runner.model_runner import ModelRunner
from eeinfer.runner.sizing import StepMemory, cache_shape, graph_memory, measured

MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

TinyDecoder = Callable[..., Decoder]


def settings_of(**flags: Any) -> Settings:
    return load_settings(flags={key.replace("__", "."): value for key, value in flags.items()}, environ={}).settings


class Scripted:
    """A meter that tells what it is given."""

    def __init__(self, *peaks: int) -> None:
        self.peaks = list(peaks)

    def start(self) -> None:
        assert self.peaks

    def peak(self) -> int:
        return self.peaks.pop(0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, int]]:
    """Every plan that a runner carries out, with the blocks of its cache."""
    plans: list[tuple[Plan, int]] = []
    run = ModelRunner.run

    def spy(runner: ModelRunner, plan: Plan) -> Outcome:
        plans.append((plan, runner.shape.num_blocks))
        return run(runner, plan)

    monkeypatch.setattr(ModelRunner, "run", spy)
    return plans


@pytest.mark.parametrize(
    ("tokens", "rows", "lengths", "blocks"),
    [
        (100, 4, [100], 7),
        (400, 4, [160, 160, 80], 25),  # the longest context is 160
        (400, 2, [160, 160], 20),  # no more than there can be
        (160, 1, [160], 10),
        (1, 3, [1], 1),
    ],
)
def test_the_largest_steps_are_run(
    tokens: int, rows: int, lengths: list[int], blocks: int, tiny_decoder: TinyDecoder, ran: list[tuple[Plan, int]]
) -> None:
    decoder = tiny_decoder("gqa")
    settings = settings_of(batching__max_num_batched_tokens=tokens, batching__max_num_seqs=rows)
    exits = bare_exits(decoder, (2, 4), "margin", 0.5)
    assert measured(settings, decoder, exits, Scripted(7, 5)) == StepMemory(prefill=7, decode=5)
    prefill, *passes = [plan for plan, _ in ran]
    assert {own for _, own in ran} == {blocks}, "the cache is no larger than they need"
    assert isinstance(prefill, Prefill)
    assert [len(span.tokens) for span in prefill.spans] == lengths
    assert [(p.stage, len(p.rows)) for p in passes if isinstance(p, Pass)] == [(0, rows), (1, rows), (2, rows)]


def test_kernels_that_stop_at_the_context_are_launched_for_the_longest(
    tiny_decoder: TinyDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "reads_whole_tables", False)
    widths = set()
    attend = Decoder.attend

    def spy(decoder: Decoder, *given: Any) -> Any:
        widths.update(batch.block_tables.shape for batch in given if isinstance(batch, TokenBatch))
        return attend(decoder, *given)

    monkeypatch.setattr(Decoder, "attend", spy)
    settings = settings_of(batching__max_num_batched_tokens=20, batching__max_num_seqs=3)
    assert measured(settings, tiny_decoder("gqa"), (), Scripted(7, 5)) == StepMemory(7, 5)
    assert widths == {(1, 2), (3, 1), (3, 10)}


def test_steps_that_do_not_fit(tiny_decoder: TinyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Outcome:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ModelRunner, "run", fail)
    monkeypatch.setattr(sizing, "free_memory", lambda _: 100 * MIB)
    with pytest.raises(ConfigError, match=r"100 MiB are free .*prefill of 320 tokens and 2 rows: lower batching\."):
        measured(settings_of(batching__max_num_seqs=2), tiny_decoder("gqa"), (), Scripted(1, 1))


# From here on, a device that is said to be CUDA


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Figures of torch's allocator and driver, by name, that a test may change."""
    found = SimpleNamespace(free=1000 * MIB, reserved=0, allocated=0, peak=0, emptied=0, reset=0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (found.free, 10**12))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: found.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: found.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: found.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(found, "reset", found.reset + 1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(found, "emptied", found.emptied + 1))
    return found


def test_what_the_allocator_keeps_is_free(cuda: SimpleNamespace) -> None:
    cuda.reserved, cuda.allocated = 300 * MIB, 100 * MIB
    assert memory.free_memory(CUDA) == 1200 * MIB


def test_the_meter_tells_what_came_on_top(cuda: SimpleNamespace) -> None:
    meter = sizing.CudaMeter(CUDA)
    cuda.allocated, cuda.peak = 50, 75
    meter.start()
    assert cuda.reset == 1
    assert meter.peak() == 25


def said_to_be_on_cuda(decoder: Decoder) -> Any:
    """A decoder that says so; for what looks at it and does not run it."""
    return SimpleNamespace(
        config=decoder.config, dtype=decoder.dtype, device=CUDA, num_layers=decoder.num_layers, reads_whole_tables=False
    )


def test_the_cache_takes_its_share_of_what_steps_leave(
    cuda: SimpleNamespace, tiny_decoder: TinyDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = said_to_be_on_cuda(tiny_decoder("gqa"))
    steps = StepMemory(prefill=500 * MIB, decode=20 * MIB)
    monkeypatch.setattr(sizing, "measured", lambda *_: steps)
    size = memory.bytes_per_block(decoder.config, decoder.dtype, 16)
    settings = settings_of(batching__max_num_seqs=10**6)
    plain = cache_shape(settings, decoder, (), captures=False)
    assert plain.num_blocks == int(0.9 * 500 * MIB) // size
    assert cuda.emptied == 1
    assert plain.max_num_seqs == plain.num_blocks, "each sequence has a block"
    settings = settings_of(batching__max_num_seqs=64)
    graphs = graph_memory(settings, decoder, (), steps)
    assert graphs > 20 * MIB + 64 * decoder.config.vocab_size * 8 + 11 * 4 * MIB
    assert cache_shape(settings, decoder, (), captures=True).num_blocks == 64 * 10  # contexts of 160 tokens
    cuda.free = 500 * MIB + graphs + 10 * size
    assert cache_shape(settings, decoder, (), captures=True).num_blocks == 9
    assert cache_shape(settings, decoder, (), captures=True).max_num_seqs == 9


def test_a_given_number_of_blocks_is_not_measured(
    cuda: SimpleNamespace, tiny_decoder: TinyDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "measured", lambda *_: pytest.fail("nothing is to be measured"))
    decoder = said_to_be_on_cuda(tiny_decoder("gqa"))
    assert cache_shape(settings_of(cache__num_blocks=12), decoder, (), captures=True).num_blocks == 12
    assert cuda.emptied == 0


def test_nothing_is_measured_on_a_cpu(tiny_decoder: TinyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "measured", lambda *_: pytest.fail("nothing is to be measured"))
    assert cache_shape(settings_of(), tiny_decoder("gqa"), (), captures=False).num_blocks == 32 * 10


def test_no_block_fits_beside_the_steps(cuda: SimpleNamespace) -> None:
    cuda.free = 600 * MIB
    with pytest.raises(
        ConfigError, match=r"fits 90% of the 600 MiB free on cuda:0 beside 599 MiB for its steps: .*max_"
    ):
        memory.num_blocks(CacheSettings(), replace(CONFIG, num_layers=400), torch.float32, CUDA, 4, reserved=599 * MIB)


@pytest.mark.parametrize(("dtype", "narrower"), [(torch.float32, True), (torch.bfloat16, False)])
def test_weights_that_do_not_fit(dtype: torch.dtype, narrower: bool, cuda: SimpleNamespace) -> None:
    config = replace(CONFIG, vocab_size=10**7)
    cuda.free = 2**30
    needed = 10**7 * 64 * dtype.itemsize / 2**30
    with pytest.raises(ConfigError, match=rf"model needs {needed:.1f} GiB .* but 1.0 GiB are free on cuda:0") as caught:
        check_weights("model", config, dtype, CUDA)
    assert ("--dtype bfloat16" in str(caught.value)) == narrower
    cuda.free = 2**40
    assert check_weights("model", config, dtype, CUDA) >= 10**7 * 64 * dtype.itemsize


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: 1000)
    monkeypatch.setattr(build, "load_weights", lambda *_: pytest.fail("the weights are not to be read"))
    settings = settings_of(model__name=str(tiny_model("gqa")), model__device="cpu")
    with pytest.raises(ConfigError, match=r"GiB for its weights in float32"):
        load_model(settings.model, locate(settings.model, lambda _: None), lambda _: None)


def test_tensors_are_read_straight_to_the_device(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = []
    opened = loader.safe_open

    def spy(path: Path, *, framework: str, device: str) -> Any:
        devices.append(device)
        return opened(path, framework=framework, device=device)

    monkeypatch.setattr(loader, "safe_open", spy)
    load_decoder(tiny_model("sharded"))
    assert devices == ["cpu"] * 3


# Which runner captures


@pytest.mark.parametrize(
    ("eager", "whole_tables", "device", "captures"),
    [
        (False, False, "cuda", True),
        (True, False, "cuda", False),
        (False, True, "cuda", False),
        (False, False, "cpu", False),
    ],
)
def test_when_decode_steps_are_captured(
    eager: bool,
    whole_tables: bool,
    device: str,
    captures: bool,
    tiny_decoder: TinyDecoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capturing, "CudaCapture", lambda _: DryCapture())
    decoder = said_to_be_on_cuda(tiny_decoder("gqa"))
    decoder.device, decoder.reads_whole_tables = torch.device(device), whole_tables
    assert (capturing.device_capture(settings_of(model__enforce_eager=eager).model, decoder) is not None) == captures


def test_capturing_is_told(tiny_decoder: TinyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter((900 * MIB, 850 * MIB))
    monkeypatch.setattr(capturing, "free_memory", lambda _: next(free))
    model = Model(tiny_decoder("gqa"), NoTokenizer())
    settings = settings_of(batching__max_num_seqs=5, cache__num_blocks=9)
    notes: list[str] = []
    runner = build_runner(settings, model, [], capture=DryCapture(), note=notes.append)
    assert runner.graphs is not None
    assert notes[0] == "capturing CUDA graphs of decode steps"
    assert notes[1].startswith("captured 4 CUDA graphs in ")  # 1, 2, 4 and 5 rows
    assert notes[1].endswith(" s, 50 MiB")


def test_no_memory_for_a_graph(tiny_decoder: TinyDecoder) -> None:
    class Full(DryCapture):
        def capture(self, step: Step) -> Step:
            raise torch.OutOfMemoryError(str(step is None))

    settings = settings_of(batching__max_num_seqs=5, cache__num_blocks=9)
    with pytest.raises(EeinferError, match=r"CUDA graph for 5 rows .*--enforce-eager"):
        build_runner(settings, Model(tiny_decoder("gqa"), NoTokenizer()), [], capture=Full())


# The calls that only a GPU could carry out, in their order


class Driver:
    """Stands for torch.cuda: writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        driver = self

        class Stream:
            def __init__(self, device: torch.device | None = None) -> None:
                self.name = "main" if device is None else "side"

            def wait_stream(self, other: Stream) -> None:
                driver.calls.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                driver.calls.append("replay")

        class Event:
            def record(self) -> None:
                driver.calls.append("record")

            def synchronize(self) -> None:
                driver.calls.append("synchronize")

        self.Stream, self.CUDAGraph, self.Event = Stream, Graph, Event
        self.current_stream = Stream
        self.graph_pool_handle = lambda: "pool"
        self.set_device = lambda device: self.calls.append(f"device {device}")

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append(f"off {stream.name}")

    @contextmanager
    def graph(self, _: Any, *, pool: str, stream: Any) -> Any:
        self.calls.append(f"begin {pool} {stream.name}")
        yield
        self.calls.append("end")


def test_a_cuda_graph_is_warmed_up_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(capture.torch, "cuda", driver)
    replay = CudaCapture(CUDA).capture(lambda: driver.calls.append("step"))
    replay()
    warm_up = ["side waits for main", "on side", "step", "off side", "main waits for side"]
    assert driver.calls == ["device cuda:0", *warm_up, "begin pool side", "step", "end", "replay"]
