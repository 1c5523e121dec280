"""Paged KV blocks: who holds which, how often, whether what they hold is exact, and which can be found again.

A *block* is room for `block_size` consecutive tokens of one sequence, in all layers. A sequence's `block_table` lists
its blocks in order: token position p lives in `block_table[p // block_size]`, at offset `p % block_size`.

A block is *exact* while every token in it, and every token before it, has the KV that a full-depth pass writes. That
is a property of prefixes: KV filled in for skipped layers is an approximation, and what attends to it is one too.
Only exact blocks may ever be shared between sequences.

The *prefix cache* is an index of full, exact blocks by the hash of everything up to their last token (chained hashes,
as in vLLM's automatic prefix caching). A cached block that nobody holds counts as free, but keeps what it holds until
it is evicted, least recently used first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


class BlockManager:
    """Hands out the blocks of one KV cache, counts the references to each and finds those of a known prefix.

    Every method takes explicit token counts, never an implied next token.

    Args:
        num_blocks: blocks in the cache, ids 0 … num_blocks - 1.
        block_size: tokens in a block.
        prefix_cache: whether blocks are to be found again; for those who would have to `cache` them.

    Attributes:
        peak_used: most blocks held at once.
        evictions: times a cached block was given to another use.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        assert num_blocks > 0, "a cache has at least one block"
        assert block_size > 0, "a block holds at least one token"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.peak_used = 0
        self.evictions = 0
        # A stack: blocks used last are warm, and a cache that is lazily zero stays as small as it can.
        self._free = list(reversed(range(num_blocks)))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and held by nobody, least recently used first
        self._references = [0] * num_blocks
        self._exact = [True] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks  # of cached blocks
        self._cached: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: with block_size 16, 0 -> 0, 16 -> 1, 17 -> 2."""
        return -(-num_tokens // self.block_size)

    def missing(self, block_table: list[int], num_tokens: int) -> int:
        """Blocks that `block_table` lacks to hold `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(block_table))

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Extend `block_table` in place to hold `num_tokens` tokens; False, and nothing changed, if blocks run out."""
        missing = self.missing(block_table, num_tokens)
        if missing > self.num_free:
            return False
        exact = not block_table or self._exact[block_table[-1]]
        block_table.extend([self._take(exact=exact) for _ in range(missing)])
        self._note_peak()
        return True

    def share(self, block_table: Sequence[int]) -> list[int]:
        """A second holder of the same blocks, or the first of cached ones. Only exact blocks can be shared."""
        assert all(self._exact[block] for block in block_table), "an inexact block must not be shared"
        for block in block_table:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1
        self._note_peak()
        return list(block_table)

    def own(self, block_table: list[int], index: int) -> tuple[int, int] | None:
        """Make the block at `index` one that its holder may write: copy-on-write.

        Returns:
            (block, copy) when others hold it: the table now has `copy`, into which the caller copies what `block`
            holds. None when nobody else does: it is no longer cached. There must be a free block.
        """
        block = block_table[index]
        if self._references[block] == 1:
            self._forget(block)
            return None
        self._references[block] -= 1
        block_table[index] = self._take(exact=True)
        self._note_peak()
        return block, block_table[index]

    def release(self, block_table: list[int]) -> None:
        """Give back one reference to each block and empty the table in place; cached blocks can still be found."""
        for block in reversed(block_table):  # a prefix is of use without what follows, and is evicted after it
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released more often than taken"
            if self._references[block] == 0:
                if self._digests[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None
        block_table.clear()

    def mark_inexact(self, block_table: list[int], position: int) -> None:
        """The KV at `position` is approximate: its block and all later ones of this sequence are no longer exact."""
        for block in block_table[position // self.block_size :]:
            assert self._references[block] == 1, f"block {block} is shared and must stay exact"
            assert self._digests[block] is None, f"block {block} is cached and must stay exact"
            self._exact[block] = False

    def is_exact(self, block: int) -> bool:
        """Whether this block, and all before it in its sequence, hold full-depth KV."""
        return self._exact[block]

    def is_held(self, block: int) -> bool:
        """Whether somebody holds this block."""
        return self._references[block] > 0

    # Prefix cache

    def extend_hashes(self, hashes: list[bytes], tokens: Sequence[int], num_tokens: int) -> list[bytes]:
        """Extend `hashes` in place by those of the full blocks of `tokens[:num_tokens]`, and return it.

        The hash of a block covers that of the block before it and its own token ids, so equal hashes mean equal
        prefixes: 32 bytes of BLAKE2b do not collide, by chance or on purpose.
        """
        size = self.block_size
        for start in range(len(hashes) * size, num_tokens - size + 1, size):
            digest = blake2b(hashes[-1] if hashes else b"", digest_size=32)
            digest.update(array("q", tokens[start : start + size]).tobytes())
            hashes.append(digest.digest())
        return hashes

    def find(self, block_hash: bytes) -> int | None:
        """The cached block with this hash."""
        return self._cached.get(block_hash)

    def cache(self, block_table: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Let the first `len(hashes)` blocks be found by their hashes, as far as they are exact.

        Their KV is complete, and finite as far as anybody knows. Where a hash is known already, the block that has it
        stays the one that is found.
        """
        for block, block_hash in zip(block_table, hashes, strict=False):
            if not self._exact[block]:
                return
            if self._digests[block] is None and block_hash not in self._cached:
                self._digests[block] = block_hash
                self._cached[block_hash] = block

    def check(self, tables: list[list[int]]) -> None:
        """Assert that the live `tables`, the free list and the index account for every block, and what is exact."""
        counted = [0] * self.num_blocks
        for table in tables:
            exact = [self._exact[block] for block in table]
            assert exact == sorted(exact, reverse=True), f"exactness is not a prefix property in {table}: {exact}"
            for block in table:
                counted[block] += 1
        assert counted == self._references, "the reference counts differ from what the live block tables hold"
        free = {*self._free, *self._idle}
        assert len(free) == self.num_free, "a block is free twice"
        assert free == {b for b in range(self.num_blocks) if self._references[b] == 0}, "a block leaked"
        indexed = {block: digest for digest, block in self._cached.items()}
        assert indexed == {b: d for b, d in enumerate(self._digests) if d is not None}, "the index is wrong"
        assert self._idle.keys() == indexed.keys() & free, "a cached block that nobody holds cannot be evicted"
        assert all(self._exact[block] for block in indexed), "an inexact block is cached"

    def _take(self, *, exact: bool) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self.evictions += 1
        self._references[block] = 1
        self._exact[block] = exact
        return block

    def _forget(self, block: int) -> None:
        if (digest := self._digests[block]) is not None:
            del self._cached[digest]
            self._digests[block] = None

    def _note_peak(self) -> None:
        self.peak_used = max(self.peak_used, self.num_blocks - self.num_free)
