"""Which models the native kernels can run, and the weights as they read them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eeinfer.exits.gates import ODDS_EPS, GateSpec, plain_gate
from eeinfer.model.families import ModelConfig
from eeinfer.model.weights import Weights, layer_views
from eeinfer.ops.native.build import load
from eeinfer.ops.native.kernels import (
    HEAD_SIZES,
    PACKED,
    LayerSizes,
    NativeGate,
    NativeLayers,
    NativeStats,
    PackedLinear,
)
from eeinfer.ops.unavailable import Unavailable

NATIVE_FOLDER = "native"  # in the model store: where the built library is kept


@dataclass(frozen=True, slots=True)
class Native:
    """The native side of a decoder: its layers, products with matrices, gates, and statistics of logits.

    `embed`: [n] token ids to [n, d], where the packed vocabulary matrix is the only one; None: the plain one is there.
    """

    layers: NativeLayers
    vocabulary: PackedLinear
    embed: Callable[[Tensor], Tensor] | None
    stats: NativeStats
    product: Callable[[Tensor], PackedLinear]
    gate: Callable[[GateSpec, Mapping[str, Tensor], float], Callable[[Tensor], Tensor]]


def native(config: ModelConfig, weights: Weights, folder: Path, *, keep_plain: bool) -> Native:
    """Pack the weights for the native kernels.

    Args:
        config: of the model.
        weights: of the model. What is packed is replaced by tensors without data, so that it is in memory once, and
            never twice while it is packed.
        folder: where the built library is kept.
        keep_plain: leave all matrices as they are, for callers that copy from them.

    Raises:
        Unavailable: this model or this machine cannot use them, and why.
    """
    _check(config, weights)
    library = load(folder)
    sizes = LayerSizes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.norm_eps,
        scale=config.attention_scale or config.head_dim**-0.5,
    )
    layers = [
        {name: getattr(layer, name) for name in NativeLayers.TENSORS}
        for layer in layer_views(weights, config.num_layers)
    ]
    tied = weights.lm_head is weights.embedding
    vocabulary = PackedLinear(library, weights.lm_head, in_place=not keep_plain)
    made = Native(
        NativeLayers(library, sizes, layers, in_place=not keep_plain),
        vocabulary,
        vocabulary.rows if tied and not keep_plain else None,
        NativeStats(library),
        partial(PackedLinear, library),
        partial(gate_of, library),
    )
    if not keep_plain:
        for name in (*PACKED, "lm_head"):
            setattr(weights, name, torch.empty_like(getattr(weights, name), device="meta"))
        if tied:
            weights.embedding = weights.lm_head
    return made


def gate_of(
    library: ctypes.CDLL, spec: GateSpec, tensors: Mapping[str, Tensor], eps: float
) -> Callable[[Tensor], Tensor]:
    """A gate as a native kernel, where there is one for its form; as `eeinfer.exits.gates.plain_gate`."""
    if spec.tokens is None or spec.width % 2:
        return plain_gate(spec, tensors, eps)
    return NativeGate(library, tensors, eps, ODDS_EPS)


def check_cpu(device: torch.device) -> None:
    """Raises Unavailable where `device` is not a CPU."""
    if device.type != "cpu":
        raise Unavailable(f"native kernels are for CPUs, and the model is on {device}")


def _check(config: ModelConfig, weights: Weights) -> None:
    check_cpu(weights.embedding.device)
    if weights.embedding.dtype is not torch.bfloat16:
        raise Unavailable(f"native kernels compute in bfloat16, and the model is in {weights.embedding.dtype}")
    if config.head_dim not in HEAD_SIZES:
        raise Unavailable(f"native kernels know heads of {', '.join(map(str, HEAD_SIZES))}, not of {config.head_dim}")
    if config.hidden_size % 2 or config.intermediate_size % 2:
        raise Unavailable("native kernels need even sizes")
    plain = {
        "its norms": config.norm == "rms" and config.pre_norm and not config.post_norm and not config.norm_offset,
        "its norm of q and k": not config.qk_norm_whole,
        "its MLP": config.gated and config.activation == "silu",
        "its positions": config.positions == "rotary" and config.rotary_dim in {None, config.head_dim},
        "its sliding window": not any(config.windows),
        "its soft-capped scores": config.attention_softcap is None,
    }
    if foreign := [part for part, known in plain.items() if not known]:
        raise Unavailable(f"native kernels do not know {' and '.join(foreign)}")
