"""The data of one step, passed as an argument to whatever needs it: which tokens, where they read and write KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor


def slot_of(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Flat KV slots [n] of `positions` [n], given the block table of each token's sequence [n, width].

    With block_size 16, position 35 of a sequence with table [7, 2, 9] lies in block 9 at offset 3: slot 147.
    """
    blocks = block_tables.gather(1, (positions // block_size)[:, None]).squeeze(1)
    return blocks * block_size + positions % block_size


@dataclass(frozen=True, eq=False)  # without slots, for what is computed on first use
class TokenBatch:
    """A flat, ragged set of tokens of several sequences.

    A token sees the keys of its sequence up to its own position, or the last `window` of them.

    Attributes:
        positions: [n] int64, place of each token in its sequence.
        slots: [n] int64, where its K and V are written.
        block_tables: [sequences, width] int64, padded with a block of zeros.
        block_size: tokens in a block.
        queries: for each sequence, its tokens in the flat order as (start, stop). `None`: one token a sequence
            (decode).
        contexts: for each sequence, how many of its keys its last token sees without a window. Empty with `queries`
            None.
        owners: [n] int64, increasing, row of `block_tables` of each token; `None` where that is the token's own index.
        window: how many keys a token sees, its own included; None for all.
        turns: how each kind of layer turns the tokens' heads, once a decoder has worked it out.
    """

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    block_size: int
    queries: tuple[tuple[int, int], ...] | None = None
    contexts: tuple[int, ...] = ()
    owners: Tensor | None = None
    window: int | None = None
    turns: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)

    @classmethod
    def decode(cls, positions: Tensor, block_tables: Tensor, block_size: int) -> TokenBatch:
        """One token a sequence, at `positions` [n], with `block_tables` [n, width]."""
        return cls(positions, slot_of(block_tables, positions, block_size), block_tables, block_size)

    def take(self, index: Tensor, width: int) -> TokenBatch:
        """Some tokens of a decode, `index` [m], whose block tables are at most `width` long."""
        assert self.queries is None, "one token a sequence"
        return TokenBatch(self.positions[index], self.slots[index], self.block_tables[index, :width], self.block_size)

    @classmethod
    def ragged(cls, positions: Sequence[Sequence[int]], block_tables: Tensor, block_size: int) -> TokenBatch:
        """Tokens at increasing `positions[i]` of sequence i, whose block table is `block_tables[i]` [width]."""
        device = block_tables.device
        flat = torch.tensor([p for row in positions for p in row], device=device)
        owner = torch.repeat_interleave(torch.tensor([len(row) for row in positions])).to(device)
        stops = list(accumulate(map(len, positions)))
        return cls(
            *(flat, slot_of(block_tables[owner], flat, block_size), block_tables, block_size),
            queries=tuple(pairwise((0, *stops))),
            contexts=tuple(row[-1] + 1 for row in positions),
            owners=owner,
        )

    def within(self, window: int | None) -> TokenBatch:
        """The same tokens, each of which sees only the last `window` keys up to its own; None for all of them."""
        return self if window is None else replace(self, window=window)

    @cached_property
    def masks(self) -> tuple[Tensor | None, ...]:
        """The keys that each token sees, for attention that reads masks: made when first asked for.

        For each sequence [queries, context] bool; `None` where the queries are the whole context from position 0 on
        and within the window. With `queries` None a single mask [n, 1, 1, width * block_size].
        """
        if self.queries is None:
            return (self._mask(self.positions, self.block_tables.shape[1] * self.block_size)[:, None, None],)
        return tuple(
            None
            if stop - start == context and (self.window is None or context <= self.window)
            else self._mask(self.positions[start:stop], context)
            for (start, stop), context in zip(self.queries, self.contexts, strict=True)
        )

    def _mask(self, positions: Tensor, context: int) -> Tensor:
        """Which of so many keys the tokens at `positions` [n] see, [n, context]."""
        keys, positions = torch.arange(context, device=positions.device), positions[:, None]
        seen = keys <= positions
        return seen if self.window is None else seen & (keys > positions - self.window)
