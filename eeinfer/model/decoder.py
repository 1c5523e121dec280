"""The decoder: one loop over layers that serves prefill, decode, replay, completion and tuning alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from eeinfer.exits.gates import GateSpec, plain_gate
from eeinfer.model.families import ModelConfig
from eeinfer.model.native import Native
from eeinfer.model.weights import LayerWeights, Weights, layer_views
from eeinfer.ops.activation import ACTIVATIONS
from eeinfer.ops.logit_stats import LogitStats
from eeinfer.ops.norm import at_least_float32, layer_norm
from eeinfer.ops.parts import TORCH, Parts
from eeinfer.ops.rope import Rotary, rotary, rotate, rotations
from eeinfer.ops.token_batch import TokenBatch

Map = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]  # x, gain, bias, eps


class Decoder:
    """A transformer with grouped query heads, made of the parts that its family's traits ask for.

    A trait is a tensor that is there or not (biases, norms), or a function chosen here (norm, MLP, activation).

    Args:
        config: sizes and traits.
        weights: on one device, in one number type; gains may be wider.
        native: whole layers and the vocabulary product as native kernels; None: layers are made of torch's products and
            of `parts`.
        parts: what computes all but the products.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, native: Native | None = None, parts: Parts = TORCH
    ) -> None:
        self.config = config
        self.weights = weights
        self.native = native
        self.parts = parts
        self._layers = layer_views(weights, config.num_layers)
        self._layer = self._layer_of_parts if native is None else native.layers.layer
        plain = partial(F.embedding, weight=weights.embedding)
        self._embedded: Map = plain if native is None or native.embed is None else native.embed
        # Rounded as the embeddings are, which is how the families that have it were trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self._scale = config.attention_scale or config.head_dim**-0.5
        self._rms_norm: Norm = partial(_without_bias, parts.rms_norm)
        self._norm: Norm = self._rms_norm if config.norm == "rms" else layer_norm
        self._add_norm = partial(_add_rms_norm, parts) if config.norm == "rms" else _add_layer_norm
        self._activation: Map = (
            (lambda x: parts.gated(x, config.activation)) if config.gated else ACTIVATIONS[config.activation]
        )
        self._windows = config.windows or (None,) * config.num_layers
        self._rotaries = _rotaries(config, self.device)
        local = len(self._rotaries) - 1
        self._turned_by = [local if window else 0 for window in self._windows]

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
        return self.weights.final_norm.device

    @property
    def reads_whole_tables(self) -> bool:
        """Whether attention on a decode batch reads block tables to their end, and not to that of each row's context.

        Torch's does: it gathers and masks. So it is best given tables no wider than the longest context, and slots that
        a sequence has not written yet must hold numbers.
        """
        return self.native is None and self.parts.attention is TORCH.attention

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [n, d] of token ids [n]; learned positions are added by the first layer's `run`."""
        embedded = self._embedded(tokens)
        return embedded if self.config.embedding_scale == 1.0 else embedded * self._embedding_scale

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
        if self.weights.positions is not None and layers.start == 0:
            hidden = hidden + F.embedding(batch.positions, self.weights.positions)
        if not batch.turns:  # the stages of an iteration often run the same tokens
            batch.turns.extend(self._turns(batch.positions, hidden.dtype))
        batches = {window: batch.within(window) for window in set(self._windows[layers.start : layers.stop])}
        before = hidden
        for index in layers:
            before = hidden
            seen, turn = batches[self._windows[index]], batch.turns[self._turned_by[index]]
            hidden = self._layer(index, hidden, seen, cache[index], turn)
        return hidden, before

    def _turns(self, positions: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor] | None]:
        """The rotation of each kind of layer."""
        return [None if r is None else rotations(positions, r, dtype) for r in self._rotaries]

    def _layer_of_parts(
        self,
        index: int,
        hidden: Tensor,
        batch: TokenBatch,
        cache: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        w = self._layers[index]
        normed = self._normed(hidden, w.attention_norm, w.attention_norm_bias)
        projected = F.linear(normed, w.qkv, w.qkv_bias)
        attended = F.linear(self.attend(projected, w, cache, batch, rotation), w.output, w.output_bias)
        hidden, normed = self._added(hidden, self._normed(attended, w.post_attention_norm), w)
        inner = self._activation(F.linear(normed, w.gate_up, w.gate_up_bias))
        return hidden + self._normed(F.linear(inner, w.down, w.down_bias), w.post_mlp_norm)

    def _normed(self, x: Tensor, gain: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """The family's norm; `x` as it is where there is no gain."""
        return x if gain is None else self._norm(x, gain, bias, self.config.norm_eps)

    def _added(self, hidden: Tensor, delta: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        """The sum of both, and what the MLP reads of it."""
        if w.mlp_norm is None:
            hidden = hidden + delta
            return hidden, hidden
        return self._add_norm(hidden, delta, w.mlp_norm, w.mlp_norm_bias, self.config.norm_eps)

    def attend(
        self,
        projected: Tensor,
        w: LayerWeights,
        cache: Tensor,
        batch: TokenBatch,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Attention of one layer: write K and V of the batch's n tokens, then read those of their sequences.

        Args:
            projected: [n, (heads + 2 kv_heads) * head_dim], q, k and v side by side.
            w: the layer's.
            cache: [2, num_blocks, block_size, kv_heads, head_dim], the layer's; written in place.
            batch: the n tokens.
            rotation: of q and k; None where positions are not rotary.

        Returns:
            [n, heads * head_dim], before the output projection.
        """
        gains = None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
        q = self.parts.rotate_and_store(projected, cache, batch.slots, rotation, gains, self.config.norm_eps)
        return self.parts.attention(q, cache, batch, self._scale, self.config.attention_softcap)

    def project_kv(self, first_layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K (rotated) and V that the layers from `first_layer` on make of the same hidden states, without running them.

        All of them share the norm of `hidden` but for its gain (CALM's state propagation).

        Args:
            first_layer: first of the m layers up to the last.
            hidden: [n, d].
            positions: [n].

        Returns:
            [m, n, kv_heads, head_dim] each.
        """
        if self.native is not None:
            return self.native.layers.project_kv(first_layer, hidden, self._turns(positions, hidden.dtype)[0])
        k, v = self.unturned_kv(range(first_layer, self.num_layers), hidden)
        return self.turned(first_layer, k, positions), v

    def unturned_kv(self, layers: range, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """K before positions turn it, and V, that consecutive layers make of the same hidden states.

        Args:
            layers: m of them, whose plain weights are in memory.
            hidden: [n, d].

        Returns:
            [m, n, kv_heads, head_dim] each.
        """
        w, config, of = self.weights, self.config, slice(layers.start, layers.stop)
        q_size = config.num_heads * config.head_dim
        # One product a layer: a batched one over this slice of the stack would copy it first, 3 to 20 times slower.
        normed = self._normed_by_layer(layers, hidden)
        kv = torch.stack([F.linear(x, weight) for x, weight in zip(normed, w.qkv[of, q_size:], strict=True)])
        if w.qkv_bias is not None:
            kv = kv + w.qkv_bias[of, None, q_size:]
        k, v = kv.chunk(2, dim=-1)
        if w.k_norm is not None:
            pieces = k.unflatten(-1, (-1, w.k_norm.shape[-1]))
            k = _scaled(pieces, self._rms_norm, w.k_norm[of, None, None], None, config.norm_eps).flatten(-2)
        k, v = (x.unflatten(-1, (-1, config.head_dim)) for x in (k, v))
        return k, v

    def turned(self, first_layer: int, k: Tensor, positions: Tensor) -> Tensor:
        """K [m, n, kv_heads, head_dim] of the layers from `first_layer` on, turned by positions [n]."""
        rotation = self._turns_by_layer(first_layer, positions, k.dtype)
        return k if rotation is None else rotate(k, rotation)

    def store_layers(self, first_layer: int, k: Tensor, v: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Write K and V of n tokens into the layers from `first_layer` on.

        Args:
            first_layer: first of the m layers up to the last.
            k: [m, n, kv_heads, head_dim], rotated.
            v: alike.
            slots: [n] int64.
            cache: as for `run`.
        """
        self.parts.store_layers(cache[first_layer:], k, v, slots)

    def _normed_by_layer(self, layers: range, hidden: Tensor) -> Tensor:
        """What attention reads of `hidden` [n, d] in each of m layers, [m, n, d]."""
        w = self.weights
        if w.attention_norm is None:
            return hidden.expand(len(layers), *hidden.shape)
        of = slice(layers.start, layers.stop)
        bias = None if w.attention_norm_bias is None else w.attention_norm_bias[of, None]
        return _scaled(hidden, self._norm, w.attention_norm[of, None], bias, self.config.norm_eps)

    def _turns_by_layer(self, first_layer: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """The rotation of the layers from `first_layer` on: one for all, or stacked, [m, n, 1, rotary_dim / 2]."""
        turns = self._turns(positions, dtype)
        if len(turns) == 1:
            return turns[0]
        own = [turns[i] for i in self._turned_by[first_layer:]]
        cos, sin = (torch.stack([turn[part] for turn in own if turn is not None]) for part in (0, 1))
        return cos, sin

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The norm before the model's own head, [n, d]."""
        return self._normed(hidden, self.weights.final_norm, self.weights.final_norm_bias)

    def vocabulary(self, normed: Tensor) -> Tensor:
        """Logits [n, V] of normalised hidden states [n, d]."""
        product = F.linear(normed, self.weights.lm_head) if self.native is None else self.native.vocabulary(normed)
        return self.capped(product)

    def product(self, weight: Tensor) -> Map:
        """The product with another matrix [m, d], [n, d] to [n, m], as the model's own are computed."""
        if self.native is not None and weight.shape[1] % 2 == 0:
            return self.native.product(weight)
        return lambda x: F.linear(x, weight)

    def gate(self, spec: GateSpec, tensors: Mapping[str, Tensor], eps: float) -> Map:
        """A gate of an exit; see `eeinfer.exits.gates.plain_gate`."""
        return (plain_gate if self.native is None else self.native.gate)(spec, tensors, eps)

    def capped(self, logits: Tensor) -> Tensor:
        """Logits within the bound of the family, if it has one; any shape."""
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def logit_stats(self, logits: Tensor, *, second: bool, mean: bool) -> LogitStats:
        """Statistics of logits; see `eeinfer.ops.logit_stats`."""
        compute = self.parts.logit_stats if self.native is None else self.native.stats
        return compute(logits, second=second, mean=mean)

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Largest of the logits [n, V] of each row and its first index; NaN for rows that hold one."""
        return logits.max(dim=-1) if self.native is None else self.native.stats.largest(logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits [n, V] of its last layer's output [n, d]."""
        return self.vocabulary(self.final_norm(hidden))


def _rotaries(config: ModelConfig, device: torch.device) -> list[Rotary | None]:
    """How positions turn heads: in all layers alike, or without and then with a window."""
    if config.positions != "rotary":
        return [None]
    dim = config.rotary_dim or config.head_dim
    found = [rotary(dim, config.rope_theta, config.rope_scaling)]
    if config.local_rope_theta is not None:
        found.append(rotary(dim, config.local_rope_theta, {"rope_type": "default"}))
    return [r._replace(frequencies=r.frequencies.to(device)) for r in found]


def _without_bias(
    norm: Callable[[Tensor, Tensor | None, float], Tensor], x: Tensor, gain: Tensor | None, _: Tensor | None, eps: float
) -> Tensor:
    return norm(x, gain, eps)


def _add_rms_norm(
    parts: Parts, hidden: Tensor, delta: Tensor, gain: Tensor, _: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return parts.add_rms_norm(hidden, delta, gain, eps)


def _add_layer_norm(
    hidden: Tensor, delta: Tensor, gain: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    hidden = hidden + delta
    return hidden, layer_norm(hidden, gain, bias, eps)


def _scaled(x: Tensor, norm: Norm, gains: Tensor, biases: Tensor | None, eps: float) -> Tensor:
    """A norm with another gain and bias in each of m layers, rounded once at the end; [m, ..., d].

    Args:
        x: [n, d], the same in all layers, or [m, ..., d].
        norm: without gain and bias.
        gains: [m, 1, ..., d], as many dimensions as the result.
        biases: alike, or None.
        eps: of the norm.
    """
    wide = at_least_float32(x.dtype)
    scaled = norm(x.to(wide), None, None, eps) * gains.to(wide)
    return (scaled if biases is None else scaled + biases.to(wide)).to(x.dtype)
