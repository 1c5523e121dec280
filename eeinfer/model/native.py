"""Which models the native kernels can run, and the weights as they read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eeinfer.model.families import ModelConfig
from eeinfer.model.weights import Weights, layer_views
from eeinfer.ops.native.build import load
from eeinfer.ops.native.kernels import HEAD_SIZES, PACKED, LayerSizes, NativeLayers, NativeStats, PackedLinear
from eeinfer.ops.unavailable import Unavailable

NATIVE_FOLDER = "native"  # in the model store: where the built library is kept


@dataclass(frozen=True, slots=True)
class Native:
    """The native side of a decoder: its layers, products with matrices, and statistics of logits."""

    layers: NativeLayers
    vocabulary: PackedLinear
    stats: NativeStats
    product: Callable[[Tensor], PackedLinear]


def native(config: ModelConfig, weights: Weights, folder: Path, *, keep_plain: bool) -> Native:
    """Pack the weights for the native kernels.

    Args:
        config: of the model.
        weights: of the model. What is packed is replaced by tensors without data, so that it is in memory once.
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
    made = Native(
        NativeLayers(library, sizes, layers),
        PackedLinear(library, weights.lm_head),
        NativeStats(library),
        partial(PackedLinear, library),
    )
    if not keep_plain:
        untied = () if weights.lm_head is weights.embedding else ("lm_head",)
        for name in (*PACKED, *untied):
            setattr(weights, name, torch.empty_like(getattr(weights, name), device="meta"))
    return made


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
