"""Sizes and traits of a decoder, and the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a family's checkpoint keeps its tensors; the defaults are Llama's.

    Names of parts are below `layers`.{index}, and `.weight` or `.bias` follows. Parts of several names are
    concatenated in that order. A family names only what its traits ask for.

    Attributes:
        prefix: before all names but the head's; a checkpoint may lack it if `prefix_optional`.
        embedding, positions, final_norm, layers: below the prefix.
        attention_norm, post_attention_norm, mlp_norm, post_mlp_norm, q_norm, k_norm: parts of a layer.
        qkv, output, gate_up, down: parts of a layer.
        transposed: matrices of layers are stored [in, out].
        ignored: suffixes of tensors that hold derived values.
    """

    prefix: str = "model."
    prefix_optional: bool = False
    embedding: str = "embed_tokens"
    positions: str = ""
    final_norm: str = "norm"
    layers: str = "layers"
    attention_norm: str = "input_layernorm"
    post_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = ""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    transposed: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


LLAMA_NAMES = TensorNames()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and traits of a decoder.

    Attributes:
        num_layers, hidden_size, intermediate_size, vocab_size: sizes.
        num_heads, num_kv_heads, head_dim: of attention.
        max_position: longest context.
        norm_eps: of the norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: parameters of the scaling; `rope_type` names it, see `eeinfer.ops.rope`.
        qkv_bias, output_bias, mlp_bias: whether those projections have biases.
        qk_norm: q and k are RMS-normalised before their rotation, with gains of the layer's own: each head with the
            same gain, or the whole projection (`qk_norm_whole`).
        tied: the vocabulary matrix is the embedding.
        dtype: number type of the checkpoint, as spelled in its config.
        names: of the tensors in the checkpoint.
        norm: RMS norm with a gain, or layer norm with gain and bias.
        norm_offset: added to the gains of the checkpoint.
        pre_norm: attention and MLP read normalised hidden states.
        post_norm: what attention and MLP give is normalised before it is added to the hidden states.
        activation: of the MLP, a name of `eeinfer.ops.activation`.
        gated: the MLP is down(activation(gate) * up), else down(activation(up)).
        positions: how a token knows its place: rotary, or a learned vector added to its embedding.
        rotary_dim: how many numbers of each head turn; None for all.
        embedding_scale: factor on the embeddings.
        windows: for each layer how many keys a token sees, its own included, None for all; empty where no layer has
            a window.
        local_rope_theta: base, without scaling, in the layers that have a window; None where it is `rope_theta`.
        attention_scale: factor on the scores; None for head_dim^-0.5.
        attention_softcap, logit_softcap: bounds c of c tanh(x / c) for scores and the model's own logits.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    dtype: str
    names: TensorNames = LLAMA_NAMES
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm_whole: bool = False
    activation: str = "silu"
    gated: bool = True
    positions: Literal["rotary", "learned"] = "rotary"
    rotary_dim: int | None = None
    embedding_scale: float = 1.0
    windows: tuple[int | None, ...] = ()
    local_rope_theta: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
