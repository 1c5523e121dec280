"""Captured decode steps in their dry run equal the plain runner's: tokens, depths, confidences and KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Loop, bare_exits, between_iterations, load_decoder, sequence
from torch import Tensor

from eeinfer.config.load import load_settings
from eeinfer.config.schema import Completion
from eeinfer.core.plan import Draw, Outcome, Pass, Plan, Row, Shaping
from eeinfer.core.request import Request, SamplingParams
from eeinfer.core.sequence import Sequence as Seq
from eeinfer.engine.build import Model, PlannedExit, build_engine, build_runner
from eeinfer.exits.check import Exit
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec, build_head
from eeinfer.model.decoder import Decoder
from eeinfer.model.tokenizer import NoTokenizer
from eeinfer.runner import graphs
from eeinfer.runner.capture import DryCapture, Step
from eeinfer.runner.decode_buffers import DecodeBuffers
from eeinfer.runner.graphs import row_sizes, table_widths
from eeinfer.runner.row_pool import CacheShape

EXITS, DEPTH = (2, 4), 6
LENGTHS = (3, 9, 1, 14, 6, 11)
CPU = torch.device("cpu")

TinyDecoder = Callable[..., Decoder]


class MixedDepths:
    """Readiness that mixes depths: who leaves where depends on the sequence and the token's index."""

    def ready(self, row: Row, layers_executed: int) -> bool:
        own = (int(row.request_id) + row.number // 2) % 3
        return own < len(EXITS) and EXITS[own] == layers_executed


class CountedCapture(DryCapture):
    """A dry run that counts what a device would do."""

    def __init__(self) -> None:
        self.captured = self.uploads = self.downloads = 0

    def capture(self, step: Step) -> Step:
        self.captured += 1
        return super().capture(step)

    def upload(self, values: Sequence[int], target: Tensor) -> Tensor:
        self.uploads += 1
        return super().upload(values, target)

    def download(self, source: Tensor) -> list[float]:
        self.downloads += 1
        return super().download(source)


@dataclass
class Record:
    """What a loop did: plans with verdicts, and all KV of the running sequences between iterations."""

    loop: Loop
    steps: list[tuple[Plan, Outcome]] = field(default_factory=list)
    kv: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop.before, self.loop.after = self._before, self._after

    def _before(self, plan: Plan) -> None:
        if between_iterations(plan):
            self.kv += [self.loop.kv(s.block_table, 0, s.num_cached) for s in self.loop.running()]

    def _after(self, plan: Plan, outcome: Outcome) -> None:
        self.steps.append((plan, outcome))


def sequences(max_tokens: int = 12) -> list[Seq]:
    prompts = [[(17 * i + 29 * j) % 256 for j in range(length)] for i, length in enumerate(LENGTHS)]
    return [sequence(str(i), prompt, max_tokens + i % 3) for i, prompt in enumerate(prompts)]


def assert_same(one: Record, other: Record) -> None:
    """Equal plans and verdicts; confidences and KV in float64 up to the order of sums."""
    assert [plan for plan, _ in one.steps] == [plan for plan, _ in other.steps]
    for (_, verdicts), (_, others) in zip(one.steps, other.steps, strict=True):
        for a, b in zip(verdicts, others, strict=True):
            assert (a.token, a.ready, a.failed) == (b.token, b.ready, b.failed)
            assert (a.confidence is None) == (b.confidence is None)
            assert a.confidence is None or a.confidence == pytest.approx(b.confidence, rel=1e-9, nan_ok=True)
            assert [(t.token_id, t.rank) for t in a.logprobs or ()] == [(t.token_id, t.rank) for t in b.logprobs or ()]
    assert len(one.kv) == len(other.kv) > 0
    for a, b in zip(one.kv, other.kv, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def run_both(decoder: Decoder, make: Callable[[], list[Seq]] = sequences, **options: object) -> tuple[Record, Record]:
    """The same sequences through a plain runner and through captured steps."""
    records = []
    for capture in (None, CountedCapture()):
        record = Record(Loop(decoder, capture=capture, **options))  # type: ignore[arg-type]
        if record.loop.runner.graphs is not None:
            record.loop.runner.graphs.prepare()
        record.loop.run(make(), range(0, 30, 5))
        records.append(record)
    return records[0], records[1]


@pytest.mark.parametrize("completion", ["propagate", "copy", "oracle"])
@pytest.mark.parametrize("strategy", ["full", "split", "all-exit", "majority"])
def test_dry_run_equals_the_plain_runner(strategy: str, completion: Completion, tiny_decoder: TinyDecoder) -> None:
    """Few blocks, so that sequences are preempted and replayed; five rows at most, so that most passes are padded."""
    decoder = tiny_decoder("gqa")
    exits = bare_exits(decoder, EXITS, "max-prob", 0.5) if strategy != "full" else ()
    options = {"strategy": strategy, "completion": completion, "num_blocks": 14, "max_num_seqs": 5}
    plain, dry = run_both(decoder, exits=exits, readiness=MixedDepths(), **options)
    assert_same(plain, dry)
    assert dry.loop.scheduler.stats.preemptions > 0
    sizes = {len(plan.rows) for plan, _ in dry.steps if isinstance(plan, Pass)}
    assert sizes & {3}, "some passes are padded"
    depths = {plan.stage for plan, outcome in dry.steps if isinstance(plan, Pass) for v in outcome if v.leaves}
    assert depths == ({0} if strategy == "full" else {0, 1, 2})
    assert not dry.loop.runner.cache[:, :, dry.loop.runner.shape.null_block].any(), "the null block stays zero"


@pytest.mark.parametrize("variant", ["qwen2-window", "gpt2", "gemma2"])
def test_other_families(variant: str, tiny_decoder: TinyDecoder) -> None:
    decoder = tiny_decoder(variant)
    exits = bare_exits(decoder, EXITS, "entropy", 0.5)
    assert_same(*run_both(decoder, exits=exits, readiness=MixedDepths()))


def gated(decoder: Decoder, measure: str, threshold: float) -> list[Exit]:
    """Exits with gates and heads of their own."""
    generator = torch.Generator().manual_seed(3)
    config, made = decoder.config, []
    for depth in EXITS:
        spec = ExitSpec(depth, "linear", 8, gate=GateSpec(6), temperature=1.5)
        shapes = spec.tensor_shapes(config.hidden_size, config.vocab_size)
        tensors = {
            name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(decoder.dtype)
            for name, shape in shapes.items()
        }
        tensors["norm.weight"] = torch.full((config.hidden_size,), 6, dtype=decoder.dtype)
        head = build_head(spec, tensors, final_norm=decoder.final_norm, vocabulary=decoder.vocabulary, eps=1e-5)
        made.append(Exit(head, measure, threshold))
    return made


@pytest.mark.parametrize(
    ("measure", "threshold"), [("gate", 0.5), ("similarity", 0.85), ("margin", 0.1), ("max-prob", 0.9)]
)
def test_every_kind_of_measure(measure: str, threshold: float, tiny_decoder: TinyDecoder) -> None:
    decoder = tiny_decoder("gqa")
    plain, dry = run_both(decoder, exits=gated(decoder, measure, threshold))
    assert_same(plain, dry)
    left = [v for plan, outcome in dry.steps if isinstance(plan, Pass) and plan.stage < 2 for v in outcome]
    assert {v.leaves for v in left} == {True, False}, "rows leave and stay"


def test_rows_that_ask_for_more_than_the_argmax(tiny_decoder: TinyDecoder) -> None:
    """Temperature, top-k, penalties, banned tokens and logprobs, beside rows that ask for nothing."""
    decoder = tiny_decoder("gqa")
    asked = [
        {"temperature": 0.8, "seed": 5},
        {},
        {"temperature": 1.2, "shaping": Shaping(top_k=5, top_p=0.9, repetition_penalty=1.3)},
        {"num_logprobs": 3},
        {},
        {"temperature": 0.5, "num_logprobs": -1, "min_tokens": 4, "banned": (3, 4)},
    ]

    def make() -> list[Seq]:
        return [sequence(s.request_id, s.tokens, 8, **options) for s, options in zip(sequences(), asked, strict=True)]

    for measure, threshold in (("max-prob", 0.9), ("gate", 0.5)):
        plain, dry = run_both(decoder, make, exits=gated(decoder, measure, threshold), max_num_seqs=6)
        assert_same(plain, dry)
    draws = [row.draw for plan, _ in dry.steps if isinstance(plan, Pass) for row in plan.rows]
    assert {d.temperature for d in draws} == {0.0, 0.5, 0.8, 1.2}
    assert Draw() in draws


def test_a_pass_waits_once_and_uploads_once(tiny_decoder: TinyDecoder) -> None:
    """Greedy rows and a measure that sees logits: one copy each way and pass, and completion waits for nothing."""
    decoder = tiny_decoder("gqa")
    _, dry = run_both(decoder, exits=bare_exits(decoder, EXITS, "max-prob", 0.3))
    capture = dry.loop.capture
    assert isinstance(capture, CountedCapture)
    passes = sum(isinstance(plan, Pass) for plan, _ in dry.steps)
    completions = sum(len(set(plan.stages)) for plan, _ in dry.steps if not outcome_of(plan))
    assert capture.downloads == passes
    assert capture.uploads == passes + completions
    assert completions > 0


def outcome_of(plan: Plan) -> bool:
    """Whether a plan has verdicts."""
    return not hasattr(plan, "stages")


def test_wider_tables_are_captured_when_a_context_needs_them(
    tiny_decoder: TinyDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an iteration's stages, too, where nothing of the rows in flight may be touched."""
    monkeypatch.setattr(graphs, "_NARROWEST", 8)
    decoder = tiny_decoder("gqa")
    exits = bare_exits(decoder, EXITS, "max-prob", 0.5)
    plain, dry = run_both(decoder, lambda: sequences(30), exits=exits, readiness=MixedDepths(), completion="oracle")
    assert_same(plain, dry)
    made = dry.loop.runner.graphs
    assert made is not None
    assert {key.width for key in made._graphs} == {2, 8, 32}
    assert made._widths == (2, 8, 32, 40)
    capture = dry.loop.capture
    assert isinstance(capture, CountedCapture)
    # Stages, and completion after two exits, for every number of rows: no step of the same width is captured later.
    assert capture.captured == len(made._graphs) == 3 * len(made._sizes) * (3 + 2)


def test_what_padding_rows_read_and_write_reaches_nobody(tiny_model: Callable[[str], Path]) -> None:
    """Their token has a NaN embedding, so everything in their slot and block is NaN: other rows are as ever."""
    decoder = load_decoder(tiny_model("gqa"))
    assert 0 not in {token for s in sequences() for token in s.tokens[1:]}
    runs = []
    for poisoned in (False, True):
        if poisoned:
            decoder.weights.embedding[0] = torch.nan
        exits = bare_exits(decoder, EXITS, "max-prob", 0.5)
        loop = Loop(decoder, exits, readiness=MixedDepths(), max_num_seqs=5, capture=DryCapture(), prefix_cache=False)
        assert loop.runner.graphs is not None
        loop.runner.graphs.prepare()
        record = Record(loop)
        own = sequences()[1:]
        loop.run(own)
        runs.append((record, [s.generated for s in own]))
        shape = loop.runner.shape
        assert loop.runner.cache[:, :, shape.trash_block].isnan().any() == poisoned
        assert not loop.runner.cache[:, :, : shape.null_block + 1].isnan().any()
    assert 0 not in {token for generated in runs[0][1] for token in generated}
    assert runs[0][1] == runs[1][1]
    assert_same(runs[0][0], runs[1][0])


def test_nan_fails_its_own_row(tiny_model: Callable[[str], Path]) -> None:
    decoder = load_decoder(tiny_model("gqa"))
    _, clean = run_both(decoder, exits=bare_exits(decoder, EXITS, "max-prob", 0.3))
    poison = next(v.token for plan, outcome in clean.steps if isinstance(plan, Pass) for v in outcome if v.leaves)
    decoder.weights.embedding[poison] = torch.nan
    plain, dry = run_both(decoder, exits=bare_exits(decoder, EXITS, "max-prob", 0.3))
    assert_same(plain, dry)
    failed = [v.failed for plan, outcome in dry.steps if isinstance(plan, Pass) for v in outcome]
    assert any(failed)
    assert not all(failed)


def test_an_engine_with_captured_steps_answers_as_without(tiny_decoder: TinyDecoder) -> None:
    model = Model(tiny_decoder("gqa"), NoTokenizer())
    flags = {"cache.num_blocks": 30, "cache.block_size": 4, "batching.max_num_seqs": 5}
    loaded = load_settings(flags=flags | {"exits.layers": EXITS, "exits.threshold": 0.3}, environ={}).settings
    planned = [PlannedExit(ExitSpec(depth, "shared"), {}, 0.3) for depth in EXITS]
    answers = []
    for capture in (None, DryCapture()):
        engine = build_engine(loaded, model, build_runner(loaded, model, planned, capture=capture))
        for s in sequences():
            request = SamplingParams(max_tokens=s.max_tokens, temperature=0.7 * (s.request_id == "2"), seed=1)
            engine.add(Request(s.request_id, prompt_token_ids=tuple(s.tokens), sampling=request))
        outputs = []
        while engine.has_work:
            outputs += engine.step().finished
        answers.append({o.id: [(t.token_id, t.layers_executed) for t in o.tokens] for o in outputs})
    assert answers[0] == answers[1]
    assert {depth for answer in answers[1].values() for _, depth in answer} == {*EXITS, DEPTH}


# Sizes


@settings(deadline=None)
@given(st.integers(1, 2000))
def test_row_sizes(most: int) -> None:
    sizes = row_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert all(b <= 2 * a or b - a <= 8 for a, b in pairwise(sizes)), "little of a size is padding"
    assert len(sizes) <= 16 + most // 32


@settings(deadline=None)
@given(st.integers(1, 20_000), st.sampled_from([1, 4, 16, 48, 256]))
def test_table_widths(widest: int, block_size: int) -> None:
    widths = table_widths(widest, block_size)
    assert widths[-1] == widest
    assert list(widths) == sorted(set(widths))
    assert len(widths) == 1 or 1024 <= widths[0] * block_size < 1024 + block_size
    assert all(b <= 4 * a for a, b in pairwise(widths))


# Block tables on the device


TABLES = st.lists(st.integers(0, 7), min_size=1, max_size=5).map(tuple)


class Interrupted(DryCapture):
    """A dry run whose uploads can be made to fail."""

    fails = False

    def upload(self, values: Sequence[int], target: Tensor) -> Tensor:
        if self.fails:
            raise KeyboardInterrupt
        return super().upload(values, target)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), TABLES, st.booleans()), min_size=1, max_size=15))
def test_tables_on_the_device_follow_the_rows(steps: list[tuple[int, tuple[int, ...], bool]]) -> None:
    """Whatever slot gets which table next: the device has it, padded with the null block; the spare slot has trash."""
    capture = Interrupted()
    buffers = new_buffers(capture)
    for slot, table, fails in steps:
        position = 4 * len(table) - 2
        row = Row("", slot, 7, position, table, Draw(), 1, 9)
        capture.fails = fails
        if fails:
            with pytest.raises(KeyboardInterrupt):
                buffers.begin([row], 2)
            continue
        assert buffers.begin([row], 2).tolist() == []
        assert buffers.tokens(2).tolist() == [7, 0]
        batch = buffers.batch(2, 5)
        assert batch.block_tables.tolist() == [[*table, *[8] * (5 - len(table))], [9] * 5]
        assert batch.positions.tolist() == [position, 0]
        assert batch.slots.tolist() == [4 * table[-1] + 2, 4 * 9]


def new_buffers(capture: DryCapture) -> DecodeBuffers:
    shape = CacheShape(num_blocks=8, block_size=4, max_num_seqs=3)
    sizes = {"max_position": 20, "hidden_size": 2, "vocab_size": 3, "dtype": torch.float32, "device": CPU}
    return DecodeBuffers(shape, capture=capture, **sizes)  # type: ignore[arg-type]


def test_first_written_blocks_are_told() -> None:
    buffers = new_buffers(DryCapture())
    rows = [Row("a", 0, 1, 8, (3, 1, 6), Draw(), 1, 9), Row("b", 1, 1, 5, (4, 2), Draw(), 1, 9)]
    assert buffers.begin(rows, 2).tolist() == [6]
