"""The data of one step, passed as an argument to whatever needs it: which tokens, where they read and write KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


def slot_of(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Flat KV slots [n] of `positions` [n], given the block table of each token's sequence [n, width].

    With block_size 16, position 35 of a sequence with table [7, 2, 9] lies in block 9 at offset 3: slot 147.
    """
    blocks = block_tables.gather(1, (positions // block_size)[:, None]).squeeze(1)
    return blocks * block_size + positions % block_size


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """A flat, ragged set of tokens of several sequences.

    Attributes:
        positions: [n] int64, place of each token in its sequence.
        slots: [n] int64, where its K and V are written.
        block_tables: [sequences, width] int64, padded with a block of zeros.
        queries: for each sequence, its tokens in the flat order as (start, stop). `None`: one token a sequence
            (decode).
        masks: for each sequence the keys each query sees, [queries, context] bool; `None` where the queries are the
            whole context from position 0 on. With `queries` None a single mask [n, 1, 1, width * block_size].
        owners: [n] int64, row of `block_tables` of each token; `None` where that is the token's own index.
        turns: how each kind of layer turns the tokens' heads, once a decoder has worked it out.
    """

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    queries: tuple[tuple[int, int], ...] | None
    masks: tuple[Tensor | None, ...]
    owners: Tensor | None = None
    turns: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)

    @classmethod
    def decode(cls, positions: Tensor, block_tables: Tensor, block_size: int) -> TokenBatch:
        """One token a sequence, at `positions` [n], with `block_tables` [n, width]."""
        keys = torch.arange(block_tables.shape[1] * block_size, device=positions.device)
        mask = (keys <= positions[:, None])[:, None, None]
        return cls(positions, slot_of(block_tables, positions, block_size), block_tables, None, (mask,))

    def take(self, index: Tensor, width: int) -> TokenBatch:
        """Some tokens of a decode, `index` [m], whose block tables are at most `width` long."""
        (mask,) = self.masks
        assert self.queries is None, "one token a sequence"
        assert mask is not None, "a decode has a mask"
        keys = mask.shape[-1] // self.block_tables.shape[1] * width
        return TokenBatch(
            self.positions[index], self.slots[index], self.block_tables[index, :width], None, (mask[index, ..., :keys],)
        )

    @classmethod
    def ragged(cls, positions: Sequence[Sequence[int]], block_tables: Tensor, block_size: int) -> TokenBatch:
        """Tokens at increasing `positions[i]` of sequence i, whose block table is `block_tables[i]` [width]."""
        device = block_tables.device
        flat = torch.tensor([p for row in positions for p in row], device=device)
        owner = torch.repeat_interleave(torch.tensor([len(row) for row in positions])).to(device)
        queries, masks, start = [], [], 0
        for row in positions:
            stop = start + len(row)
            queries.append((start, stop))
            masks.append(_causal_mask(flat[start:stop], row))
            start = stop
        return cls(
            flat, slot_of(block_tables[owner], flat, block_size), block_tables, tuple(queries), tuple(masks), owner
        )

    def within(self, window: int | None) -> TokenBatch:
        """The same tokens, each of which sees only the last `window` keys up to its own; None for all of them."""
        if window is None:
            return self
        if self.queries is None:
            return replace(self, masks=tuple(_narrowed(mask, self.positions, window) for mask in self.masks))
        masks = tuple(
            _windowed(mask, self.positions[start:stop], window)
            for (start, stop), mask in zip(self.queries, self.masks, strict=True)
        )
        return replace(self, masks=masks)


def _narrowed(mask: Tensor | None, positions: Tensor, window: int) -> Tensor | None:
    """The mask of a decode, [n, 1, 1, keys], cut to a window."""
    if mask is None or mask.shape[-1] <= window:
        return mask
    keys = torch.arange(mask.shape[-1], device=positions.device)
    return mask & (keys > (positions - window)[:, None])[:, None, None]


def _windowed(mask: Tensor | None, positions: Tensor, window: int) -> Tensor | None:
    """The mask of one sequence's queries at `positions` [queries], cut to a window; see `TokenBatch.masks`."""
    context = len(positions) if mask is None else mask.shape[-1]
    if context <= window:
        return mask
    keys = torch.arange(context, device=positions.device)
    seen = keys > (positions - window)[:, None]
    return seen & (keys <= positions[:, None]) if mask is None else seen & mask


def _causal_mask(queries: Tensor, positions: Sequence[int]) -> Tensor | None:
    context = positions[-1] + 1
    if len(positions) == context:
        return None
    return torch.arange(context, device=queries.device) <= queries[:, None]
