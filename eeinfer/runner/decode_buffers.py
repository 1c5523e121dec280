"""What captured decode steps read and write: tensors whose addresses never change, and how a step's rows get in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eeinfer.core.plan import Row
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.runner.capture import Capture
from eeinfer.runner.row_pool import CacheShape


class DecodeBuffers:
    """Static tensors of the rows in flight, one slot a running sequence and a spare one for padding rows.

    A padding row is a row like any other: token 0 at position 0 in the spare slot, whose block table names nothing but
    the cache's trash block. So kernels need no test for it, and it meets no block of a sequence and not the null block.

    Args:
        shape: of the cache that the rows point into.
        max_position: longest context.
        hidden_size, vocab_size: of the model.
        dtype: of hidden states and logits.
        device: of everything.
        capture: takes inputs to the device.

    Attributes:
        width: blocks of the widest block table.
        hidden: [max_num_seqs + 1, d], by slot: rows that wait for their next stage, or for completion.
        logits: [max_num_seqs, V] of the last step that made any, by row.
        verdict: float64 [2 max_num_seqs]. A step on n rows leaves n scores and then n tokens (the argmax).
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        max_position: int,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        capture: Capture,
    ) -> None:
        rows = shape.max_num_seqs
        self._shape = shape
        self._capture = capture
        self._spare = rows
        self.width = min(shape.num_blocks, -(-max_position // shape.block_size))
        self.hidden = torch.zeros(rows + 1, hidden_size, dtype=dtype, device=device)
        self.logits = torch.zeros(rows, vocab_size, dtype=dtype, device=device)
        self.verdict = torch.zeros(2 * rows, dtype=torch.float64, device=device)
        self._positions = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._block_tables = torch.full((rows + 1, self.width), shape.null_block, device=device)
        self._block_tables[self._spare] = shape.trash_block
        # Slots, tokens and positions of a step's rows, then what changed: see `begin`.
        self._inputs = torch.zeros(rows * (3 + 3 * self.width), dtype=torch.int64, device=device)
        # The block table of each slot, as the device has it; None where that is not known.
        self._known: list[tuple[int, ...] | None] = [()] * rows

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        tensors = (self.hidden, self.logits, self.verdict, self._positions, self._block_tables, self._inputs)
        return sum(tensor.nbytes for tensor in tensors)

    # Between steps, on the host

    def blank(self, rows: int) -> None:
        """Make the next step one of `rows` padding rows, for warming up and capturing."""
        self._inputs[:rows].fill_(self._spare)
        self._inputs[rows : 3 * rows].zero_()

    def begin(self, rows: Sequence[Row], size: int) -> Tensor:
        """Take in the rows of a new iteration, padded to `size`, in one copy.

        Returns:
            The blocks that these rows are the first to write, int64 [m].
        """
        padding = [0] * (size - len(rows))
        changed = [row for row in rows if self._known[row.slot] != row.block_table]
        places, blocks = self._changes(changed)
        for row in changed:
            self._known[row.slot] = None  # should this be interrupted
        block_size = self._shape.block_size
        fresh = [
            block
            for row in rows
            if row.position % block_size == 0
            for block in row.block_table[row.position // block_size :]
        ]
        values = [
            *(row.slot for row in rows),
            *[self._spare] * len(padding),
            *(row.token for row in rows),
            *padding,
            *(row.position for row in rows),
            *padding,
            *places,
            *blocks,
            *fresh,
        ]
        beyond = self._capture.upload(values, self._inputs)[3 * size :]
        at, becomes, first_written = beyond.split([len(places), len(blocks), len(fresh)])
        if places:
            self._block_tables.view(-1).index_copy_(0, at, becomes)
        for row in changed:
            self._known[row.slot] = row.block_table
        return first_written

    def point(self, rows: Sequence[Row], size: int) -> None:
        """Make the next step one on these rows of the iteration that began last, padded to `size`."""
        self.upload([*(row.slot for row in rows), *[self._spare] * (size - len(rows))])

    def upload(self, values: Sequence[int]) -> Tensor:
        """`values` on the device, until the next call of any of these methods."""
        return self._capture.upload(values, self._inputs)

    def _changes(self, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
        """Where block tables on the device differ from those of `rows`, as flat indices, and the right blocks there."""
        places: list[int] = []
        blocks: list[int] = []
        for row in rows:
            known, table = self._known[row.slot], row.block_table
            same, end = 0, self.width
            if known is not None:
                same = len(known) if table[: len(known)] == known else 0
                end = max(len(known), len(table))
            first = row.slot * self.width
            places += range(first + same, first + end)
            blocks += [*table[same:], *[self._shape.null_block] * (end - len(table))]
        return places, blocks

    # Within a step, on the device: nothing here depends on values

    def slots(self, rows: int) -> Tensor:
        """Slots of the step's rows, int64 [rows]."""
        return self._inputs[:rows]

    def tokens(self, rows: int) -> Tensor:
        """Tokens of the rows of a new iteration, int64 [rows]. Their positions are kept from here on."""
        self._positions.index_copy_(0, self.slots(rows), self._inputs[2 * rows : 3 * rows])
        return self._inputs[rows : 2 * rows]

    def batch(self, rows: int, width: int) -> TokenBatch:
        """The step data of the step's rows, whose contexts fit `width` blocks."""
        slots = self.slots(rows)
        tables = self._block_tables[:, :width].index_select(0, slots)
        return TokenBatch.decode(self._positions.index_select(0, slots), tables, self._shape.block_size)

    def load(self, rows: int) -> Tensor:
        """Hidden states [rows, d] of the step's rows."""
        return self.hidden.index_select(0, self.slots(rows))

    def store(self, hidden: Tensor) -> None:
        """Keep the hidden states [n, d] of the step's n rows."""
        self.hidden.index_copy_(0, self.slots(len(hidden)), hidden)

    def tell(self, scores: Tensor, logits: Tensor | None, argmax: Tensor | None) -> None:
        """Leave the verdict on n rows: `scores` [n], and where there are any, `logits` [n, V] and `argmax` [n]."""
        n = len(scores)
        self.verdict[:n].copy_(scores)
        if logits is not None and argmax is not None:
            self.verdict[n : 2 * n].copy_(argmax)
            self.logits[:n].copy_(logits)
