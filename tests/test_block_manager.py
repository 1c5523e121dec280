"""BlockManager: references, growth, sharing, exactness, the prefix cache; by hand, and random use against a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

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


# Prefix cache


def hashes_of(blocks: BlockManager, tokens: list[int]) -> list[bytes]:
    return blocks.extend_hashes([], tokens, len(tokens))


def test_hashes_are_of_full_blocks_and_all_before_them() -> None:
    blocks = BlockManager(1, 2)
    hashes = hashes_of(blocks, [1, 2, 3, 4, 5])
    assert len(hashes) == 2
    assert hashes_of(blocks, [1, 2, 3, 4]) == hashes
    assert hashes_of(blocks, [1, 2, 9, 4])[0] == hashes[0]
    others = (
        hashes_of(blocks, [1, 9, 3, 4]) + hashes_of(blocks, [3, 4, 1, 2]) + hashes_of(BlockManager(1, 4), [1, 2, 3, 4])
    )
    assert not set(others) & set(hashes)
    assert hashes_of(blocks, [2**40, -1]) != hashes_of(blocks, [2**40, 1]), "whole numbers, not their low bits"


def test_hashes_go_on_where_they_were() -> None:
    blocks, tokens, hashes = BlockManager(1, 3), list(range(20)), []
    for end in (2, 3, 4, 11, 11, 20):
        assert blocks.extend_hashes(hashes, tokens, end) is hashes
        assert hashes == hashes_of(blocks, tokens[:end])


def test_a_cached_block_is_found_free_and_not_lost_when_shared_again() -> None:
    blocks = BlockManager(3, 2)
    hashes = hashes_of(blocks, [1, 2, 3, 4])
    table = grown(blocks, 4)
    first, second = table
    blocks.cache(table, hashes)
    blocks.release(table)
    assert blocks.num_free == 3
    assert [blocks.find(h) for h in hashes] == [first, second]
    table = blocks.share([first, second])
    assert blocks.num_free == 1
    assert blocks.peak_used == 2
    blocks.check([table])


def test_of_equal_blocks_one_is_found() -> None:
    blocks = BlockManager(2, 2)
    hashes = hashes_of(blocks, [1, 2])
    one, two = grown(blocks, 2), grown(blocks, 2)
    blocks.cache(one, hashes)
    blocks.cache(two, hashes)
    assert blocks.find(hashes[0]) == one[0]
    blocks.release(two)
    blocks.check([one])


def test_blocks_that_were_never_cached_go_first_then_the_least_recently_used() -> None:
    blocks = BlockManager(4, 2)
    old, new, tables = hashes_of(blocks, [1, 1, 1, 1]), hashes_of(blocks, [2, 2]), []
    for hashes in (old, new):
        tables.append(grown(blocks, 2 * len(hashes)))
        blocks.cache(tables[-1], hashes)
    for table in tables:
        blocks.release(table)
    grown(blocks, 2)
    assert blocks.evictions == 0
    grown(blocks, 2)
    assert (blocks.find(old[1]), blocks.evictions) == (None, 1), "the end of the oldest"
    table = blocks.share([block for block in [blocks.find(old[0])] if block is not None])
    blocks.release(table)
    grown(blocks, 2)
    assert blocks.find(new[0]) is None
    assert blocks.find(old[0]) == grown(blocks, 2)[0], "the last one there was"
    assert blocks.find(old[0]) is None


def test_to_write_a_block_that_others_hold_takes_a_copy() -> None:
    blocks = BlockManager(3, 2)
    hashes = hashes_of(blocks, [1, 2, 3, 4])
    table = grown(blocks, 4)
    blocks.cache(table, hashes)
    twin = blocks.share(table)
    assert blocks.own(twin, 1) == (table[1], twin[1])
    assert table[1] != twin[1]
    assert blocks.is_exact(twin[1])
    assert blocks.find(hashes[1]) == table[1], "what others hold stays"
    assert blocks.peak_used == 3
    blocks.check([table, twin])
    blocks.release(twin)
    assert blocks.own(table, 1) is None
    assert blocks.find(hashes[1]) is None, "it is about to be another"
    assert blocks.find(hashes[0]) == table[0]


def test_inexact_blocks_and_what_follows_them_are_not_cached() -> None:
    blocks = BlockManager(3, 2)
    hashes = hashes_of(blocks, [1, 2, 3, 4, 5, 6])
    table = grown(blocks, 6)
    blocks.mark_inexact(table, 3)
    blocks.cache(table, hashes)
    assert [blocks.find(h) for h in hashes] == [table[0], None, None]
    with pytest.raises(AssertionError, match="cached"):
        blocks.mark_inexact(table, 1)


@dataclass(eq=False)
class Held:
    """A table, the tokens that fill it, and the index of its first inexact block (None: all are exact)."""

    table: list[int]
    tokens: list[int]
    first_inexact: int | None = None


class RandomUse(RuleBasedStateMachine):
    """Tables with what their blocks hold, and for each block the prefix last written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.content: dict[int, list[int]] = {}
        self.known: list[tuple[bytes, list[int]]] = []  # what was cached at some time

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.peak = 0

    @rule()
    def new(self) -> None:
        self.held.append(Held([], []))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_tokens=st.integers(0, 30), word=st.integers(0, 2))
    def grow(self, data: st.DataObject, num_tokens: int, word: int) -> None:
        one, size = self.pick(data), self.blocks.block_size
        before, free = list(one.table), self.blocks.num_free
        lacking = max(0, -(-num_tokens // size) - len(before))
        assert self.blocks.grow(one.table, num_tokens) == (lacking <= free)
        assert one.table[: len(before)] == before
        assert len(one.table) == len(before) + (lacking if lacking <= free else 0)
        one.tokens += [word] * (len(one.table) * size - len(one.tokens))
        for i in range(len(before), len(one.table)):
            self.content[one.table[i]] = one.tokens[: (i + 1) * size]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        one = self.pick(data)
        table = self.blocks.share(one.table[: one.first_inexact])
        self.held.append(Held(table, one.tokens[: len(table) * self.blocks.block_size]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, 9))
    def cache(self, data: st.DataObject, count: int) -> None:
        one, size = self.pick(data), self.blocks.block_size
        hashes = hashes_of(self.blocks, one.tokens)[:count]
        self.blocks.cache(one.table, hashes)
        for i, block_hash in enumerate(hashes[: one.first_inexact]):
            assert self.blocks.find(block_hash) is not None
            self.known.append((block_hash, one.tokens[: (i + 1) * size]))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), write=st.booleans())
    def seat(self, data: st.DataObject, write: bool) -> None:
        """A newcomer takes what it finds, and writes the last block of it."""
        _, tokens = data.draw(st.sampled_from(self.known))
        found = [self.blocks.find(block_hash) for block_hash in hashes_of(self.blocks, tokens)]
        table = [block for block in takewhile(lambda block: block is not None, found) if block is not None]
        if not table or (write and self.blocks.num_free == 0):
            return
        one = Held(self.blocks.share(table), tokens[: len(table) * self.blocks.block_size])
        self.held.append(one)
        if write and self.blocks.num_free:
            others = sum(table[-1] in other.table for other in self.held) - 1
            pair = self.blocks.own(one.table, len(table) - 1)
            assert pair == ((table[-1], one.table[-1]) if others else None)
            assert (one.table[-1] != table[-1]) == bool(others)
            self.content[one.table[-1]] = list(one.tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = self.pick(data)
        self.held.remove(one)
        self.blocks.release(one.table)
        assert one.table == []

    @precondition(lambda self: self.held)
    @rule(data=st.data(), back=st.integers(0, 9))
    def mark_inexact(self, data: st.DataObject, back: int) -> None:
        one, size = self.pick(data), self.blocks.block_size
        position = len(one.table) * size - 1 - back
        counted = Counter(b for other in self.held for b in other.table)
        cached = {self.blocks.find(block_hash) for block_hash, _ in self.known}
        if position < 0 or any(counted[b] > 1 or b in cached for b in one.table[position // size :]):
            return
        self.blocks.mark_inexact(one.table, position)
        first = position // size
        one.first_inexact = first if one.first_inexact is None else min(first, one.first_inexact)

    def pick(self, data: st.DataObject) -> Held:
        return self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check([one.table for one in self.held])
        used = {b for one in self.held for b in one.table}
        self.peak = max(self.peak, len(used))
        assert self.blocks.num_free == self.blocks.num_blocks - len(used)
        assert self.blocks.peak_used == self.peak
        for one in self.held:
            expected = [one.first_inexact is None or i < one.first_inexact for i in range(len(one.table))]
            assert [self.blocks.is_exact(b) for b in one.table] == expected
            for i, block in enumerate(one.table):
                assert self.content[block] == one.tokens[: (i + 1) * self.blocks.block_size]
        for block_hash, tokens in self.known:
            if (block := self.blocks.find(block_hash)) is not None:
                assert self.content[block] == tokens

    def teardown(self) -> None:
        for one in self.held:
            self.blocks.release(one.table)
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
