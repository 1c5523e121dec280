"""The Scheduler: which sequences run, which stage runs next on which rows, and what becomes of them.

Continuous batching at the granularity of iterations (Orca, OSDI '22): sequences join and leave between iterations. An
iteration moves every sequence that decodes by one token. It starts with stage 0 on all rows; rows that do not leave at
an exit queue for the next stage; when no queue holds a row, the rows that left early are completed, and the iteration
ends.

Long prompts are prefilled in chunks (Sarathi-Serve, OSDI '24), in plans of their own: a Prefill of at most one budget
of tokens and an iteration take turns, so that decoding never waits for more than one budget and nobody waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from eeinfer.core.block_manager import BlockManager
from eeinfer.core.plan import Complete, Outcome, Pass, Plan, Prefill, Row, Span, Verdict
from eeinfer.core.prefill import PrefillDraft
from eeinfer.core.request import FinishReason
from eeinfer.core.sequence import Sequence, Status
from eeinfer.core.strategy import LeaveRule
from eeinfer.errors import RequestError


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was built.

    Attributes:
        involuntary_exits: rows made to leave below their threshold.
        involuntary_stays: times a row was kept at an exit although ready.
        preemptions: times a sequence lost its blocks and had to be replayed.
        prefix_cache_queries: tokens that were looked for in the prefix cache, of prompts and of replays.
        prefix_cache_hits: those of them whose KV was there.
    """

    involuntary_exits: int = 0
    involuntary_stays: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass(slots=True)
class _Flight:
    """A row in flight, with its sequence. `flagged`: it was ready at an earlier exit of this iteration."""

    sequence: Sequence
    row: Row
    flagged: bool = False


class Scheduler:
    """Decides what runs next; holds every live sequence.

    Args:
        blocks: the KV blocks.
        stage_ends: layers executed at the end of each stage; the last entry is the model's depth.
        rule: who leaves.
        approximate: completion leaves KV that differs from a full-depth pass (all but `oracle`).
        max_num_seqs: most sequences in flight.
        max_num_batched_tokens: most tokens in one Prefill.
    """

    def __init__(
        self,
        blocks: BlockManager,
        stage_ends: tuple[int, ...],
        rule: LeaveRule,
        *,
        approximate: bool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.blocks = blocks
        self.stage_ends = stage_ends
        self.stats = SchedulerStats()
        self._rule = rule
        self._approximate = approximate
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._by_slot: list[Sequence | None] = [None] * max_num_seqs
        self._queues: list[list[_Flight]] = [[] for _ in stage_ends]
        self._left: list[tuple[_Flight, int]] = []  # rows to complete, with the last stage they ran
        self._prefilled = False  # by the last plan: it is the turn of those that decode

    @property
    def live(self) -> Iterable[Sequence]:
        """Sequences that are not finished."""
        return (*self._running, *self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `next` would return a plan."""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: it could never fit the cache, even alone.
        """
        needed = self.blocks.blocks_for(sequence.most_cached)
        if needed > self.blocks.num_blocks:
            raise RequestError(
                f"needs {needed} KV blocks ({sequence.prompt_tokens} prompt + up to {sequence.max_tokens} new tokens, "
                f"{self.blocks.block_size} a block), the cache has {self.blocks.num_blocks}: shorten the prompt, lower "
                f"max_tokens, or raise cache.num_blocks or cache.memory_fraction"
            )
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence now, wherever it is between two plans, and free what it holds."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            self._vacate(sequence, keep=reason is not FinishReason.ERROR)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.error = reason, error

    def next(self) -> Plan | None:
        """The next plan, or None when there is nothing to do."""
        for stage in reversed(range(len(self.stage_ends))):
            if flights := [f for f in self._queues[stage] if f.sequence.status is Status.RUNNING]:
                return self._pass(stage, flights)
        if left := [(f, stage) for f, stage in self._left if f.sequence.status is Status.RUNNING]:
            return Complete(tuple(f.row for f, _ in left), tuple(stage for _, stage in left))
        turn, self._prefilled = self._prefilled, False
        if turn and (flights := self._begin_iteration()):
            return self._pass(0, flights)
        if prefill := self._plan_prefill():
            self._prefilled = True
            return prefill
        if flights := self._begin_iteration():
            return self._pass(0, flights)
        return None

    def commit(self, plan: Plan, outcome: Outcome) -> list[Sequence]:
        """Take in what the runner did. Returns the sequences that gained a token or ended."""
        match plan:
            case Prefill(spans):
                return self._commit_prefill(spans, outcome)
            case Pass():
                return self._commit_pass(plan, outcome)
            case Complete():
                self._left.clear()
                return []

    def check(self) -> None:
        """Assert that no block leaked and that every slot belongs to one running sequence."""
        self.blocks.check([s.block_table for s in self.live])
        seated = [s for s in self._by_slot if s is not None]
        assert seated == sorted(self._running, key=lambda s: s.slot), "a slot leaked"

    # Passes

    def _pass(self, stage: int, flights: list[_Flight]) -> Pass:
        self._queues[stage] = flights
        return Pass(stage, tuple(f.row for f in flights), self._rule, tuple(f.flagged for f in flights))

    def _begin_iteration(self) -> list[_Flight]:
        flights = []
        for sequence in list(self._running):
            if sequence.status is Status.RUNNING and sequence.decodes and self._make_room(sequence):
                row = Row(
                    request_id=sequence.request_id,
                    slot=sequence.slot,
                    token=sequence.tokens[-1],
                    position=sequence.num_cached,
                    block_table=tuple(sequence.block_table),
                    draw=sequence.draw(),
                    number=len(sequence.depths),
                    max_tokens=sequence.max_tokens,
                )
                flights.append(_Flight(sequence, row))
        return flights

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for one more token, taken from the newest sequences if need be; False if it had to give way itself."""
        while not self.blocks.grow(sequence.block_table, sequence.num_cached + 1):
            newest = self._running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _commit_pass(self, plan: Pass, outcome: Outcome) -> list[Sequence]:
        flights, self._queues[plan.stage] = self._queues[plan.stage], []
        last = plan.stage == len(self.stage_ends) - 1
        touched = []
        for flight, verdict in zip(flights, outcome, strict=True):
            if verdict.failed or verdict.leaves:
                touched.append(flight.sequence)
                self._leave(flight, verdict, plan.stage, early=not last)
            else:
                self.stats.involuntary_stays += verdict.ready
                flight.flagged |= verdict.ready
                self._queues[plan.stage + 1].append(flight)
        return touched

    def _leave(self, flight: _Flight, verdict: Verdict, stage: int, *, early: bool) -> None:
        sequence = flight.sequence
        if early and not verdict.failed:
            self.stats.involuntary_exits += not verdict.ready
            if self._approximate:
                self.blocks.mark_inexact(sequence.block_table, flight.row.position)
        sequence.num_cached += 1
        self._take_token(sequence, verdict, self.stage_ends[stage])
        if early and sequence.status is Status.RUNNING:
            self._left.append((flight, stage))

    def _take_token(self, sequence: Sequence, verdict: Verdict, depth: int) -> None:
        if verdict.failed:
            self.finish(
                sequence, FinishReason.ERROR, f"the model's output is not finite (NaN or infinite) after {depth} layers"
            )
            return
        assert verdict.token is not None, "a row that leaves has its token"
        sequence.append(verdict.token, depth, verdict.confidence, verdict.logprobs)
        if sequence.finish_reason is not None:
            self.finish(sequence, sequence.finish_reason)

    # Prefill

    def _plan_prefill(self) -> Prefill | None:
        draft = PrefillDraft(
            self.blocks, self._max_num_batched_tokens, self.stage_ends[-1], approximate=self._approximate
        )
        for sequence in self._running:
            if draft.budget and not sequence.decodes:
                draft.add(sequence)
        while draft.budget and self._waiting and self._admit(self._waiting[0], draft):
            draft.add(self._running[-1])
        return draft.plan()

    def _admit(self, sequence: Sequence, draft: PrefillDraft) -> bool:
        """Give a waiting sequence a slot and blocks, keeping back one free block for each running sequence."""
        if None not in self._by_slot:
            return False
        prefix = draft.find(sequence)
        if self._running and draft.blocks_needed(sequence, prefix) + len(self._running) > self.blocks.num_free:
            return False
        draft.seat(sequence, prefix)
        if self.blocks.prefix_cache:
            self.stats.prefix_cache_queries += sequence.prefill_target
            self.stats.prefix_cache_hits += prefix.num_tokens
        self._waiting.popleft()
        sequence.slot = self._by_slot.index(None)
        self._by_slot[sequence.slot] = sequence
        sequence.status = Status.RUNNING
        self._running.append(sequence)
        return True

    def _commit_prefill(self, spans: tuple[Span, ...], outcome: Outcome) -> list[Sequence]:
        touched = []
        for span, verdict in zip(spans, outcome, strict=True):
            sequence = self._by_slot[span.slot]
            assert sequence is not None, "plans are committed before anything else happens to their sequences"
            sequence.num_cached += len(span.tokens)
            if self._approximate:
                self._mark_replayed(sequence, span)
            if sequence.decodes and not verdict.failed:
                # Not chunk by chunk: only the last one's logits tell whether the KV of all is finite.
                self._cache(sequence, sequence.num_cached)
            if span.draw is not None:
                self._take_token(sequence, verdict, self.stage_ends[-1])
                touched.append(sequence)
        return touched

    def _mark_replayed(self, sequence: Sequence, span: Span) -> None:
        shallow = (i for i, depth in enumerate(span.depths) if depth < self.stage_ends[-1])
        if (first := next(shallow, None)) is not None:
            self.blocks.mark_inexact(sequence.block_table, span.start + first)

    # Slots and blocks

    def _preempt(self, sequence: Sequence) -> None:
        """Take away blocks and slot; it waits first in line and is replayed at its recorded depths."""
        self._vacate(sequence, keep=True)
        sequence.status = Status.WAITING
        sequence.num_cached = 0
        self._waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def _vacate(self, sequence: Sequence, *, keep: bool) -> None:
        """Free slot and blocks; with `keep`, what is exact in them can be found again."""
        if keep and sequence.decodes:
            self._cache(sequence, sequence.num_cached - 1)  # the last token's KV may still wait for its completion
        self.blocks.release(sequence.block_table)
        self._running.remove(sequence)
        self._by_slot[sequence.slot] = None
        sequence.slot = -1

    def _cache(self, sequence: Sequence, num_tokens: int) -> None:
        blocks = self.blocks
        if blocks.prefix_cache:
            hashes = blocks.extend_hashes(sequence.block_hashes, sequence.tokens, num_tokens)
            blocks.cache(sequence.block_table, hashes[: num_tokens // blocks.block_size])
