"""Paged KV blocks: who holds which, how often, and whether what they hold is exact.

A *block* is room for `block_size` consecutive tokens of one sequence, in all layers. A sequence's `block_table` lists
its blocks in order: token position p lives in `block_table[p // block_size]`, at offset `p % block_size`.

A block is *exact* while every token in it, and every token before it, has the KV that a full-depth pass writes. That
is a property of prefixes: KV filled in for skipped layers is an approximation, and what attends to it is one too.
Only exact blocks may ever be shared between sequences.
"""

from __future__ import annotations


class BlockManager:
    """Hands out the blocks of one KV cache and counts the references to each.

    Every method takes explicit token counts, never an implied next token.

    Args:
        num_blocks: blocks in the cache, ids 0 … num_blocks - 1.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, "a cache has at least one block"
        assert block_size > 0, "a block holds at least one token"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.peak_used = 0
        # A stack: blocks used last are warm, and a cache that is lazily zero stays as small as it can.
        self._free = list(reversed(range(num_blocks)))
        self._references = [0] * num_blocks
        self._exact = [True] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: with block_size 16, 0 -> 0, 16 -> 1, 17 -> 2."""
        return -(-num_tokens // self.block_size)

    def missing(self, block_table: list[int], num_tokens: int) -> int:
        """Blocks that `block_table` lacks to hold `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(block_table))

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Extend `block_table` in place to hold `num_tokens` tokens; False, and nothing changed, if blocks run out."""
        missing = self.missing(block_table, num_tokens)
        if missing > len(self._free):
            return False
        exact = not block_table or self._exact[block_table[-1]]
        for _ in range(missing):
            block = self._free.pop()
            self._references[block] = 1
            self._exact[block] = exact
            block_table.append(block)
        self.peak_used = max(self.peak_used, self.num_blocks - len(self._free))
        return True

    def share(self, block_table: list[int]) -> list[int]:
        """A second holder of the same blocks. Only exact blocks can be shared."""
        assert all(self._exact[block] for block in block_table), "an inexact block must not be shared"
        for block in block_table:
            self._references[block] += 1
        return list(block_table)

    def release(self, block_table: list[int]) -> None:
        """Give back one reference to each block and empty the table in place."""
        for block in block_table:
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released more often than taken"
            if self._references[block] == 0:
                self._free.append(block)
        block_table.clear()

    def mark_inexact(self, block_table: list[int], position: int) -> None:
        """The KV at `position` is approximate: its block and all later ones of this sequence are no longer exact."""
        for block in block_table[position // self.block_size :]:
            assert self._references[block] == 1, f"block {block} is shared and must stay exact"
            self._exact[block] = False

    def is_exact(self, block: int) -> bool:
        """Whether this block, and all before it in its sequence, hold full-depth KV."""
        return self._exact[block]

    def check(self, tables: list[list[int]]) -> None:
        """Assert that the live `tables` and the free list account for every block, and that exactness is a prefix."""
        counted = [0] * self.num_blocks
        for table in tables:
            exact = [self._exact[block] for block in table]
            assert exact == sorted(exact, reverse=True), f"exactness is not a prefix property in {table}: {exact}"
            for block in table:
                counted[block] += 1
        assert counted == self._references, "the reference counts differ from what the live block tables hold"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert free == {b for b in range(self.num_blocks) if self._references[b] == 0}, "a block leaked"
