"""What becomes of the KV of the layers that a token skipped.

propagate  each skipped layer normalises and projects the exit's hidden state with its own weights (CALM's state
           propagation, arXiv 2207.07061; the most plausible reading of arXiv 2407.20272)
learned    as propagate, and corrected by maps that were fitted to the model's own KV (`eeinfer.exits.learned_kv`)
copy       K and V of the last layer that ran are copied upward (DREX, arXiv 2512.15705)
oracle     the skipped layers run after all: exact KV, no saving; for debugging, and the upper bound of quality
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from eeinfer.exits.learned_kv import LearnedKV
from eeinfer.ops.token_batch import TokenBatch


class Layers(Protocol):
    """What completion asks of the model."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""

    def run(self, layers: range, hidden: Tensor, batch: TokenBatch, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Run consecutive layers, writing their KV; see `eeinfer.model.decoder.Decoder.run`."""

    def project_kv(self, first_layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V that the layers from `first_layer` on make of `hidden`; see `eeinfer.model.decoder.Decoder`."""

    def turned(self, first_layer: int, k: Tensor, positions: Tensor) -> Tensor:
        """K of the layers from `first_layer` on, turned by positions; see `eeinfer.model.decoder.Decoder`."""

    def store_layers(self, first_layer: int, k: Tensor, v: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Write K and V into the layers from `first_layer` on; see `eeinfer.model.decoder.Decoder`."""


def complete(
    completion: str,
    model: Layers,
    first_layer: int,
    hidden: Tensor,
    batch: TokenBatch,
    cache: Tensor,
    learned: LearnedKV | None,
) -> None:
    """Fill the KV of the layers from `first_layer` on for tokens that left before it.

    Args:
        completion: a name of `eeinfer.config.schema.Completion`.
        model: whose layers they are.
        first_layer: the first skipped layer, which is the count of layers that ran.
        hidden: [n, d], the tokens' hidden states at their exit.
        batch: the n tokens.
        cache: [layers, 2, num_blocks, block_size, kv_heads, head_dim], written in place.
        learned: the correction of the exit, for `learned`; None where there is none: its KV is propagated.
    """
    match completion:
        case "oracle":
            model.run(range(first_layer, model.num_layers), hidden, batch, cache)
        case "propagate" | "learned":
            k, v = model.project_kv(first_layer, hidden, batch.positions)
            if completion == "learned" and learned is not None:
                k_shift, v_shift = learned.shift(hidden)
                k[1:] = torch.addcmul(model.turned(first_layer + 1, k_shift, batch.positions), k[1:], learned.scale[0])
                v[1:] = torch.addcmul(v_shift, v[1:], learned.scale[1])
            model.store_layers(first_layer, k, v, batch.slots, cache)
        case "copy":
            last = cache[first_layer - 1].flatten(1, 2)[:, batch.slots]
            k, v = (half.expand(model.num_layers - first_layer, -1, -1, -1) for half in last)
            model.store_layers(first_layer, k, v, batch.slots, cache)
        case _:
            raise AssertionError(f"no completion is known by the name {completion}")
