"""The rows in flight, one slot a running sequence: regrouping rows is a new list of slots, and nothing else moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eeinfer.core.plan import Row
from eeinfer.ops.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Size of the paged cache: blocks that can be handed out, tokens in a block, and the most sequences in flight.

    Two blocks more are allocated. The null block stays zero: the padding of block tables names it. The trash block
    takes what padding rows write, and nothing else names it.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int

    @classmethod
    def of(cls, cache: Tensor, max_num_seqs: int) -> CacheShape:
        """The shape of a cache [layers, 2, blocks, block_size, kv_heads, head_dim]."""
        return cls.fitted(cache.shape[2] - 2, cache.shape[3], max_num_seqs)

    @classmethod
    def fitted(cls, num_blocks: int, block_size: int, max_num_seqs: int) -> CacheShape:
        """With as many sequences as there are blocks at most: each in flight holds one or more."""
        return cls(num_blocks, block_size, min(max_num_seqs, num_blocks))

    @property
    def allocated(self) -> int:
        """All blocks."""
        return self.num_blocks + 2

    @property
    def null_block(self) -> int:
        """The block that is always zero."""
        return self.num_blocks

    @property
    def trash_block(self) -> int:
        """The block that is never read for a sequence."""
        return self.num_blocks + 1


class RowPool:
    """Device state of the rows of one iteration.

    Args:
        shape: of the cache that the rows point into.
        max_position: longest context.
        hidden_size, dtype, device: of the hidden states.
    """

    def __init__(
        self, shape: CacheShape, max_position: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        width = min(shape.num_blocks, -(-max_position // shape.block_size))
        self._hidden = torch.zeros(shape.max_num_seqs, hidden_size, dtype=dtype, device=device)
        self._positions = torch.zeros(shape.max_num_seqs, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(shape.max_num_seqs, width, dtype=torch.int64, device=device)

    def begin(self, rows: Sequence[Row]) -> None:
        """Take in the rows of a new iteration."""
        slots = self.slots(rows)
        device = slots.device
        self._positions[slots] = torch.tensor([row.position for row in rows], device=device)
        tables = padded([row.block_table for row in rows], self._shape.num_blocks).to(device)
        self._block_tables[slots, : tables.shape[1]] = tables

    def slots(self, rows: Sequence[Row]) -> Tensor:
        """Slots of `rows`, int64 [n]."""
        return torch.tensor([row.slot for row in rows], device=self._hidden.device)

    def batch(self, rows: Sequence[Row], slots: Tensor) -> TokenBatch:
        """The step data of these rows, wide enough for the longest of them."""
        width = max(len(row.block_table) for row in rows)
        return TokenBatch.decode(self._positions[slots], self._block_tables[slots, :width], self._shape.block_size)

    def load(self, slots: Tensor) -> Tensor:
        """Hidden states [n, d] of the rows in `slots`."""
        return self._hidden[slots]

    def store(self, slots: Tensor, hidden: Tensor) -> None:
        """Keep the hidden states [n, d] of the rows in `slots`."""
        self._hidden[slots] = hidden


def padded(tables: Sequence[Sequence[int]], null_block: int) -> Tensor:
    """Block tables of unequal length as int64 [n, longest], padded with a block that is always zero."""
    width = max(map(len, tables))
    return torch.tensor([[*table, *[null_block] * (width - len(table))] for table in tables])
