"""The rows in flight, one slot a running sequence. Regrouping them copies nothing in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class _Ran(NamedTuple):
    """What a pass left behind: hidden states [n, d] of its rows, and their step data."""

    hidden: Tensor
    batch: TokenBatch


class RowPool:
    """Device state of the rows of one iteration.

    A row stays where the last pass that it was in has put it: rows that go on together find their tensors as they are,
    and only those that part are gathered.

    Args:
        shape: of the cache that the rows point into.
        device: of the tensors.
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._places: dict[int, tuple[_Ran, int]] = {}  # by slot

    def begin(self, rows: Sequence[Row]) -> TokenBatch:
        """The step data of rows that begin an iteration."""
        positions = torch.tensor([row.position for row in rows], device=self._device)
        tables = padded([row.block_table for row in rows], self._shape.null_block).to(self._device)
        return TokenBatch.decode(positions, tables, self._shape.block_size)

    def keep(self, rows: Sequence[Row], hidden: Tensor, batch: TokenBatch) -> None:
        """Keep what a pass on `rows` gave, hidden states [n, d], and the step data it had."""
        ran = _Ran(hidden, batch)
        for i, row in enumerate(rows):
            self._places[row.slot] = ran, i

    def take(self, rows: Sequence[Row]) -> tuple[Tensor, TokenBatch]:
        """Hidden states [n, d] and step data of rows that have been kept, from whatever passes they come."""
        places = [self._places[row.slot] for row in rows]
        ran, indices = places[0][0], [i for _, i in places]
        if any(own is not ran for own, _ in places):
            return torch.stack([own.hidden[i] for own, i in places]), self.begin(rows)
        if indices == list(range(len(ran.hidden))):
            return ran
        index = torch.tensor(indices, device=self._device)
        return ran.hidden[index], ran.batch.take(index, max(len(row.block_table) for row in rows))


def padded(tables: Sequence[Sequence[int]], null_block: int) -> Tensor:
    """Block tables of unequal length as int64 [n, longest], padded with a block that is always zero."""
    width = max(map(len, tables))
    return torch.tensor([[*table, *[null_block] * (width - len(table))] for table in tables])
