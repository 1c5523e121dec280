"""The tokens of a prefill, of which fewer and fewer go on when a preempted sequence is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from torch import Tensor

from eeinfer.core.plan import Span
from eeinfer.ops.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class SpanTokens:
    """Flat lists over tokens, in the order of their spans and positions.

    Attributes:
        owners: index of each token's span.
        positions: in its sequence.
        depths: layers to run for it.
    """

    owners: list[int]
    positions: list[int]
    depths: list[int]

    @classmethod
    def of(cls, spans: Sequence[Span]) -> SpanTokens:
        """All tokens of `spans`."""
        return cls(
            [i for i, span in enumerate(spans) for _ in span.tokens],
            [span.start + j for span in spans for j in range(len(span.tokens))],
            [depth for span in spans for depth in span.depths],
        )

    def stopping_at(self, depth: int) -> list[int]:
        """Indices of the tokens that run `depth` layers and no more."""
        return [i for i, own in enumerate(self.depths) if own == depth]

    def beyond(self, depth: int) -> list[int]:
        """Indices of the tokens that run more than `depth` layers."""
        return [i for i, own in enumerate(self.depths) if own > depth]

    def take(self, indices: Sequence[int]) -> SpanTokens:
        """The tokens at these indices."""
        return SpanTokens(*([values[i] for i in indices] for values in (self.owners, self.positions, self.depths)))

    def batch(self, block_tables: Tensor, block_size: int) -> TokenBatch:
        """The step data; `block_tables` [spans, width] has one row a span."""
        owned = zip(self.owners, self.positions, strict=True)
        groups = {owner: [p for _, p in group] for owner, group in groupby(owned, key=itemgetter(0))}
        return TokenBatch.ragged(list(groups.values()), block_tables[list(groups)], block_size)

    def last_of(self, owner: int) -> int:
        """Index of the last token of a span that still has one."""
        return len(self.owners) - 1 - self.owners[::-1].index(owner)
