"""The Scheduler: small schedules worked out by hand; `test_scheduler_random.py` has random ones."""

from __future__ import annotations

from math import nan

import pytest

from eeinfer.core.block_manager import BlockManager
from eeinfer.core.plan import Complete, Draw, Pass, Prefill, Row, Span, Verdict
from eeinfer.core.request import FinishReason
from eeinfer.core.scheduler import Scheduler
from eeinfer.core.sequence import Sequence, Status
from eeinfer.core.strategy import leave_rule
from eeinfer.errors import RequestError

EOS = 0


def sequence(name: str, prompt: int, max_tokens: int, temperature: float = 0.0) -> Sequence:
    return Sequence(name, list(range(100, 100 + prompt)), max_tokens, frozenset({EOS}), temperature=temperature, seed=7)


def scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    ends: tuple[int, ...] = (2, 4),
    *,
    strategy: str = "split",
    sticky: bool = False,
    approximate: bool = True,
    seqs: int = 8,
    budget: int = 64,
    prefix_cache: bool = False,  # most prompts here are alike
) -> Scheduler:
    blocks = BlockManager(num_blocks, block_size, prefix_cache=prefix_cache)
    rule_ = leave_rule(strategy, sticky=sticky)
    return Scheduler(blocks, ends, rule_, approximate=approximate, max_num_seqs=seqs, max_num_batched_tokens=budget)


def went(token: int, confidence: float | None = None, *, ready: bool = False) -> Verdict:
    return Verdict(token=token, confidence=confidence, ready=ready)


STAYS = Verdict(confidence=0.1)
FAILED = Verdict(confidence=nan, failed=True)


def prefilled(s: Scheduler, *sequences: Sequence, token: int = 50) -> None:
    """Add and prefill in one plan; each takes `token` as its first."""
    for one in sequences:
        s.add(one)
    plan = s.next()
    assert isinstance(plan, Prefill)
    assert len(plan.spans) == len(sequences)
    s.commit(plan, tuple(went(token) for _ in plan.spans))


def next_pass(s: Scheduler, stage: int, *sequences: Sequence) -> Pass:
    plan = s.next()
    assert isinstance(plan, Pass)
    assert plan.stage == stage
    assert [row.slot for row in plan.rows] == [one.slot for one in sequences]
    return plan


def decode(s: Scheduler, *sequences: Sequence, token: int = 51) -> None:
    """One iteration at full depth."""
    for stage in range(len(s.stage_ends)):
        plan = next_pass(s, stage, *sequences)
        last = stage == len(s.stage_ends) - 1
        s.commit(plan, tuple(went(token) if last else STAYS for _ in sequences))


# By hand


def test_a_ready_row_leaves_the_others_go_on_then_it_is_completed() -> None:
    s, a, b = scheduler(), sequence("a", 3, 8), sequence("b", 5, 8)
    prefilled(s, a, b)
    plan = next_pass(s, 0, a, b)
    assert plan.rows[0] == Row("a", a.slot, 50, 3, tuple(a.block_table), Draw(), number=1, max_tokens=8)
    assert plan.rows[1].position == 5
    assert s.commit(plan, (went(60, 0.9, ready=True), STAYS)) == [a]
    plan = next_pass(s, 1, b)
    assert s.commit(plan, (went(61),)) == [b]
    done = s.next()
    assert isinstance(done, Complete)
    assert [row.slot for row in done.rows] == [a.slot]
    assert done.stages == (0,)
    assert s.commit(done, ()) == []
    plan = next_pass(s, 0, a, b)
    assert [row.token for row in plan.rows] == [60, 61]
    assert [row.number for row in plan.rows] == [2, 2]
    assert (a.depths, a.confidences) == ([4, 2], [None, 0.9])
    assert (b.depths, b.confidences) == ([4, 4], [None, None])
    assert not s.blocks.is_exact(a.block_table[0])
    assert s.blocks.is_exact(b.block_table[0])


def test_a_row_that_ends_its_sequence_is_not_completed() -> None:
    s, a, b = scheduler(), sequence("a", 3, 8), sequence("b", 3, 2)
    prefilled(s, a, b)
    plan = next_pass(s, 0, a, b)
    s.commit(plan, (went(EOS, 0.9, ready=True), went(60, 0.9, ready=True)))
    assert (a.finish_reason, b.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert s.next() is None
    assert s.blocks.num_free == s.blocks.num_blocks
    assert not s.has_work


def test_long_prompts_are_cut_to_the_budget() -> None:
    s, a, b = scheduler(budget=4), sequence("a", 6, 2), sequence("b", 3, 2)
    s.add(a)
    s.add(b)
    seen = []

    def prefill() -> None:
        plan = s.next()
        assert isinstance(plan, Prefill)
        seen.append([(x.start, x.tokens, x.depths, x.draw) for x in plan.spans])
        s.commit(plan, tuple(Verdict() if x.draw is None else went(50) for x in plan.spans))

    prefill()
    prefill()
    decode(s, a)
    prefill()
    assert seen == [
        [(0, (100, 101, 102, 103), (4,) * 4, None)],
        [(4, (104, 105), (4,) * 2, Draw()), (0, (100, 101), (4,) * 2, None)],
        [(2, (102,), (4,), Draw())],
    ]
    assert (a.generated, b.generated) == ([50, 51], [50])


def test_a_prefill_of_at_most_one_budget_and_an_iteration_take_turns() -> None:
    s, a, b, c = scheduler(budget=4), sequence("a", 3, 9), sequence("b", 9, 5), sequence("c", 4, 5)
    prefilled(s, a)
    decode(s, a)
    s.add(b)
    s.add(c)
    spans = []
    for decoding in ([a], [a], [a, b], [a, b, c]):
        plan = s.next()
        assert isinstance(plan, Prefill)
        spans.append([(x.slot, len(x.tokens)) for x in plan.spans])
        s.commit(plan, tuple(Verdict() if x.draw is None else went(50) for x in plan.spans))
        decode(s, *decoding)
    assert spans == [[(1, 4)], [(1, 4)], [(1, 1), (2, 3)], [(2, 1)]]
    decode(s, a, b, c)


def test_out_of_blocks_the_newest_gives_way_and_is_replayed_at_its_recorded_depths() -> None:
    s, a, b = scheduler(num_blocks=5, block_size=2), sequence("a", 3, 6), sequence("b", 3, 4)
    prefilled(s, a, b)
    plan = next_pass(s, 0, a, b)
    s.commit(plan, (STAYS, went(60, 0.9, ready=True)))
    s.commit(next_pass(s, 1, a), (went(61),))
    done = s.next()
    assert isinstance(done, Complete)
    s.commit(done, ())
    next_pass(s, 0, a)  # a's fifth token took the last free block; b's had to give way
    assert b.status is Status.WAITING
    assert (b.block_table, b.num_cached, b.slot) == ([], 0, -1)
    assert s.stats.preemptions == 1
    s.finish(a, FinishReason.STOP)
    replay = s.next()
    assert replay == Prefill((Span(b.slot, (100, 101, 102, 50), 0, tuple(b.block_table), (4, 4, 4, 2), None),))
    assert s.commit(replay, (Verdict(),)) == []
    assert [s.blocks.is_exact(block) for block in b.block_table] == [True, False]
    assert next_pass(s, 0, b).rows[0].token == 60
    assert b.generated == [50, 60]


def test_with_exact_completion_a_replay_runs_at_full_depth() -> None:
    s, a, b = scheduler(5, 2, approximate=False), sequence("a", 3, 6), sequence("b", 3, 4)
    prefilled(s, a, b)
    s.commit(next_pass(s, 0, a, b), (went(60, 0.9, ready=True), went(60, 0.9, ready=True)))
    done = s.next()
    assert isinstance(done, Complete)
    s.commit(done, ())
    next_pass(s, 0, a)
    s.finish(a, FinishReason.STOP)
    plan = s.next()
    assert isinstance(plan, Prefill)
    assert plan.spans[0].depths == (4, 4, 4, 4)
    assert all(s.blocks.is_exact(block) for block in b.block_table)


def test_a_request_that_can_never_fit_is_refused_alone() -> None:
    s = scheduler(num_blocks=2, block_size=4)
    with pytest.raises(RequestError, match=r"needs 3 KV blocks \(6 prompt \+ up to 4 new tokens.*has 2"):
        s.add(sequence("large", 6, 4))  # the last token is never run: 9 in the cache
    fits = sequence("fits", 6, 3)
    prefilled(s, fits)
    decode(s, fits)
    decode(s, fits)
    assert fits.finish_reason is FinishReason.LENGTH
    assert s.stats.preemptions == 0


def test_nothing_overtakes_a_request_that_waits_for_blocks() -> None:
    s, a, large, small = scheduler(6, 2), sequence("a", 4, 2), sequence("large", 8, 2), sequence("small", 1, 2)
    for one in (a, large, small):
        s.add(one)
    plan = s.next()
    assert isinstance(plan, Prefill)
    assert len(plan.spans) == 1
    s.commit(plan, (went(50),))
    next_pass(s, 0, a)
    assert (large.status, small.status) == (Status.WAITING, Status.WAITING)


@pytest.mark.parametrize(("num_blocks", "admitted"), [(4, 1), (5, 2)])
def test_admission_keeps_one_block_back_for_each_running_sequence(num_blocks: int, admitted: int) -> None:
    s = scheduler(num_blocks, 2)
    s.add(sequence("a", 4, 1))
    s.add(sequence("b", 4, 1))
    plan = s.next()
    assert isinstance(plan, Prefill)
    assert len(plan.spans) == admitted


def test_no_more_sequences_than_slots() -> None:
    s, a, b = scheduler(seqs=1), sequence("a", 2, 1), sequence("b", 2, 1)
    s.add(a)
    s.add(b)
    for one in (a, b):
        plan = s.next()
        assert isinstance(plan, Prefill)
        assert [x.slot for x in plan.spans] == [0]
        assert s.commit(plan, (went(50),)) == [one]
        assert one.finish_reason is FinishReason.LENGTH
    assert s.next() is None


def test_newcomers_join_between_iterations_only() -> None:
    s, a, b = scheduler(), sequence("a", 3, 4), sequence("b", 3, 4)
    prefilled(s, a)
    plan = next_pass(s, 0, a)
    s.add(b)
    s.commit(plan, (STAYS,))
    s.commit(next_pass(s, 1, a), (went(51),))
    joined = s.next()
    assert isinstance(joined, Prefill)
    s.commit(joined, (went(50),))
    next_pass(s, 0, a, b)


def test_deeper_rows_run_first_and_flags_follow_their_rows() -> None:
    s = scheduler(ends=(1, 2, 3), strategy="all-exit", sticky=True)
    a, b = sequence("a", 2, 4), sequence("b", 2, 4)
    prefilled(s, a, b)
    plan = next_pass(s, 0, a, b)
    assert plan.flagged == (False, False)
    s.commit(plan, (Verdict(confidence=0.9, ready=True), STAYS))
    plan = next_pass(s, 1, a, b)
    assert plan.flagged == (True, False)
    s.commit(plan, (went(60, 0.4), went(61, 0.9, ready=True)))
    assert s.stats.involuntary_stays == 1
    done = s.next()
    assert isinstance(done, Complete)
    assert done.stages == (1, 1)
    s.commit(done, ())
    assert next_pass(s, 0, a, b).flagged == (False, False)


def test_ended_in_the_middle_of_an_iteration() -> None:
    s, a, b, c = scheduler(), sequence("a", 3, 4), sequence("b", 3, 4), sequence("c", 3, 4)
    prefilled(s, a, b, c)
    s.commit(next_pass(s, 0, a, b, c), (went(60, 0.9, ready=True), STAYS, STAYS))
    s.finish(b, FinishReason.STOP)
    s.finish(a, FinishReason.STOP)
    s.finish(a, FinishReason.ERROR, "ignored: it has ended")
    assert (a.finish_reason, a.error) == (FinishReason.STOP, None)
    s.commit(next_pass(s, 1, c), (went(61),))
    next_pass(s, 0, c)
    s.check()


@pytest.mark.parametrize("plans", range(5))
def test_a_plan_that_was_never_carried_out(plans: int) -> None:
    """After an interrupt everything is ended between a plan and its outcome; newcomers must not notice."""
    s, a, b = scheduler(), sequence("a", 3, 4), sequence("b", 3, 4)
    s.add(a)
    s.add(b)
    for _ in range(plans):
        plan = s.next()
        match plan:
            case Pass(stage=0):
                s.commit(plan, (went(60, 0.9, ready=True), STAYS))
            case Pass() | Prefill():
                s.commit(plan, tuple(went(50) for _ in (plan.rows if isinstance(plan, Pass) else plan.spans)))
            case Complete():
                s.commit(plan, ())
    assert s.next() is not None
    s.finish(a, FinishReason.ERROR, "aborted")
    s.finish(b, FinishReason.ERROR, "aborted")
    assert s.next() is None
    c = sequence("c", 5, 3)
    prefilled(s, c)
    decode(s, c)
    decode(s, c)
    assert (c.generated, c.depths) == ([50, 51, 51], [4, 4, 4])
    assert s.next() is None
    assert s.blocks.num_free == s.blocks.num_blocks


def test_ended_while_waiting() -> None:
    s, a, b = scheduler(seqs=1), sequence("a", 3, 4), sequence("b", 3, 4)
    prefilled(s, a)
    s.add(b)
    s.finish(b, FinishReason.ERROR, "cancelled")
    assert (b.status, b.finish_reason, b.error) == (Status.FINISHED, FinishReason.ERROR, "cancelled")
    assert list(s.live) == [a]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_failed_row_ends_its_sequence_only(stage: int) -> None:
    s, a, b = scheduler(), sequence("a", 3, 4), sequence("b", 3, 4)
    prefilled(s, a, b)
    if stage:
        s.commit(next_pass(s, 0, a, b), (STAYS, STAYS))
    touched = s.commit(next_pass(s, stage, a, b), (FAILED, went(61, ready=True)))
    assert touched == [a, b]
    assert (a.finish_reason, a.generated, a.depths) == (FinishReason.ERROR, [50], [4])
    assert a.error is not None
    assert "not finite" in a.error
    assert f"{s.stage_ends[stage]} layers" in a.error
    assert b.generated == [50, 61]
    assert s.stats.involuntary_exits == 0
    s.check()


def test_a_failed_prompt_ends_its_sequence_only() -> None:
    s, a, b = scheduler(), sequence("a", 3, 4), sequence("b", 3, 4)
    s.add(a)
    s.add(b)
    plan = s.next()
    assert plan is not None
    assert s.commit(plan, (Verdict(failed=True), went(50))) == [a, b]
    assert (a.finish_reason, a.generated) == (FinishReason.ERROR, [])
    next_pass(s, 0, b)


# Prefix cache


def finished(s: Scheduler, *prompts: list[int]) -> None:
    """Each prompt answered with one token, so that its full blocks are cached."""
    for prompt in prompts:
        prefilled(s, Sequence("past", list(prompt), 1, frozenset()))


def spans_of(s: Scheduler, *sequences: Sequence) -> Prefill:
    for one in sequences:
        s.add(one)
    plan = s.next()
    assert isinstance(plan, Prefill)
    return plan


def test_a_cached_prefix_is_shared_and_only_the_rest_runs() -> None:
    s, a = scheduler(prefix_cache=True), sequence("a", 11, 4)
    finished(s, [*range(100, 110), 7])
    plan = spans_of(s, a)
    assert [(x.start, x.tokens) for x in plan.spans] == [(8, (108, 109, 110))]
    assert plan.copies == ()
    assert (s.stats.prefix_cache_queries, s.stats.prefix_cache_hits) == (11 + 11, 8)
    b = sequence("b", 11, 4)
    s.commit(plan, (went(50),))
    s.add(b)
    decode(s, a)
    plan = s.next()
    assert isinstance(plan, Prefill)
    assert [x.start for x in plan.spans] == [8]
    assert b.block_table[:2] == a.block_table[:2]
    assert b.block_table[2] != a.block_table[2]


@pytest.mark.parametrize("held", [False, True])
def test_a_wholly_cached_prompt_computes_its_last_token_in_a_block_of_its_own(held: bool) -> None:
    s, a, b = scheduler(prefix_cache=True), sequence("a", 8, 4), sequence("b", 8, 4)
    if held:
        prefilled(s, a)
        decode(s, a)
    else:
        finished(s, a.tokens)
    plan = spans_of(s, b)
    assert [(x.start, x.tokens, x.draw) for x in plan.spans] == [(7, (107,), Draw())]
    assert plan.copies == (((a.block_table[1], b.block_table[1]),) if held else ())
    assert s.stats.prefix_cache_hits == 7
    s.commit(plan, (went(50),))
    assert (b.generated, b.num_cached) == ([50], 8)
    s.check()


def test_a_copy_counts_at_admission() -> None:
    s, a, b = scheduler(num_blocks=4, block_size=4, prefix_cache=True), sequence("a", 8, 4), sequence("b", 8, 4)
    prefilled(s, a)
    decode(s, a)  # three blocks; one is free, and kept back
    s.add(b)
    decode(s, a)
    assert b.status is Status.WAITING


def test_equal_prompts_in_one_plan_are_computed_once() -> None:
    s, sequences = scheduler(prefix_cache=True), [sequence(name, 9, 2) for name in "abc"]
    plan = spans_of(s, *sequences, short := sequence("short", 8, 2))
    assert [(x.start, len(x.tokens)) for x in plan.spans] == [(0, 9), (8, 1), (8, 1), (4, 4)]
    s.commit(plan, tuple(went(50) for _ in plan.spans))
    decode(s, *sequences, short)
    assert s.next() is None
    finished(s, [*range(100, 108), 3])
    assert s.stats.prefix_cache_hits == 8 + 8 + 4 + 8


def test_a_chunked_prompt_can_be_shared_before_it_is_through() -> None:
    s, a, b = scheduler(budget=7, prefix_cache=True), sequence("a", 12, 2), sequence("b", 12, 2)
    plan = spans_of(s, a, b)
    assert [(x.start, len(x.tokens)) for x in plan.spans] == [(0, 7)]
    s.commit(plan, (Verdict(),))
    plan = s.next()
    assert isinstance(plan, Prefill)
    assert [(x.start, len(x.tokens)) for x in plan.spans] == [(7, 5), (8, 2)], "all but b's last block"
    assert b.block_table[:2] == a.block_table[:2]


def test_answers_are_shared_as_far_as_they_are_exact() -> None:
    s, a, b = scheduler(prefix_cache=True), sequence("a", 4, 9), sequence("b", 4, 9)
    prefilled(s, a, b, token=50)
    for _ in range(7):
        s.commit(next_pass(s, 0, a, b), (STAYS, went(51, 0.9, ready=True)))
        s.commit(next_pass(s, 1, a), (went(52),))
        s.commit(s.next() or Complete((), ()), ())
    s.finish(a, FinishReason.STOP)
    s.finish(b, FinishReason.STOP)
    ahead = [*range(100, 104), 50]
    deep = Sequence("deep", [*ahead, *[52] * 8], 2, frozenset())
    shallow = Sequence("shallow", [*ahead, *[51] * 8], 2, frozenset())
    assert [x.start for x in spans_of(s, deep, shallow).spans] == [8, 4], "a's last token may lack its completion"


def test_a_replay_finds_its_prompt_but_nothing_behind_its_first_exit() -> None:
    s, a, b = scheduler(num_blocks=7, block_size=2, prefix_cache=True), sequence("a", 3, 8), sequence("b", 4, 6)
    b.tokens[0] = 7
    prefilled(s, a, b)
    decode(s, a, b)
    s.commit(next_pass(s, 0, a, b), (STAYS, went(60, 0.9, ready=True)))
    s.commit(next_pass(s, 1, a), (went(61),))
    s.commit(s.next() or Complete((), ()), ())
    decode(s, a, b)
    decode(s, a)
    assert (b.status, b.depths) == (Status.WAITING, [4, 4, 2, 4])
    s.finish(a, FinishReason.STOP)
    plan = s.next()
    assert isinstance(plan, Prefill)
    assert [(x.start, x.depths, x.draw) for x in plan.spans] == [(4, (4, 2, 4), None)]


def test_what_is_not_known_to_be_finite_is_not_cached() -> None:
    s, a, b, c = (scheduler(budget=9, prefix_cache=True), *(sequence(name, 12, 4) for name in "abc"))
    for one, token in ((a, 1), (b, 2), (c, 3)):
        one.tokens[0] = token
    s.commit(spans_of(s, a), (Verdict(),))
    s.finish(a, FinishReason.ABORT)  # in the middle of its prompt
    s.commit(spans_of(s, b), (Verdict(),))
    s.commit(s.next() or Complete((), ()), (FAILED,))
    assert b.finish_reason is FinishReason.ERROR
    s.commit(spans_of(s, c), (Verdict(),))
    s.commit(s.next() or Complete((), ()), (went(50),))
    for _ in range(2):
        decode(s, c)
    s.commit(next_pass(s, 0, c), (FAILED,))
    assert [x.start for x in spans_of(s, sequence("d", 5, 1), *(again(one) for one in (a, b))).spans] == [0, 0]
    s.check()


def again(one: Sequence) -> Sequence:
    """A new request with the same prompt."""
    return Sequence("again", one.tokens[: one.prompt_tokens], 4, frozenset())


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    s = scheduler(num_blocks=6, block_size=2, prefix_cache=True)
    old, new = [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]
    finished(s, old, new)  # two cached blocks each
    finished(s, old)  # used again
    finished(s, [3, 3, 3, 3, 3])  # takes a block that is free, one that was never cached, and evicts one
    assert s.blocks.evictions == 1
    hits = s.stats.prefix_cache_hits
    finished(s, old)
    assert s.stats.prefix_cache_hits == hits + 4
    finished(s, new)
    assert s.stats.prefix_cache_hits == hits + 4 + 2


def test_an_empty_scheduler_has_nothing_to_do() -> None:
    s = scheduler()
    assert s.next() is None
    assert not s.has_work
    s.check()


# One Sequence


def test_which_depth_made_which_kv() -> None:
    one = sequence("a", 2, 5)
    for token, depth in ((10, 9), (11, 3), (12, 6)):
        one.append(token, depth, None)
    assert one.prefill_target == 4
    assert [one.depth_at(p, 9) for p in range(4)] == [9, 9, 3, 6]
    assert (one.generated, one.most_cached, one.finish_reason) == ([10, 11, 12], 6, None)


@pytest.mark.parametrize(("token", "reason"), [(EOS, FinishReason.STOP), (5, FinishReason.LENGTH)])
def test_the_last_token_says_why(token: int, reason: FinishReason) -> None:
    one = sequence("a", 2, 1)
    one.append(token, 4, None)
    assert one.finish_reason is reason


def test_draws_depend_on_seed_and_length_alone() -> None:
    one, other = sequence("a", 2, 200, temperature=0.7), sequence("b", 9, 200, temperature=0.7)
    draws = []
    for token in range(200):
        assert one.draw() == one.draw() == other.draw()
        draws.append(one.draw().seed)
        one.append(token + 1, 4, None)
        other.append(token + 5, 2, 0.5)
    assert len(set(draws)) == 200
    assert all(0 <= seed < 2**63 for seed in draws)
    one.seed = 8
    assert one.draw() != other.draw()
    assert sequence("c", 2, 5).draw() == Draw(0.0, 0)
