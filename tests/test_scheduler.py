"""The Scheduler: small schedules worked out by hand, and random use against a model of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan, nan
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from eeinfer.core.block_manager import BlockManager
from eeinfer.core.plan import Complete, Draw, Outcome, Pass, Plan, Prefill, Row, Span, Verdict
from eeinfer.core.request import FinishReason
from eeinfer.core.scheduler import Scheduler
from eeinfer.core.sequence import Sequence, Status
from eeinfer.core.strategy import leave_rule
from eeinfer.errors import RequestError

EOS = 0
STRATEGIES = ("full", "all-exit", "split", "any", "majority", "mean")


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
) -> Scheduler:
    blocks = BlockManager(num_blocks, block_size)
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
    for _ in range(3):
        plan = s.next()
        assert isinstance(plan, Prefill)
        seen.append([(x.start, x.tokens, x.depths, x.draw) for x in plan.spans])
        s.commit(plan, tuple(Verdict() if x.draw is None else went(50) for x in plan.spans))
    assert seen == [
        [(0, (100, 101, 102, 103), (4,) * 4, None)],
        [(4, (104, 105), (4,) * 2, Draw()), (0, (100, 101), (4,) * 2, None)],
        [(2, (102,), (4,), Draw())],
    ]
    assert a.generated == b.generated == [50]
    next_pass(s, 0, a, b)


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


# Random use


@dataclass
class Cell:
    """What one KV slot holds: whose token, run how deep, and whether all layers are filled."""

    owner: Sequence
    position: int
    token: int
    depth: int
    complete: bool


@dataclass
class Expected:
    """What a sequence must have got, as the runner handed it out."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    confidences: list[float | None] = field(default_factory=list)
    ended: int = 0
    ready: bool = False  # at an earlier exit of this iteration
    stage: int = -1  # ran last in this iteration


class World:
    """A runner without tensors: it keeps the cache as cells, checks every plan against it, and answers at random."""

    def __init__(self, s: Scheduler, block_size: int, threshold: float, random: Random) -> None:
        self.s, self.block_size, self.threshold, self.random = s, block_size, threshold, random
        self.cache: dict[tuple[int, int], Cell] = {}
        self.arrived: dict[Sequence, Expected] = {}
        self.exits = self.stays = 0
        self.next_token = 1000

    def token(self) -> int:
        self.next_token += 1
        return EOS if self.random.random() < 0.02 else self.next_token

    def step(self) -> bool:
        plan = self.s.next()
        self.s.check()
        if plan is None:
            assert not self.s.has_work
            return False
        frozen = repr(plan)
        before = (self.exits, self.stays)
        outcome = self.run(plan)
        touched = self.s.commit(plan, outcome)
        assert repr(plan) == frozen
        self.after(plan, touched, before)
        return True

    def run(self, plan: Plan) -> Outcome:
        owners = {one.slot: one for one in self.s.live if one.slot >= 0}
        match plan:
            case Prefill(spans):
                assert spans
                assert sum(len(x.tokens) for x in spans) <= self.s._max_num_batched_tokens
                assert len({x.slot for x in spans}) == len(spans)
                return tuple(self.run_span(x, owners[x.slot]) for x in spans)
            case Pass():
                assert plan.rows
                assert len({r.slot for r in plan.rows}) == len(plan.rows)
                if plan.stage == 0:
                    self.check_start(plan, owners)
                return self.run_pass(plan, [owners[r.slot] for r in plan.rows])
            case Complete(rows, stages):
                assert rows
                for row, stage in zip(rows, stages, strict=True):
                    self.complete(row, stage, owners[row.slot])
                return ()

    def check_start(self, plan: Pass, owners: dict[int, Sequence]) -> None:
        """A new iteration takes everybody in flight, among them the oldest there is."""
        assert {r.slot for r in plan.rows} == set(owners)
        oldest = next(one for one in self.arrived if one.status is not Status.FINISHED)
        assert oldest.slot in owners
        for expected in self.arrived.values():
            expected.stage, expected.ready = -1, False

    def place(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        assert position // self.block_size < len(table), "the block table is too small for the plan"
        return table[position // self.block_size], position % self.block_size

    def check_context(self, one: Sequence, table: tuple[int, ...], end: int) -> None:
        full = self.s.stage_ends[-1]
        for p in range(end):
            cell = self.cache[self.place(table, p)]
            depth = one.depth_at(p, full) if self.s._approximate else cell.depth
            assert cell == Cell(one, p, one.tokens[p], depth, complete=True)

    def run_span(self, span: Span, one: Sequence) -> Verdict:
        assert span.tokens
        stop = span.start + len(span.tokens)
        assert span.tokens == tuple(one.tokens[span.start : stop])
        full, replay = self.s.stage_ends[-1], bool(one.depths)
        self.check_context(one, span.block_table, span.start)
        for p in range(span.start, stop):
            depth = one.depth_at(p, full) if self.s._approximate else full
            assert span.depths[p - span.start] == depth
            place = self.place(span.block_table, p)
            self.cache[place] = Cell(one, p, one.tokens[p], depth, complete=True)
        assert (span.draw is not None) == (not replay and stop == one.prompt_tokens)
        if span.draw is None:
            return Verdict()
        assert span.draw == one.draw()
        return self.verdict_at_full_depth(one)

    def verdict_at_full_depth(self, one: Sequence) -> Verdict:
        if self.random.random() < 0.01:
            self.arrived[one].ended += 1
            return Verdict(failed=True)
        return self.take(one, went(self.token()), self.s.stage_ends[-1])

    def take(self, one: Sequence, verdict: Verdict, depth: int) -> Verdict:
        expected = self.arrived[one]
        assert verdict.token is not None
        expected.tokens.append(verdict.token)
        expected.depths.append(depth)
        expected.confidences.append(verdict.confidence)
        expected.ended += verdict.token == EOS or len(expected.tokens) == one.max_tokens
        return verdict

    def run_pass(self, plan: Pass, owners: list[Sequence]) -> Outcome:
        for row, one in zip(plan.rows, owners, strict=True):
            expected = self.arrived[one]
            assert (row.token, row.position, row.draw) == (one.tokens[-1], len(one.tokens) - 1, one.draw())
            assert (row.number, row.max_tokens) == (len(expected.tokens), one.max_tokens)
            assert expected.stage == plan.stage - 1
            expected.stage = plan.stage
            self.check_context(one, row.block_table, row.position)
            depth = self.s.stage_ends[plan.stage]
            last = plan.stage == len(self.s.stage_ends) - 1
            self.cache[self.place(row.block_table, row.position)] = Cell(
                one, row.position, row.token, depth, complete=last
            )
        assert plan.flagged == tuple(self.arrived[one].ready for one in owners)
        if plan.stage == len(self.s.stage_ends) - 1:
            return tuple(self.verdict_at_full_depth(one) for one in owners)
        return self.check_exit(plan, owners)

    def check_exit(self, plan: Pass, owners: list[Sequence]) -> Outcome:
        confidences = [self.random.choice([0.1, 0.3, 0.4, 0.5, 0.6, 1.0]) for _ in owners]
        confidences = [nan if self.random.random() < 0.01 else c for c in confidences]
        leaving = plan.rule.leaving(confidences, [self.threshold] * len(owners), plan.flagged)
        verdicts = []
        for one, c, leaves in zip(owners, confidences, leaving, strict=True):
            ready = c >= self.threshold
            verdict = Verdict(self.token() if leaves else None, c, ready, isnan(c))
            verdicts.append(verdict)
            if verdict.failed:
                self.arrived[one].ended += 1
            elif leaves:
                self.take(one, verdict, self.s.stage_ends[plan.stage])
                self.exits += not ready
            else:
                self.stays += ready
                self.arrived[one].ready |= ready
        return tuple(verdicts)

    def complete(self, row: Row, stage: int, one: Sequence) -> None:
        cell = self.cache[self.place(row.block_table, row.position)]
        assert cell == Cell(one, row.position, row.token, self.s.stage_ends[stage], complete=False)
        cell.complete = True
        assert one.tokens[row.position + 1] == self.arrived[one].tokens[-1]

    def after(self, plan: Plan, touched: list[Sequence], before: tuple[int, int]) -> None:
        self.s.check()
        assert (self.s.stats.involuntary_exits, self.s.stats.involuntary_stays) == (self.exits, self.stays)
        assert before == (self.exits, self.stays) or isinstance(plan, Pass)
        assert len(set(touched)) == len(touched)
        live = [one for one in self.arrived if one.status is not Status.FINISHED]
        for one in {*live, *touched}:
            expected = self.arrived[one]
            assert one.generated == expected.tokens
            assert one.depths == expected.depths
            assert one.confidences == expected.confidences
            assert expected.ended <= 1
            assert (one.status is Status.FINISHED) == bool(expected.ended)
            assert (one.finish_reason is None) == (not expected.ended)
            if one.status is Status.RUNNING:
                self.check_exact(one)
            else:
                assert (one.block_table, one.slot) == ([], -1)
        waits = [one.status is Status.WAITING for one in live]
        assert waits == sorted(waits), "a newer sequence runs while an older one waits"

    def check_exact(self, one: Sequence) -> None:
        full, size = self.s.stage_ends[-1], self.block_size
        shallow = [p for p in range(one.num_cached) if self.s._approximate and one.depth_at(p, full) < full]
        expected = [not shallow or shallow[0] >= (i + 1) * size for i in range(len(one.block_table))]
        assert [self.s.blocks.is_exact(block) for block in one.block_table] == expected


class RandomUse(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 16),
        block_size=st.integers(1, 3),
        exits=st.integers(1, 3),
        strategy=st.sampled_from(STRATEGIES),
        sticky=st.booleans(),
        approximate=st.booleans(),
        seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        threshold=st.sampled_from([0.35, 0.55, 0.95]),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        exits: int,
        strategy: str,
        sticky: bool,
        approximate: bool,
        seqs: int,
        budget: int,
        threshold: float,
        seed: int,
    ) -> None:
        ends = tuple(range(2, 2 * exits + 3, 2)) if strategy != "full" else (8,)
        s = scheduler(
            num_blocks,
            block_size,
            ends,
            strategy=strategy,
            sticky=sticky,
            approximate=approximate,
            seqs=seqs,
            budget=budget,
        )
        self.world = World(s, block_size, threshold, Random(seed))  # noqa: S311 - not for secrets
        self.count = 0

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 16)), min_size=1, max_size=5),
        temperature=st.sampled_from([0.0, 0.8]),
    )
    def add(self, sizes: list[tuple[int, int]], temperature: float) -> None:
        for prompt, max_tokens in sizes:
            self.add_one(prompt, max_tokens, temperature)

    def add_one(self, prompt: int, max_tokens: int, temperature: float) -> None:
        one = sequence(f"s{self.count}", prompt, max_tokens, temperature)
        self.count += 1
        blocks = self.world.s.blocks
        if -(-(prompt + max_tokens - 1) // blocks.block_size) > blocks.num_blocks:
            with pytest.raises(RequestError):
                self.world.s.add(one)
        else:
            self.world.s.add(one)
            self.world.arrived[one] = Expected()

    @precondition(lambda self: self.world.s.has_work)
    @rule(plans=st.integers(1, 20))
    def run(self, plans: int) -> None:
        for _ in range(plans):
            self.world.step()

    @precondition(lambda self: any(one.status is not Status.FINISHED for one in self.world.arrived))
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        live = [one for one in self.world.arrived if one.status is not Status.FINISHED]
        one = data.draw(st.sampled_from(range(len(live))).map(live.__getitem__))
        self.world.s.finish(one, FinishReason.STOP)
        self.world.arrived[one].ended += 1
        self.world.s.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world, limit = self.world, 5000
        while world.step():
            limit -= 1
            assert limit, "no progress"
        assert all(expected.ended == 1 for expected in world.arrived.values())
        assert world.s.blocks.num_free == world.s.blocks.num_blocks
        world.s.check()


TestRandomUse = RandomUse.TestCase
TestRandomUse.settings = settings(
    max_examples=100,
    stateful_step_count=20,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
