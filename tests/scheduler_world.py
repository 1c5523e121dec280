"""A runner without tensors: it knows for each KV slot which prefix wrote it, and checks every plan against that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from math import isnan, nan
from random import Random

from eeinfer.core.block_manager import BlockManager
from eeinfer.core.plan import Complete, Outcome, Pass, Plan, Prefill, Row, Span, Verdict
from eeinfer.core.request import FinishReason
from eeinfer.core.scheduler import Scheduler
from eeinfer.core.sequence import Sequence, Status
from eeinfer.core.strategy import leave_rule
from eeinfer.errors import RequestError

EOS, POISON = 0, 1  # what follows POISON in a sequence, itself included, is not finite
WORDS = (2, 3)  # so few that prompts and answers often begin alike
DOCUMENTS = ((2,) * 12, (2, 3) * 6, (3, 3, 2, 2, 2, 3, 2, 3, 3, 3, 2, 2))  # that prompts begin with
STRATEGIES = ("full", "all-exit", "split", "any", "majority", "mean")
CONFIDENCES = (0.1, 0.3, 0.4, 0.5, 0.6, 1.0)


@dataclass(frozen=True, slots=True)
class Partial:
    """What a slot holds whose deeper layers are not filled yet: the prefix up to its token, and the layers run."""

    key: int
    depth: int


@dataclass
class Expected:
    """What a sequence must have got, as the runner handed it out."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    confidences: list[float | None] = field(default_factory=list)
    ended: int = 0
    ready: bool = False  # at an earlier exit of this iteration
    stage: int = -1  # ran last in this iteration
    keys: list[int] = field(default_factory=list)  # see World.keys


class World:
    """The cache as lists of keys: a key stands for all tokens up to a position and the depth each was run to.

    Keys of prefixes that are not finite are negative. Attributes count what came up, so that a test can tell that it
    did.
    """

    def __init__(self, s: Scheduler, threshold: float, random: Random) -> None:
        self.s, self.threshold, self.random = s, threshold, random
        self.size, self.full = s.blocks.block_size, s.stage_ends[-1]
        self.cells: list[list[int | Partial | None]] = [[None] * self.size for _ in range(s.blocks.num_blocks)]
        self.arrived: dict[Sequence, Expected] = {}
        self.cached: set[tuple[bytes, int]] = set()  # at the last check; they are not written since
        self.prefilled = False  # by the last plan between iterations
        self.counts: Counter[str] = Counter()

    # What may happen

    def arrive(self, prompt: Many[int], max_tokens: int, temperature: float = 0.0) -> None:
        """A request; one that can never fit is refused."""
        self.counts["arrivals"] += 1
        name = f"s{self.counts['arrivals']}"
        one = Sequence(name, list(prompt), max_tokens, frozenset({EOS}), temperature=temperature, seed=7)
        try:
            self.s.add(one)
        except RequestError:
            assert self.s.blocks.blocks_for(len(prompt) + max_tokens - 1) > self.s.blocks.num_blocks
            return
        assert self.s.blocks.blocks_for(len(prompt) + max_tokens - 1) <= self.s.blocks.num_blocks
        self.arrived[one] = Expected()

    def cancel(self, index: int) -> None:
        """End one of the live requests, between two plans."""
        one = list(self.arrived)[index % len(self.arrived)]
        self.s.finish(one, FinishReason.ABORT)
        assert (one.status, one.finish_reason) == (Status.FINISHED, FinishReason.ABORT)
        assert one.generated == self.arrived.pop(one).tokens
        self.counts["cancelled"] += 1
        self.s.check()

    def interrupt(self, *, ran: bool) -> None:
        """The run breaks off before a plan is committed; everybody is dropped."""
        counts = self.counts.copy()
        if (plan := self.s.next()) and ran:
            self.run(plan)
        self.counts = counts
        for one in self.arrived:
            self.s.finish(one, FinishReason.ABORT)
        self.arrived.clear()
        self.prefilled = False
        self.counts["interrupted"] += 1
        self.check()
        assert self.s.next() is None
        assert self.s.blocks.num_free == self.s.blocks.num_blocks

    def step(self) -> bool:
        """One plan; False if there is none."""
        decoding = [one for one in self.arrived if one.status is Status.RUNNING and one.decodes]
        plan = self.s.next()
        self.check()
        if plan is None:
            assert not self.s.has_work
            return False
        if isinstance(plan, Prefill):
            assert not (self.prefilled and decoding), "decoding waits for more than one budget"
        self.prefilled = isinstance(plan, Prefill)
        frozen = repr(plan)
        counted = (self.counts["exits"], self.counts["stays"])
        outcome = self.run(plan)
        touched = self.s.commit(plan, outcome)
        assert repr(plan) == frozen
        assert counted == (self.counts["exits"], self.counts["stays"]) or isinstance(plan, Pass)
        self.after(touched)
        self.counts["steps"] += 1
        return True

    def drain(self, limit: int = 5000) -> None:
        """Run until everybody has ended."""
        while self.step():
            limit -= 1
            assert limit, "no progress"
        assert not self.arrived
        assert self.s.blocks.num_free == self.s.blocks.num_blocks

    # Keys and cells

    def keys(self, one: Sequence, end: int) -> list[int]:
        """Keys of the positions up to `end`, all of which have been run, or are in the prompt."""
        keys = self.arrived[one].keys
        for position in range(len(keys), end):
            before, token = keys[-1] if keys else 0, one.tokens[position]
            depth = one.depth_at(position, self.full) if self.s._approximate else self.full
            keys.append(self.next_key(before, token, depth))
        return keys[:end]

    @staticmethod
    def next_key(before: int, token: int, depth: int) -> int:
        key = abs(hash((before, token, depth))) + 1
        return -key if before < 0 or token == POISON else key

    def place(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        assert position // self.size < len(table), "the block table is too small for the plan"
        return table[position // self.size], position % self.size

    def write(self, table: tuple[int, ...], position: int, value: int | Partial) -> None:
        block, offset = self.place(table, position)
        assert self.held[block] - self.readers[block] == 1, "a shared block is written"
        assert self.s.blocks._digests[block] is None, "a cached block is written"
        self.cells[block][offset] = value

    def clear(self, table: tuple[int, ...], start: int) -> None:
        """As ModelRunner zeroes what a sequence has not written yet."""
        for position in range(start, len(table) * self.size):
            block, offset = self.place(table, position)
            assert self.s.blocks._digests[block] is None, "a cached block is cleared"
            self.cells[block][offset] = None

    def check_context(self, one: Sequence, table: tuple[int, ...], end: int) -> None:
        """What `one` attends to is its own prefix, run to the recorded depths, and nothing else."""
        found = [cell for block in table[: -(-end // self.size)] for cell in self.cells[block]][:end]
        assert found == self.keys(one, end), "a row attends to what is not its own prefix"

    # Plans

    def run(self, plan: Plan) -> Outcome:
        owners = {one.slot: one for one in self.s.live if one.slot >= 0}
        self.held = Counter(block for one in owners.values() for block in one.block_table)
        self.readers: Counter[int] = Counter()  # those for whom another sequence writes the block in this very plan
        match plan:
            case Prefill():
                self.check_order(plan, owners)
                return self.run_prefill(plan, [owners[span.slot] for span in plan.spans])
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

    def check_order(self, plan: Prefill, owners: dict[int, Sequence]) -> None:
        """Within the budget, one span a sequence, oldest first, nobody left out who comes before the last."""
        slots = [span.slot for span in plan.spans]
        assert 0 < sum(len(span.tokens) for span in plan.spans) <= self.s._max_num_batched_tokens
        waiting = [one.slot for one in self.arrived if one.status is Status.RUNNING and not one.decodes]
        assert slots == waiting[: len(slots)]
        assert next(iter(self.arrived)).slot in owners, "the oldest waits"
        assert all(self.held[copy] == 1 and self.held[block] for block, copy in plan.copies)

    def check_start(self, plan: Pass, owners: dict[int, Sequence]) -> None:
        """A new iteration takes everybody who decodes; the oldest there is has a place."""
        assert {r.slot for r in plan.rows} == {slot for slot, one in owners.items() if one.decodes}
        assert next(iter(self.arrived)).slot in owners, "the oldest waits"
        for expected in self.arrived.values():
            expected.stage, expected.ready = -1, False

    def run_prefill(self, plan: Prefill, owners: list[Sequence]) -> Outcome:
        """Copies first, then all that is written, then all that is read."""
        self.counts["copies"] += len(plan.copies)
        for copy, cells in [(copy, list(self.cells[block])) for block, copy in plan.copies]:
            self.cells[copy] = cells
        for span in plan.spans:
            self.clear(span.block_table, span.start + len(span.tokens))
        written: set[int] = set()
        for span in plan.spans:
            self.counts["shared within a plan"] += not written.isdisjoint(span.block_table[: span.start // self.size])
            written.update(span.block_table[span.start // self.size :])
            self.readers.update(written.intersection(span.block_table[: span.start // self.size]))
        for span, one in zip(plan.spans, owners, strict=True):
            self.write_span(span, one)
        for span, one in zip(plan.spans, owners, strict=True):
            self.check_context(one, span.block_table, span.start)
        return tuple(self.span_verdict(span, one) for span, one in zip(plan.spans, owners, strict=True))

    def write_span(self, span: Span, one: Sequence) -> None:
        stop = span.start + len(span.tokens)
        assert span.tokens == tuple(one.tokens[span.start : stop]) != ()
        assert span.start == one.num_cached
        expected = [one.depth_at(p, self.full) if self.s._approximate else self.full for p in range(span.start, stop)]
        assert list(span.depths) == expected
        for position, key in enumerate(self.keys(one, stop)[span.start :], start=span.start):
            self.write(span.block_table, position, key)
        self.counts["chunks"] += stop < one.prefill_target
        self.counts["replays"] += bool(one.depths)
        assert (span.draw is not None) == (not one.depths and stop == one.prompt_tokens)

    def span_verdict(self, span: Span, one: Sequence) -> Verdict:
        if span.draw is None:
            return Verdict()
        assert span.draw == one.draw()
        return self.verdict_at_full_depth(one, self.keys(one, one.prompt_tokens)[-1])

    def verdict_at_full_depth(self, one: Sequence, key: int) -> Verdict:
        if key < 0:
            self.counts["failed"] += 1
            self.arrived[one].ended += 1
            return Verdict(failed=True)
        return self.take(one, Verdict(self.token()), self.full)

    def token(self) -> int:
        chance = self.random.random()
        return EOS if chance < 0.02 else POISON if chance < 0.03 else self.random.choice(WORDS)

    def take(self, one: Sequence, verdict: Verdict, depth: int) -> Verdict:
        expected = self.arrived[one]
        assert verdict.token is not None
        expected.tokens.append(verdict.token)
        expected.depths.append(depth)
        expected.confidences.append(verdict.confidence)
        expected.ended += verdict.token == EOS or len(expected.tokens) == one.max_tokens
        return verdict

    def run_pass(self, plan: Pass, owners: list[Sequence]) -> Outcome:
        depth, last = self.s.stage_ends[plan.stage], plan.stage == len(self.s.stage_ends) - 1
        keys = []
        for row, one in zip(plan.rows, owners, strict=True):
            expected = self.arrived[one]
            assert (row.token, row.position, row.draw) == (one.tokens[-1], len(one.tokens) - 1, one.draw())
            assert (row.number, row.max_tokens) == (len(expected.tokens), one.max_tokens)
            assert expected.stage == plan.stage - 1
            expected.stage = plan.stage
            if plan.stage == 0 and row.position % self.size == 0:
                self.clear(row.block_table, row.position)
            before = self.keys(one, row.position)[-1]
            keys.append(self.next_key(before, row.token, depth if self.s._approximate else self.full))
            self.write(row.block_table, row.position, keys[-1] if last else Partial(keys[-1], depth))
            self.check_context(one, row.block_table, row.position)
        assert plan.flagged == tuple(self.arrived[one].ready for one in owners)
        if last:
            return tuple(self.verdict_at_full_depth(one, key) for one, key in zip(owners, keys, strict=True))
        return self.check_exit(plan, owners, keys)

    def check_exit(self, plan: Pass, owners: list[Sequence], keys: list[int]) -> Outcome:
        confidences = [nan if key < 0 else self.random.choice(CONFIDENCES) for key in keys]
        leaving = plan.rule.leaving(confidences, [self.threshold] * len(owners), plan.flagged)
        verdicts = []
        for one, c, leaves in zip(owners, confidences, leaving, strict=True):
            ready = c >= self.threshold
            verdict = Verdict(self.token() if leaves else None, c, ready, isnan(c))
            verdicts.append(verdict)
            if verdict.failed:
                self.counts["failed"] += 1
                self.arrived[one].ended += 1
            elif leaves:
                self.take(one, verdict, self.s.stage_ends[plan.stage])
                self.counts["exits"] += not ready
            else:
                self.counts["stays"] += ready
                self.arrived[one].ready |= ready
        return tuple(verdicts)

    def complete(self, row: Row, stage: int, one: Sequence) -> None:
        block, offset = self.place(row.block_table, row.position)
        key = self.keys(one, row.position + 1)[-1]
        assert self.cells[block][offset] == Partial(key, self.s.stage_ends[stage])
        self.cells[block][offset] = key
        assert one.tokens[row.position + 1] == self.arrived[one].tokens[-1]

    # After a plan

    def after(self, touched: list[Sequence]) -> None:
        assert len(set(touched)) == len(touched)
        stats = self.s.stats
        assert (stats.involuntary_exits, stats.involuntary_stays) == (self.counts["exits"], self.counts["stays"])
        for one, expected in list(self.arrived.items()):
            assert (one.generated, one.depths) == (expected.tokens, expected.depths)
            assert one.confidences == expected.confidences
            assert (one.status is Status.FINISHED) == bool(expected.ended)
            assert (one.finish_reason is None) == (not expected.ended)
            if one.status is Status.RUNNING:
                self.check_exact(one)
            else:
                assert (one.block_table, one.slot) == ([], -1)
            if expected.ended:
                assert expected.ended == 1
                assert one in touched
                del self.arrived[one]
        self.check()

    def check(self) -> None:
        """The scheduler's own invariants; the order of arrivals; and what can be found in the cache is complete."""
        self.s.check()
        waits = [one.status is Status.WAITING for one in self.arrived]
        assert waits == sorted(waits), "a newer sequence runs while an older one waits"
        assert list(self.s.live) == list(self.arrived), "a sequence is lost, or out of order"
        cached = set(self.s.blocks._cached.items())
        for _, block in cached - self.cached:
            assert all(isinstance(cell, int) and cell > 0 for cell in self.cells[block]), "a broken block is cached"
        self.cached = cached
        assert self.s.blocks.prefix_cache or not cached

    def check_exact(self, one: Sequence) -> None:
        shallow = [p for p in range(one.num_cached) if self.s._approximate and one.depth_at(p, self.full) < self.full]
        expected = [not shallow or shallow[0] >= (i + 1) * self.size for i in range(len(one.block_table))]
        assert [self.s.blocks.is_exact(block) for block in one.block_table] == expected


def build_world(
    random: Random,
    *,
    num_blocks: int,
    block_size: int,
    exits: int,
    strategy: str,
    sticky: bool,
    approximate: bool,
    seqs: int,
    budget: int,
    prefix_cache: bool,
    threshold: float,
) -> World:
    """A world around a new scheduler with `exits` exits, two layers apart; none under `full`."""
    ends = tuple(range(2, 2 * exits + 3, 2)) if strategy != "full" else (8,)
    s = Scheduler(
        BlockManager(num_blocks, block_size, prefix_cache=prefix_cache),
        ends,
        leave_rule(strategy, sticky=sticky),
        approximate=approximate,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
    )
    return World(s, threshold, random)


def random_world(random: Random) -> World:
    """A world with sizes drawn at random; small ones, so that blocks run out and borders are met."""
    block_size = random.randint(1, 4)
    return build_world(
        random,
        num_blocks=random.randint(24, 72) // block_size,
        block_size=block_size,
        exits=random.randint(1, 3),
        strategy=random.choice(STRATEGIES),
        sticky=random.random() < 0.5,
        approximate=random.random() < 0.7,
        seqs=random.randint(1, 6),
        budget=random.randint(1, 40),
        prefix_cache=random.random() < 0.9,
        threshold=random.choice((0.35, 0.55, 0.95)),
    )


def random_event(world: World) -> None:
    """Arrivals, often alike; a cancellation; seldom an interrupt; and mostly a plan."""
    random, chance = world.random, world.random.random()
    if chance < 0.05 and len(world.arrived) < 8:
        for _ in range(random.randint(1, 4)):
            shared, own = (
                random.choice(DOCUMENTS)[: random.randint(0, 12)],
                random.choices(WORDS, k=random.randint(1, 8)),
            )
            if random.random() < 0.02:
                own[random.randrange(len(own))] = POISON
            world.arrive([*shared, *own], random.randint(1, 20), random.choice((0.0, 0.8)))
    elif chance > 0.99 and world.arrived:
        world.cancel(random.randrange(len(world.arrived)))
    elif chance > 0.9895:
        world.interrupt(ran=random.random() < 0.5)
    else:
        world.step()
