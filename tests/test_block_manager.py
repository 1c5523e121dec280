"""BlockManager: reference counts, growth, sharing, exactness; by hand, and random use against a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eeinfer.core.block_manager import BlockManager


def grown(blocks: BlockManager, num_tokens: int) -> list[int]:
    table: list[int] = []
    assert blocks.grow(table, num_tokens)
    return table


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(tokens: int, expected: int) -> None:
    assert BlockManager(8, 16).blocks_for(tokens) == expected


def test_blocks_of_one_token() -> None:
    blocks = BlockManager(3, 1)
    table = grown(blocks, 3)
    assert len(table) == 3
    assert blocks.num_free == 0


def test_missing_counts_what_the_table_lacks_and_is_never_negative() -> None:
    blocks = BlockManager(8, 4)
    table = grown(blocks, 9)
    assert [blocks.missing(table, n) for n in (0, 12, 13, 21)] == [0, 0, 1, 3]


def test_grow_takes_only_what_is_missing() -> None:
    blocks = BlockManager(8, 4)
    table = grown(blocks, 5)
    before = list(table)
    assert blocks.grow(table, 8)
    assert table == before
    assert blocks.grow(table, 9)
    assert table[:2] == before
    assert len(set(table)) == len(table) == 3
    assert blocks.num_free == 5


def test_grow_never_shrinks() -> None:
    blocks = BlockManager(4, 4)
    table = grown(blocks, 16)
    assert blocks.grow(table, 1)
    assert len(table) == 4


def test_grow_is_all_or_nothing() -> None:
    blocks = BlockManager(3, 4)
    table = grown(blocks, 4)
    before, peak = list(table), blocks.peak_used
    assert not blocks.grow(table, 17)
    assert (table, blocks.num_free, blocks.peak_used) == (before, 2, peak)
    blocks.check([table])
    assert blocks.grow(table, 12)
    assert blocks.num_free == 0


def test_release_empties_the_table_and_frees_all() -> None:
    blocks = BlockManager(4, 4)
    table, other = grown(blocks, 8), grown(blocks, 4)
    blocks.release(table)
    assert table == []
    assert blocks.num_free == 3
    blocks.check([other])


def test_peak_is_the_most_in_use_at_once() -> None:
    blocks = BlockManager(6, 4)
    first, second = grown(blocks, 12), grown(blocks, 4)
    blocks.release(first)
    grown(blocks, 4)
    assert blocks.peak_used == 4
    assert blocks.num_free == 4
    assert len(second) == 1


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    blocks = BlockManager(4, 4)
    table = grown(blocks, 8)
    twin = blocks.share(table)
    assert twin == table
    assert twin is not table
    blocks.release(table)
    assert blocks.num_free == 2
    blocks.check([twin])
    blocks.release(twin)
    assert blocks.num_free == 4
    blocks.check([])


def test_holders_of_shared_blocks_grow_apart() -> None:
    blocks = BlockManager(4, 4)
    table = grown(blocks, 4)
    twin = blocks.share(table)
    assert blocks.grow(table, 8)
    assert blocks.grow(twin, 8)
    assert table[0] == twin[0]
    assert table[1] != twin[1]
    blocks.check([table, twin])


def test_inexact_from_its_position_on_and_in_blocks_grown_later() -> None:
    blocks = BlockManager(8, 4)
    table = grown(blocks, 12)
    blocks.mark_inexact(table, 5)
    assert [blocks.is_exact(b) for b in table] == [True, False, False]
    assert blocks.grow(table, 16)
    assert [blocks.is_exact(b) for b in table] == [True, False, False, False]


@pytest.mark.parametrize(("position", "expected"), [(3, [False, False]), (4, [True, False]), (7, [True, False])])
def test_inexact_at_block_borders(position: int, expected: list[bool]) -> None:
    blocks = BlockManager(2, 4)
    table = grown(blocks, 8)
    blocks.mark_inexact(table, position)
    assert [blocks.is_exact(b) for b in table] == expected


def test_a_freed_inexact_block_is_exact_for_its_next_holder() -> None:
    blocks = BlockManager(1, 4)
    table = grown(blocks, 1)
    blocks.mark_inexact(table, 0)
    blocks.release(table)
    assert [blocks.is_exact(b) for b in grown(blocks, 1)] == [True]


def test_inexact_blocks_are_never_shared() -> None:
    blocks = BlockManager(4, 4)
    table = grown(blocks, 8)
    blocks.mark_inexact(table, 4)
    with pytest.raises(AssertionError, match="inexact"):
        blocks.share(table)
    assert blocks.share(table[:1]) == table[:1]


def test_a_shared_block_cannot_become_inexact() -> None:
    blocks = BlockManager(4, 4)
    table = grown(blocks, 8)
    twin = blocks.share(table[:1])
    with pytest.raises(AssertionError, match="shared"):
        blocks.mark_inexact(table, 3)
    blocks.mark_inexact(table, 4)
    blocks.check([table, twin])


def test_releasing_twice_is_caught() -> None:
    blocks = BlockManager(2, 4)
    table = grown(blocks, 4)
    copy = list(table)
    blocks.release(table)
    with pytest.raises(AssertionError, match="released more often"):
        blocks.release(copy)


@pytest.mark.parametrize("case", ["leaked", "stranger", "twice"])
def test_check_finds(case: str) -> None:
    blocks = BlockManager(4, 4)
    table = grown(blocks, 8)
    tables = {"leaked": [table[:1]], "stranger": [[*table, blocks.num_blocks - 1]], "twice": [table, table]}[case]
    blocks.check([table])
    with pytest.raises(AssertionError):
        blocks.check(tables)


def test_check_finds_exactness_that_is_no_prefix() -> None:
    blocks = BlockManager(4, 4)
    table = grown(blocks, 8)
    blocks.mark_inexact(table[:1], 0)  # only the first of two
    with pytest.raises(AssertionError, match="prefix"):
        blocks.check([table])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_sizes_are_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(AssertionError):
        BlockManager(num_blocks, block_size)


class RandomUse(RuleBasedStateMachine):
    """Tables with, for each, the index of its first inexact block: the whole of what BlockManager must know."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[int]] = []
        self.exact_blocks: list[int | None] = []  # None: all

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.peak = 0

    @rule()
    def new(self) -> None:
        self.tables.append([])
        self.exact_blocks.append(None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(0, 30))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        table = self.tables[self.pick(data)]
        before, free = list(table), self.blocks.num_free
        lacking = max(0, -(-num_tokens // self.blocks.block_size) - len(table))
        assert self.blocks.grow(table, num_tokens) == (lacking <= free)
        assert table[: len(before)] == before
        assert len(table) == len(before) + (lacking if lacking <= free else 0)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        index = self.pick(data)
        exact = self.exact_blocks[index]
        self.tables.append(self.blocks.share(self.tables[index][:exact]))
        self.exact_blocks.append(None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = self.pick(data)
        table = self.tables.pop(index)
        self.exact_blocks.pop(index)
        self.blocks.release(table)
        assert table == []

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), back=st.integers(0, 9))
    def mark_inexact(self, data: st.DataObject, back: int) -> None:
        index = self.pick(data)
        table, size = self.tables[index], self.blocks.block_size
        position = len(table) * size - 1 - back
        held = Counter(b for t in self.tables for b in t)
        if position < 0 or any(held[b] > 1 for b in table[position // size :]):
            return
        self.blocks.mark_inexact(table, position)
        before = self.exact_blocks[index]
        self.exact_blocks[index] = position // size if before is None else min(before, position // size)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.tables) - 1))

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check(self.tables)
        used = {b for table in self.tables for b in table}
        self.peak = max(self.peak, len(used))
        assert self.blocks.num_free == self.blocks.num_blocks - len(used)
        assert self.blocks.peak_used == self.peak
        for table, exact in zip(self.tables, self.exact_blocks, strict=True):
            expected = [exact is None or i < exact for i in range(len(table))]
            assert [self.blocks.is_exact(b) for b in table] == expected

    def teardown(self) -> None:
        for table in self.tables:
            self.blocks.release(table)
        if hasattr(self, "blocks"):
            self.blocks.check([])
            assert self.blocks.num_free == self.blocks.num_blocks


TestRandomUse = RandomUse.TestCase
TestRandomUse.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
