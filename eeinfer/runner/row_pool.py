"""The rows in flight, one slot a running sequence: regrouping rows is a new list of slots, and nothing else moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eeinfer.core.plan import Row
from eeinfer.ops.token_batch import TokenBatch


class RowPool:
    """Device state of the rows of one iteration.

    Args:
        num_slots: most sequences in flight.
        width: most blocks of one sequence.
        block_size: tokens in a block.
        hidden_size, dtype, device: of the hidden states.
    """

    def __init__(
        self, num_slots: int, width: int, block_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._hidden = torch.zeros(num_slots, hidden_size, dtype=dtype, device=device)
        self._positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(num_slots, width, dtype=torch.int64, device=device)

    def begin(self, rows: Sequence[Row]) -> None:
        """Take in the rows of a new iteration."""
        slots = self.slots(rows)
        device = slots.device
        self._positions[slots] = torch.tensor([row.position for row in rows], device=device)
        tables = padded([row.block_table for row in rows]).to(device)
        self._block_tables[slots, : tables.shape[1]] = tables

    def slots(self, rows: Sequence[Row]) -> Tensor:
        """Slots of `rows`, int64 [n]."""
        return torch.tensor([row.slot for row in rows], device=self._hidden.device)

    def batch(self, rows: Sequence[Row], slots: Tensor) -> TokenBatch:
        """The step data of these rows, wide enough for the longest of them."""
        width = max(len(row.block_table) for row in rows)
        return TokenBatch.decode(self._positions[slots], self._block_tables[slots, :width], self._block_size)

    def load(self, slots: Tensor) -> Tensor:
        """Hidden states [n, d] of the rows in `slots`."""
        return self._hidden[slots]

    def store(self, slots: Tensor, hidden: Tensor) -> None:
        """Keep the hidden states [n, d] of the rows in `slots`."""
        self._hidden[slots] = hidden


def padded(tables: Sequence[Sequence[int]]) -> Tensor:
    """Block tables of unequal length as int64 [n, longest]; padding names block 0 and is never read."""
    width = max(map(len, tables))
    return torch.tensor([[*table, *[0] * (width - len(table))] for table in tables])
