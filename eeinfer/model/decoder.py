"""The decoder: one loop over layers that serves prefill, decode, replay, completion and tuning alike."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eeinfer.model.families import ModelConfig
from eeinfer.model.weights import LayerWeights, Weights, layer_views
from eeinfer.ops.attention import paged_attention, store_kv
from eeinfer.ops.norm import at_least_float32, rms_norm
from eeinfer.ops.rope import SCALINGS, inverse_frequencies, rotate, rotations
from eeinfer.ops.token_batch import TokenBatch


class Decoder:
    """A pre-norm transformer with rotary positions, grouped query heads and a gated MLP.

    A trait of the family is a tensor that is there or not: biases, and norms of the heads of q and k before rotation.

    Args:
        config: sizes and traits.
        weights: on one device, in one number type.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._layers = layer_views(weights, config.num_layers)
        plain = inverse_frequencies(config.head_dim, config.rope_theta)
        scaled = SCALINGS[config.rope_scaling["rope_type"]](plain, config.rope_scaling)
        self._frequencies = scaled.to(weights.embedding.device)
        self._head_sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.config.num_layers

    @property
    def dtype(self) -> torch.dtype:
        """Number type of weights, hidden states and cache."""
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [n, d] of token ids [n]."""
        return F.embedding(tokens, self.weights.embedding)

    def run(self, layers: range, hidden: Tensor, batch: TokenBatch, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Run consecutive layers on a flat, ragged set of tokens. The only layer loop there is.

        Args:
            layers: which ones; not empty.
            hidden: [n, d], the output of the layer before the first (or the embeddings).
            batch: the n tokens.
            cache: [L, 2, num_blocks, block_size, kv_heads, head_dim]; the tokens' K and V are written in place.

        Returns:
            The output of the last of the layers, and that of the one before it (or `hidden`), [n, d] each.
        """
        rotation = rotations(batch.positions, self._frequencies, hidden.dtype)
        before = hidden
        for index in layers:
            before = hidden
            hidden = self._layer(self._layers[index], hidden, batch, cache[index], rotation)
        return hidden, before

    def _layer(
        self, w: LayerWeights, hidden: Tensor, batch: TokenBatch, cache: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        config = self.config
        normed = rms_norm(hidden, w.attention_norm, config.norm_eps)
        q, k, v = F.linear(normed, w.qkv, w.qkv_bias).split(self._head_sizes, dim=-1)
        q, k, v = (x.unflatten(-1, (-1, config.head_dim)) for x in (q, k, v))
        if w.q_norm is not None:
            q, k = rms_norm(q, w.q_norm, config.norm_eps), rms_norm(k, w.k_norm, config.norm_eps)
        attended = self.attend(rotate(q, rotation), rotate(k, rotation), v, cache, batch)
        hidden = hidden + F.linear(attended, w.output, w.output_bias)
        gate, up = F.linear(rms_norm(hidden, w.mlp_norm, config.norm_eps), w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, w.down, w.down_bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: TokenBatch) -> Tensor:
        """Attention of one layer: write K and V of the batch's n tokens, then read those of their sequences.

        Args:
            q: [n, heads, head_dim], rotated.
            k: [n, kv_heads, head_dim], rotated.
            v: [n, kv_heads, head_dim].
            cache: [2, num_blocks, block_size, kv_heads, head_dim], the layer's; written in place.
            batch: the n tokens.

        Returns:
            [n, heads * head_dim], before the output projection.
        """
        store_kv(cache, k, v, batch.slots)
        return paged_attention(q, cache, batch, self.config.head_dim**-0.5)

    def project_kv(self, first_layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K (rotated) and V that the layers from `first_layer` on make of the same hidden states, without running them.

        All of them share rms(hidden) (CALM's state propagation).

        Args:
            first_layer: first of the m layers up to the last.
            hidden: [n, d].
            positions: [n].

        Returns:
            [m, n, kv_heads, head_dim] each.
        """
        w, config = self.weights, self.config
        q_size = self._head_sizes[0]
        normed = _rms_norm_by_layer(hidden, w.attention_norm[first_layer:, None], config.norm_eps)
        # One product a layer: a batched one over this slice of the stack would copy it first, 3 to 20 times slower.
        kv = torch.stack([F.linear(x, weight) for x, weight in zip(normed, w.qkv[first_layer:, q_size:], strict=True)])
        if w.qkv_bias is not None:
            kv = kv + w.qkv_bias[first_layer:, None, q_size:]
        k, v = kv.unflatten(-1, (-1, config.head_dim)).chunk(2, dim=-2)
        if w.k_norm is not None:
            k = _rms_norm_by_layer(k, w.k_norm[first_layer:, None, None], config.norm_eps)
        return rotate(k, rotations(positions, self._frequencies, hidden.dtype)), v

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The norm before the model's own head, [n, d]."""
        return rms_norm(hidden, self.weights.final_norm, self.config.norm_eps)

    def vocabulary(self, normed: Tensor) -> Tensor:
        """Logits [n, V] of normalised hidden states [n, d]."""
        return F.linear(normed, self.weights.lm_head)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits [n, V] of its last layer's output [n, d]."""
        return self.vocabulary(self.final_norm(hidden))


def _rms_norm_by_layer(x: Tensor, gains: Tensor, eps: float) -> Tensor:
    """RMS norm with another gain in each of m layers, rounded once at the end; [m, ..., d].

    Args:
        x: [n, d], the same in all layers, or [m, ..., d].
        gains: [m, 1, ..., d], as many dimensions as the result.
        eps: added to the mean square.
    """
    wide = at_least_float32(x.dtype)
    return (rms_norm(x.to(wide), None, eps) * gains.to(wide)).to(x.dtype)
