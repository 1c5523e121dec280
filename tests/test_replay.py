"""A seeded schedule of mixed exit depths, preemption included, against the plain per-layer reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import PlainLlama, Trace, random_depths
from tiny import (
    EOS,
    VARIANTS,
    Loop,
    Script,
    bare_exits,
    between_iterations,
    by_schedule,
    learned_tensors,
    load_decoder,
    sequence,
)
from tiny_families import CONFIGS
from torch import Tensor

from eeinfer import LLM, Request, SamplingParams
from eeinfer.core.plan import Complete, Outcome, Pass, Plan, Prefill
from eeinfer.core.sequence import Sequence
from eeinfer.model.decoder import Decoder

NAN = float("nan")
COMPLETIONS = ("propagate", "learned", "copy", "oracle")
EXITS, DEPTH = (2, 3, 5), 6
# Prompt and answer lengths of more sequences than run at once, which join while others run; some share a step.
LENGTHS = ((5, 14), (11, 9), (1, 17), (8, 12), (17, 6), (4, 15), (9, 10))
ARRIVALS = (0, 0, 0, 9, 14, 15, 60)

Case = tuple[list[Sequence], dict[str, list[int]], dict[str, Trace]]


@pytest.fixture(scope="module")
def case(plain: Callable[[str], PlainLlama], tiny_decoder: Callable[..., Decoder]) -> Callable[[str, str], Case]:
    """Sequences with their schedule of depths, and what the reference makes of them."""

    @cache
    def expected(variant: str, completion: str) -> tuple[list[list[int]], dict[str, list[int]], dict[str, Trace]]:
        rng = np.random.default_rng(list(VARIANTS).index(variant))
        prompts = [rng.integers(0, 256, size=prompt).tolist() for prompt, _ in LENGTHS]
        depths = {str(i): random_depths(rng, EXITS, DEPTH, answer) for i, (_, answer) in enumerate(LENGTHS)}
        config = tiny_decoder(variant).config
        own = {n: learned_tensors(config, n) for n in EXITS}
        plain(variant).learned = {n: {name: t.numpy() for name, t in tensors.items()} for n, tensors in own.items()}
        traces = {str(i): plain(variant).generate(prompts[i], depths[str(i)], completion) for i in range(len(LENGTHS))}
        assert min(gap for trace in traces.values() for gap in trace.gaps) > 1e-6, "a near tie proves nothing"
        return prompts, depths, traces

    def fresh(variant: str, completion: str) -> Case:
        prompts, depths, traces = expected(variant, completion)
        return [sequence(str(i), p, len(depths[str(i)])) for i, p in enumerate(prompts)], depths, traces

    return fresh


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Equal in float64, up to the order of sums."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


class Watch:
    """Holds a Loop's cache against the reference: all layers between iterations, each stage as it is written."""

    def __init__(self, loop: Loop, traces: dict[str, Trace], depths: dict[str, list[int]]) -> None:
        self.loop, self.depths = loop, depths
        self.expected = {name: torch.from_numpy(trace.kv()) for name, trace in traces.items()}
        self.compared = 0
        loop.before, loop.after = self.before, self.after

    def before(self, plan: Plan) -> None:
        """Every sequence's KV so far, in all layers, and the exactness of its blocks."""
        if not between_iterations(plan):
            return
        for live in self.loop.running():
            actual = self.loop.kv(live.block_table, 0, live.num_cached)
            assert_equal(actual, self.expected[live.request_id][:, :, : live.num_cached])
            self._check_exactness(live)
            self.compared += live.num_cached

    def after(self, plan: Plan, _: Outcome) -> None:
        """The KV that a stage has just written, up to its last layer: also that of the token before the last."""
        if isinstance(plan, Pass):
            end = self.loop.runner.stages[plan.stage].stop
            for row in plan.rows:
                actual = self.loop.kv(row.block_table, row.position, row.position + 1)[:end]
                expected = self.expected[self.loop.owner(row.slot).request_id][:end, :, row.position, None]
                assert_equal(actual, expected)

    def _check_exactness(self, live: Sequence) -> None:
        blocks, first = self.loop.scheduler.blocks, live.num_cached
        for position in range(live.prompt_tokens, live.num_cached):
            if self.depths[live.request_id][position - live.prompt_tokens + 1] < DEPTH:
                first = position
                break
        if self.loop.completion == "oracle" or first == live.num_cached:
            assert all(blocks.is_exact(block) for block in live.block_table)
            return
        expected = [i < first // self.loop.block_size for i in range(len(live.block_table))]
        assert [blocks.is_exact(block) for block in live.block_table] == expected


def run_case(decoder: Decoder, case: Case, completion: str, **options: Any) -> tuple[Loop, Watch]:
    """Run the sequences of a case under `split`, forced onto its schedule, and compare everything."""
    sequences, depths, traces = case
    script = by_schedule(depths)
    loop = Loop(decoder, script.exits(decoder, EXITS), script, completion, max_num_seqs=3, **options)
    watch = Watch(loop, traces, depths)
    loop.run(sequences, ARRIVALS)
    assert {s.request_id: s.generated for s in sequences} == {name: trace.tokens for name, trace in traces.items()}
    assert {s.request_id: s.depths for s in sequences} == depths
    assert loop.scheduler.stats.involuntary_exits == loop.scheduler.stats.involuntary_stays == 0
    return loop, watch


@pytest.mark.parametrize(
    ("variant", "completion"),
    # Only these two have to know what a family is made of.
    [(v, c) for v in VARIANTS for c in COMPLETIONS if c in {"propagate", "learned"} or v not in CONFIGS],
)
def test_mixed_depths_with_preemption_equal_the_reference(
    variant: str, completion: str, tiny_decoder: Callable[..., Decoder], case: Callable[[str, str], Case]
) -> None:
    options = {"num_blocks": 8, "max_num_batched_tokens": 7}
    loop, watch = run_case(tiny_decoder(variant), case(variant, completion), completion, **options)
    assert loop.scheduler.stats.preemptions >= 3
    assert watch.compared > 500
    spans = [span for plan in loop.plans if isinstance(plan, Prefill) for span in plan.spans]
    if completion == "oracle":
        assert all(set(span.depths) == {DEPTH} for span in spans), "exact KV needs no recorded depths"
    else:
        assert any(len(set(span.depths)) >= 3 for span in spans), "no replay mixed depths"


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("block_size", "budget"), [(1, 64), (4, 5), (16, 64)])
def test_mixed_depths_with_room_equal_the_reference(
    block_size: int,
    budget: int,
    completion: str,
    tiny_decoder: Callable[..., Decoder],
    case: Callable[[str, str], Case],
) -> None:
    options = {"num_blocks": 96 // block_size, "block_size": block_size, "max_num_batched_tokens": budget}
    loop, _ = run_case(tiny_decoder("gqa"), case("gqa", completion), completion, **options)
    assert loop.scheduler.stats.preemptions == 0


def test_the_schedule_tells_completions_apart(case: Callable[[str, str], Case]) -> None:
    """What the comparison rests on: filled entries are read later, at full depth, and change what comes after."""
    traces = {completion: case("gqa", completion)[2] for completion in COMPLETIONS}
    _, depths, _ = case("gqa", "propagate")
    for a, b in combinations(COMPLETIONS, 2):
        assert sum(traces[a][name].tokens != traces[b][name].tokens for name in depths) >= 3
    # A token that ran at full depth has other KV in the last layer, although it and all tokens before it are the same.
    changed = 0
    for name, trace in traces["propagate"].items():
        oracle = traces["oracle"][name]
        for j in (j for j, depth in enumerate(depths[name]) if depth == DEPTH):
            if trace.tokens[:j] == oracle.tokens[:j]:
                position = LENGTHS[int(name)][0] + j - 1
                changed += np.abs(trace.kv()[-1, :, position] - oracle.kv()[-1, :, position]).max() > 1e-4
    assert changed >= 5


def test_oracle_gives_the_full_models_kv(
    tiny_decoder: Callable[..., Decoder], plain: Callable[[str], PlainLlama], case: Callable[[str, str], Case]
) -> None:
    decoder = tiny_decoder("gqa")
    sequences, depths, _ = case("gqa", "oracle")
    script = by_schedule(depths)
    loop = Loop(decoder, script.exits(decoder, EXITS), script, "oracle", num_blocks=64, max_num_seqs=7)
    found: dict[str, Tensor] = {}

    def keep(plan: Plan) -> None:
        if between_iterations(plan):
            found.update({s.request_id: loop.kv(s.block_table, 0, s.num_cached) for s in loop.running()})

    loop.before = keep
    loop.run(sequences)
    for s in sequences:
        assert set(s.depths) > {DEPTH}, "some tokens left early"
        kv = found[s.request_id]
        assert kv.shape[2] == s.most_cached - 1
        full = plain("gqa").teacher_forced(s.tokens[: kv.shape[2]])
        assert_equal(kv, torch.from_numpy(full.kv()))


def test_finished_rows_are_not_completed(
    tiny_decoder: Callable[..., Decoder], case: Callable[[str, str], Case]
) -> None:
    """Complete holds each row that left early and goes on, once, and no row whose sequence has just ended."""
    decoder = tiny_decoder("gqa")
    sequences, depths, traces = case("gqa", "propagate")
    sequences[0].eos_token_ids = frozenset([traces["0"].tokens[6]])
    sequences[1].max_tokens = 2
    for name in ("0", "1"):  # both end by leaving early
        depths = depths | {name: [DEPTH, *[2] * len(depths[name])]}
    script = by_schedule(depths)
    loop = Loop(decoder, script.exits(decoder, EXITS), script, num_blocks=64, max_num_seqs=7)
    completed: list[tuple[str, int, int]] = []

    def keep(plan: Plan) -> None:
        if isinstance(plan, Complete):
            for row, stage in zip(plan.rows, plan.stages, strict=True):
                completed.append((loop.owner(row.slot).request_id, row.position, loop.runner.stages[stage].stop))

    loop.before = keep
    loop.run(sequences)
    expected = [
        (s.request_id, s.prompt_tokens + j - 1, s.depths[j])
        for s in sequences
        for j in range(1, len(s.depths) - 1)
        if s.depths[j] < DEPTH
    ]
    assert sorted(completed) == sorted(expected)
    assert all(s.depths[-1] == 2 for s in sequences[:2])


def test_replay_leaves_sampled_tokens_as_they_were(tiny_decoder: Callable[..., Decoder]) -> None:
    """With temperature and a real measure: few blocks change nothing, neither tokens nor depths."""
    decoder = tiny_decoder("gqa")
    runs = []
    for num_blocks in (64, 8):
        prompts = [range(10 * i, 10 * i + 3 + i) for i in range(5)]
        sequences = [sequence(str(i), p, 14, temperature=0.8, seed=i) for i, p in enumerate(prompts)]
        loop = Loop(decoder, bare_exits(decoder, EXITS, "max-prob", 0.3), num_blocks=num_blocks)
        loop.run(sequences)
        runs.append([(s.tokens, s.depths) for s in sequences])
        assert (loop.scheduler.stats.preemptions > 0) == (num_blocks == 8)
    assert runs[0] == runs[1]
    assert {depth for _, depths in runs[0] for depth in depths} == {*EXITS, DEPTH}


# NaN and infinities in the cache


def test_nan_does_not_reach_rows_with_shorter_tables(tiny_model: Callable[[str], Path]) -> None:
    """The padding of a shorter block table must not name a block that holds another row's NaN."""
    runs = []
    for poison in (None, 31):
        decoder = load_decoder(tiny_model("gqa"))
        sequences = [sequence("a", [1, 2], 8), sequence("b", [3, 4, 5], 8), sequence("c", range(40, 80), 8)]
        if poison is not None:
            decoder.weights.embedding[poison] = NAN
        Loop(decoder, block_size=16).run(sequences)
        runs.append([s.generated for s in sequences])
    assert runs[0][0].index(31) == 2, "the first sequence generates the poison, and only it"
    assert 31 not in runs[0][1] + runs[0][2]
    assert runs[1] == [runs[0][0][:3], *runs[0][1:]]


@pytest.mark.parametrize("completion", ["propagate", "oracle"])
def test_overflow_in_skipped_layers_does_not_reach_the_next_holder(
    completion: str, tiny_model: Callable[[str], Path]
) -> None:
    """A token's K and V overflow in the last layer, which its sequence never reads; then its blocks are used again."""
    decoder = load_decoder(tiny_model("gqa"))
    w, marker = decoder.weights, 0
    for tensor in (w.embedding[:, marker], w.output[:, marker], w.down[:, marker], w.lm_head[:, marker]):
        tensor.zero_()
    runs = []
    for _ in range(2):
        script = Script(lambda s, _, __: 0.9 if s.request_id == "shallow" else 0.1)
        sequences = [sequence("shallow", [1, 2, 3], 9), sequence("deep", [5, 6, 7], 20)]
        exits = script.exits(decoder, EXITS)
        Loop(decoder, exits, script, completion, num_blocks=6, max_num_seqs=1).run(sequences)
        runs.append(sequences)
        overflowing = sequences[0].generated[4]  # from now on this token, and no other, has the marker dimension
        w.embedding[overflowing, marker] = 1e3
        w.qkv[DEPTH - 1, :, marker] = 1e308
    assert overflowing not in sequences[1].tokens
    assert (runs[1][0].error, runs[1][0].depths) == (None, [DEPTH, *[EXITS[0]] * 8])
    assert (runs[1][1].error, runs[1][1].generated) == (None, runs[0][1].generated)


def test_nan_in_an_aborted_prompt_does_not_reach_the_next_request(make_llm: Callable[..., LLM]) -> None:
    options = {"strategy": "full", "num_blocks": 8, "max_num_batched_tokens": 4}
    good = Request("good", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=12))
    clean = make_llm(**options).generate([good])
    llm = make_llm(**options)
    llm.engine.runner.decoder.weights.embedding[EOS] = NAN
    bad = Request("bad", prompt_token_ids=(EOS, *range(1, 20)), sampling=SamplingParams(max_tokens=5))

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([bad], on_step=interrupt)
    assert llm.generate([good]) == clean
