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
    """Size of the paged cache: blocks that can be handed out, tokens in a block, and the most sequences in flight."""

    num_blocks: int
    block_size: int
    max_num_seqs: int


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
