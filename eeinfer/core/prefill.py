"""A Prefill in the making: whose tokens run, up to the budget, and which blocks newcomers find in the cache."""

from __future__ import annotations

from typing import NamedTuple

from eeinfer.core.block_manager import BlockManager
from eeinfer.core.plan import Prefill, Span
from eeinfer.core.sequence import Sequence


class Prefix(NamedTuple):
    """What a sequence finds in the cache.

    Attributes:
        blocks: that it can share, the first ones of its block table.
        num_tokens: whose KV they hold for it.
    """

    blocks: list[int]
    num_tokens: int


class PrefillDraft:
    """Collects spans.

    Args:
        blocks: the KV blocks.
        budget: most tokens in one Prefill.
        full_depth: layers of the model.
        approximate: completion leaves KV that differs from a full-depth pass.

    Attributes:
        budget: tokens that can still be added.
    """

    def __init__(self, blocks: BlockManager, budget: int, full_depth: int, *, approximate: bool) -> None:
        self.budget = budget
        self._blocks = blocks
        self._full_depth = full_depth
        self._approximate = approximate
        self._spans: list[Span] = []
        self._copies: list[tuple[int, int]] = []
        self._written: dict[bytes, int] = {}  # full, exact blocks as they will be after this plan, by hash

    def plan(self) -> Prefill | None:
        """What was collected; None when that is nothing."""
        return Prefill(tuple(self._spans), tuple(self._copies)) if self._spans else None

    def find(self, sequence: Sequence) -> Prefix:
        """The longest prefix of a sequence whose KV is in the cache, or will be after this plan.

        It ends where the sequence's own KV is no longer exact. A sequence that wants its first token keeps one token to
        compute, so that there are logits: its last block is then to be written, and comes from the cache proper, where
        what it holds can be copied. Blocks that this very plan fills serve only up to the token before the last, so
        that a sequence waits for its own commit before it counts as complete.
        """
        blocks, target = self._blocks, sequence.prefill_target
        if not blocks.prefix_cache:
            return Prefix([], 0)
        size, found = blocks.block_size, []
        hashes = blocks.extend_hashes(sequence.block_hashes, sequence.tokens, target)
        for i, block_hash in enumerate(hashes[: min(target, self._exact_tokens(sequence)) // size]):
            block = blocks.find(block_hash)
            if block is None and i < (target - 1) // size:
                block = self._written.get(block_hash)
            if block is None:
                break
            found.append(block)
        return Prefix(found, min(len(found) * size, target - (not sequence.depths)))

    def blocks_needed(self, sequence: Sequence, prefix: Prefix) -> int:
        """Free blocks that it takes to seat a sequence with this prefix."""
        shared = prefix.blocks
        idle = sum(not self._blocks.is_held(block) for block in shared)
        copied = self._writes_into(prefix) and self._blocks.is_held(shared[-1])
        return self._blocks.missing(shared, sequence.prefill_target) + idle + copied

    def seat(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give a sequence its blocks; there must be as many free as `blocks_needed`."""
        sequence.block_table = self._blocks.share(prefix.blocks)
        sequence.num_cached = prefix.num_tokens
        if self._writes_into(prefix) and (pair := self._blocks.own(sequence.block_table, len(prefix.blocks) - 1)):
            self._copies.append(pair)
        grown = self._blocks.grow(sequence.block_table, sequence.prefill_target)
        assert grown, "a sequence is seated where its blocks are free"

    def add(self, sequence: Sequence) -> None:
        """Run as many of a seated sequence's tokens as the budget allows; none if they are all in the cache."""
        start, target = sequence.num_cached, sequence.prefill_target
        stop = min(target, start + self.budget)
        if start == stop:
            return
        self.budget -= stop - start
        full = self._full_depth
        wants_token = stop == target and not sequence.depths
        span = Span(
            slot=sequence.slot,
            tokens=tuple(sequence.tokens[start:stop]),
            start=start,
            block_table=tuple(sequence.block_table),
            depths=tuple(sequence.depth_at(p, full) if self._approximate else full for p in range(start, stop)),
            draw=sequence.draw() if wants_token else None,
        )
        self._spans.append(span)
        if self._blocks.prefix_cache:
            exact = min(stop, self._exact_tokens(sequence))
            hashes = self._blocks.extend_hashes(sequence.block_hashes, sequence.tokens, exact)
            for block_hash, block in zip(hashes[: exact // self._blocks.block_size], span.block_table, strict=False):
                self._written.setdefault(block_hash, block)

    def _writes_into(self, prefix: Prefix) -> bool:
        return prefix.num_tokens < len(prefix.blocks) * self._blocks.block_size

    def _exact_tokens(self, sequence: Sequence) -> int:
        return sequence.exact_tokens(self._full_depth) if self._approximate else len(sequence.tokens)
