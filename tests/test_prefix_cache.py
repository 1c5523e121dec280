"""The prefix cache on tensors: on equals off, whatever the order, batch size, number of blocks and size of chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import Loop, bare_exits, between_iterations, load_decoder, sequence

from eeinfer import LLM, Request, RequestOutput, SamplingParams
from eeinfer.core.plan import Pass, Plan, Prefill
from eeinfer.core.request import FinishReason
from eeinfer.model.decoder import Decoder

EXITS = (2, 4)
DOCUMENT = tuple((31 * i + 7) % 256 for i in range(24))

MakeLLM = Callable[..., LLM]


# Most begin alike; two are equal, two end at the border of a block of 4.
PROMPTS = [
    (*DOCUMENT, 1, 2, 3),
    (*DOCUMENT, 9),
    DOCUMENT,
    DOCUMENT[:16],
    (*DOCUMENT[:13], 80, 81, 82, 83),
    (*DOCUMENT, 1, 2, 3),
    (200, 201, 202, 203, 204),
    DOCUMENT[:6],
]


def rows(outputs: list[RequestOutput]) -> dict[str, list[tuple[int, int]]]:
    """(token, depth) of every generated token, by request."""
    return {o.id: [(t.token_id, t.layers_executed) for t in o.tokens] for o in outputs}


@pytest.mark.parametrize("completion", ["full", "propagate", "oracle"])
def test_answers_do_not_depend_on_order_batch_blocks_chunks_or_cache(
    completion: str, tiny_decoder: Callable[..., Decoder]
) -> None:
    """In float32, `full` and `split`: as each request alone and without a cache."""
    decoder = tiny_decoder("gqa", torch.float32)
    exits = [] if completion == "full" else bare_exits(decoder, EXITS, "max-prob", 0.3)
    seen: Counter[str] = Counter()

    def run(numbers: Many[int], **options: Any) -> dict[int, tuple[list[int], list[int]]]:
        loop = Loop(decoder, exits, completion="propagate" if completion == "full" else completion, **options)
        for _ in range(2):  # the second time with a warm cache
            sequences = {n: sequence(str(n), PROMPTS[n], 10 + n % 3) for n in numbers}
            loop.run(list(sequences.values()))
        stats = loop.scheduler.stats
        seen.update(hits=stats.prefix_cache_hits, preempted=stats.preemptions, evicted=loop.scheduler.blocks.evictions)
        assert options["prefix_cache"] or not stats.prefix_cache_queries
        return {n: (s.generated, s.depths) for n, s in sequences.items()}

    expected = {n: run([n], prefix_cache=False)[n] for n in range(len(PROMPTS))}
    assert completion == "full" or {depth for _, depths in expected.values() for depth in depths} == {*EXITS, 6}

    @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        order=st.permutations(range(len(PROMPTS))),
        max_num_seqs=st.integers(1, 8),
        block_size=st.sampled_from([1, 3, 4, 16]),
        tokens_of_cache=st.sampled_from([40, 48, 64, 256]),
        budget=st.sampled_from([1, 5, 16, 64]),
        prefix_cache=st.sampled_from([True, True, False]),
    )
    def check(
        order: list[int], max_num_seqs: int, block_size: int, tokens_of_cache: int, budget: int, prefix_cache: bool
    ) -> None:
        found = run(
            order,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            num_blocks=-(-tokens_of_cache // block_size),
            max_num_batched_tokens=budget,
            prefix_cache=prefix_cache,
        )
        assert found == expected

    check()
    assert all(seen[name] for name in ("hits", "preempted", "evicted")), seen


def test_counters_of_a_run(make_llm: MakeLLM) -> None:
    prompt = Request("a", prompt_token_ids=DOCUMENT, sampling=SamplingParams(max_tokens=2, ignore_eos=True))
    llm = make_llm(strategy="full")
    llm.generate([prompt])
    assert (llm.stats.prefix_cache_queries, llm.stats.prefix_cache_hits, llm.stats.peak_blocks) == (24, 0, 7)
    llm.generate([prompt])
    assert (llm.stats.prefix_cache_queries, llm.stats.prefix_cache_hits) == (48, 23)
    assert (llm.stats.peak_blocks, llm.stats.evictions, llm.stats.preemptions) == (7, 0, 0)


def test_a_second_turn_finds_the_first_one_and_its_answer(make_llm: MakeLLM) -> None:
    options = {"strategy": "full", "dtype": "float32"}
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    llm, off = make_llm(**options), make_llm(**options, prefix_cache=False)
    first = llm.generate([Request("1", prompt_token_ids=DOCUMENT, sampling=sampling)])[0]
    turn = (*DOCUMENT, *(t.token_id for t in first.tokens), 5, 6)
    second = [Request("2", prompt_token_ids=turn, sampling=sampling)]
    assert rows(llm.generate(second)) == rows(off.generate(second))
    assert llm.stats.prefix_cache_hits == 32, "of 24 prompt and 11 answer tokens in the cache, eight full blocks"


def test_shared_kv_is_what_a_sequence_would_have_written(tiny_decoder: Callable[..., Decoder]) -> None:
    """In float64, between iterations, for every position of every sequence: copies, chunks and equal prompts."""

    def run(**options: Any) -> tuple[dict[tuple[str, int], torch.Tensor], Loop]:
        sequences = [sequence(str(name), prompt, 8) for name, prompt in enumerate(PROMPTS)]
        loop = Loop(tiny_decoder("gqa"), num_blocks=96, max_num_seqs=3, **options)
        found: dict[tuple[str, int], torch.Tensor] = {}

        def keep(plan: Plan) -> None:
            if between_iterations(plan) and isinstance(plan, Pass):
                for s in loop.running():
                    if s.decodes:
                        found[s.request_id, s.num_cached] = loop.kv(s.block_table, 0, s.num_cached).clone()

        loop.before = keep
        loop.run(sequences)
        return found, loop

    expected, off = run(prefix_cache=False)
    found, on = run(max_num_batched_tokens=9)
    assert found.keys() == expected.keys()
    for key, kv in found.items():
        torch.testing.assert_close(kv, expected[key], rtol=1e-9, atol=1e-9)
    assert off.scheduler.stats.prefix_cache_hits == 0
    assert on.scheduler.stats.prefix_cache_hits > 60
    assert any(plan.copies for plan in on.plans if isinstance(plan, Prefill)), "no shared block was about to be written"


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_nan_is_not_shared(where: str, tiny_model: Callable[[str], Any]) -> None:
    """A prompt that fails, or an answer; then prompts that begin as it did, up to the token that is not finite."""
    decoder = load_decoder(tiny_model("gqa"))
    first = sequence("first", DOCUMENT, 12)
    Loop(decoder).run([first])
    poison = DOCUMENT[9] if where == "prompt" else first.generated[6]
    begin = [*DOCUMENT, *first.generated]
    begin = begin[: begin.index(poison)]
    later = [sequence("later", [*begin, *range(60, 60 + i)], 9) for i in (1, 2, 3)]
    Loop(decoder, prefix_cache=False).run(later)
    decoder.weights.embedding[poison] = float("nan")
    loop = Loop(decoder, num_blocks=16, max_num_batched_tokens=6)
    loop.run([failing := sequence("first", DOCUMENT, 12)])
    assert failing.finish_reason is FinishReason.ERROR
    again = [sequence("later", s.tokens[: s.prompt_tokens], 9) for s in later]
    loop.run(again)
    assert loop.scheduler.stats.prefix_cache_hits > 0
    for s, clean in zip(again, later, strict=True):
        end = clean.generated.index(poison) + 1 if poison in clean.generated else 9
        assert end > 1
        assert s.generated == clean.generated[:end]


def test_cancelled_between_steps(make_llm: MakeLLM) -> None:
    """At every step once: what it got so far is what it would have got, the others notice nothing, blocks come back."""
    options = {"exits": EXITS, "threshold": 0.3, "max_num_batched_tokens": 20, "num_blocks": 40}
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    requests = [Request(str(i), prompt_token_ids=p, sampling=sampling) for i, p in enumerate(PROMPTS)]
    whole = rows(make_llm(**options).generate(requests))
    llm = make_llm(**options)
    for steps in range(0, 30, 5):
        outputs = []
        for request in requests:
            llm.engine.add(request)
        for _ in range(steps):
            outputs += llm.engine.step().finished
        cancelled = llm.engine.cancel("1")
        assert llm.engine.cancel("1") is None
        while llm.engine.has_work:
            outputs += llm.engine.step().finished
        got = rows(outputs)
        if cancelled is None:
            assert got == whole
            continue
        assert (cancelled.finish_reason, cancelled.error) == (FinishReason.ABORT, None)
        assert rows([cancelled])["1"] == whole["1"][: len(cancelled.tokens)]
        assert got == {name: row for name, row in whole.items() if name != "1"}
        llm.engine.scheduler.check()
    assert llm.stats.aborted >= 3
    assert llm.stats.failed == 0
