"""The Scheduler in random use, checked after every step against a model of the cache (`scheduler_world.py`)."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_world import DOCUMENTS, POISON, STRATEGIES, WORDS, build_world, random_event, random_world

TOKENS = st.sampled_from([*WORDS, *WORDS, *WORDS, POISON])


class RandomUse(RuleBasedStateMachine):
    """Arrivals with shared beginnings, chunks, exits, preemption, cancellation, interrupts and ends, interleaved."""

    @initialize(
        num_blocks=st.integers(4, 16),
        block_size=st.integers(1, 3),
        exits=st.integers(1, 3),
        strategy=st.sampled_from(STRATEGIES),
        sticky=st.booleans(),
        approximate=st.booleans(),
        seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        prefix_cache=st.sampled_from([True, True, False]),
        threshold=st.sampled_from([0.35, 0.55, 0.95]),
        seed=st.integers(0, 2**32),
    )
    def start(self, seed: int, **sizes: str | float) -> None:
        self.world = build_world(Random(seed), **sizes)  # type: ignore[arg-type] # noqa: S311 - not for secrets

    @rule(
        beginnings=st.lists(st.tuples(st.sampled_from(DOCUMENTS), st.integers(0, 8)), min_size=1, max_size=5),
        own=st.lists(TOKENS, min_size=1, max_size=6),
        max_tokens=st.integers(1, 16),
        temperature=st.sampled_from([0.0, 0.8]),
    )
    def arrive(
        self, beginnings: list[tuple[tuple[int, ...], int]], own: list[int], max_tokens: int, temperature: float
    ) -> None:
        for document, shared in beginnings:
            self.world.arrive([*document[:shared], *own], max_tokens, temperature)

    @precondition(lambda self: self.world.s.has_work)
    @rule(plans=st.integers(1, 20))
    def run(self, plans: int) -> None:
        for _ in range(plans):
            self.world.step()

    @precondition(lambda self: self.world.arrived)
    @rule(index=st.integers(0, 9))
    def cancel(self, index: int) -> None:
        self.world.cancel(index)

    @precondition(lambda self: self.world.arrived)
    @rule(ran=st.booleans())
    def interrupt(self, ran: bool) -> None:
        self.world.interrupt(ran=ran)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestRandomUse = RandomUse.TestCase
TestRandomUse.settings = settings(
    max_examples=100,
    stateful_step_count=20,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_random_events_reach_everything() -> None:
    """What `scripts/stress_scheduler.py` does, for a moment; and that nothing it is there for stays out."""
    counts: Counter[str] = Counter()
    for seed in range(20):
        world = random_world(Random(seed))  # noqa: S311 - not for secrets
        for _ in range(150):
            random_event(world)
        world.drain()
        counts += world.counts + Counter(preempted=world.s.stats.preemptions, evicted=world.s.blocks.evictions)
    expected = (
        "arrivals cancelled interrupted chunks replays preempted evicted exits stays failed copies shared-within-a-plan"
    )
    assert not [name for name in expected.split() if not counts[name.replace("-", " ")]]
