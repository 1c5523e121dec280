"""GGUF files turned into Hugging Face folders, weights dequantised.

What GGUF keeps otherwise is put back: Q and K of Llama models have their rotary halves interleaved (ggml rotates
neighbours, Hugging Face row i with i + head_dim / 2), and gains beside 1 hold the 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eeinfer.model.gguf_config import hf_config
from eeinfer.model.gguf_file import GgufFile, open_gguf
from eeinfer.model.gguf_tokenizer import build_tokenizer, tokenizer_config

if TYPE_CHECKING:
    import numpy as np

    from eeinfer.model.families import ModelConfig, TensorNames

Progress = Callable[[str, int, int], None]  # label, done, total

INTERLEAVED = ("llama",)  # architectures whose Q and K are stored for neighbours that turn together
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # torch's name -> that of safetensors


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor goes: its name and shape in the checkpoint."""

    name: str
    shape: tuple[int, ...]


def import_gguf(source: Path, target: Path, *, progress: Progress, dtype: str = "bfloat16") -> None:
    """Writes the model in the GGUF file `source` as a Hugging Face folder `target` (made if it is not there).

    One tensor at a time is held in memory. `progress` gets the label "dequantising", tensors done and their number.
    `dtype` is the type of the weights, a key of `TYPES`.
    Raises ModelError for unreadable or truncated files and for architectures, tensors and tokenizers not known here.
    """
    gguf = open_gguf(source)
    config = hf_config(gguf, dtype)
    tokenizer = build_tokenizer(gguf)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    jsons = {
        "config": config,
        "tokenizer_config": tokenizer_config(gguf),
        "generation_config": gguf.generation_config(),
    }
    for name, content in jsons.items():
        encoded = json.dumps(content, indent=2, ensure_ascii=False)
        (target / f"{name}.json").write_text(encoded + "\n", encoding="utf-8")
    write_weights(gguf, config, target / "model.safetensors", progress)


def tensor_table(model: ModelConfig) -> dict[str, Target]:
    """Every weight that such a model has, by its name in GGUF; its place in the checkpoint is that of its family."""
    import torch

    from eeinfer.model.weights import destinations, empty_weights

    names = model.names
    theirs = {"lm_head": "output"}
    theirs |= {f"{names.prefix}{names.embedding}": "token_embd", f"{names.prefix}{names.final_norm}": "output_norm"}
    for i in range(model.num_layers):
        for ours, part in _layer_parts(names).items():
            theirs[f"{names.prefix}{names.layers}.{i}.{ours}"] = f"blk.{i}.{part}"
    found = {}
    for name, view in destinations(model, empty_weights(model, torch.float32, torch.device("meta"))):
        stem, kind = name.rsplit(".", 1)
        found[f"{theirs[stem]}.{kind}"] = Target(name, tuple(view.shape))
    return found


def _layer_parts(names: TensorNames) -> dict[str, str]:
    """Name of each part of a layer in the checkpoint -> in GGUF."""
    return {
        names.attention_norm: "attn_norm",
        names.post_attention_norm: "post_attention_norm",
        names.q_norm: "attn_q_norm",
        names.k_norm: "attn_k_norm",
        **dict(zip(names.qkv, ("attn_q", "attn_k", "attn_v"), strict=True)),
        names.output: "attn_output",
        names.mlp_norm: "ffn_norm",
        names.post_mlp_norm: "post_ffw_norm",
        **dict(zip(names.gate_up, ("ffn_gate", "ffn_up"), strict=True)),
        names.down: "ffn_down",
    }


def write_weights(gguf: GgufFile, config: dict[str, Any], path: Path, progress: Progress) -> None:
    """Dequantises one tensor after the other into a safetensors file; the library's writer would want all at once.

    The format: an 8-byte little-endian header length, a JSON header and the tensors' bytes in order.
    """
    import torch

    from eeinfer.model.families import FAMILIES

    model = FAMILIES[config["architectures"][0]](config)
    table = tensor_table(model)
    _check_tensors(gguf, table)
    dtype = getattr(torch, config["torch_dtype"])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in table.values():
        begin, end = end, end + dtype.itemsize * prod(tensor.shape)
        entry = {"dtype": TYPES[config["torch_dtype"]], "shape": tensor.shape, "data_offsets": [begin, end]}
        header[tensor.name] = entry
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for done, name in enumerate(table):
            progress("dequantising", done, len(table))
            weights = torch.tensor(_dequantised(gguf, name, model)).to(dtype)
            file.write(weights.view(torch.uint8).numpy().data)  # numpy has no bfloat16
    progress("dequantising", len(table), len(table))


def _check_tensors(gguf: GgufFile, table: dict[str, Target]) -> None:
    for name, target in table.items():
        if name not in gguf.tensors:
            raise gguf.damaged(f"tensor {name} is missing")
        found = tuple(reversed(gguf.tensors[name].shape.tolist()))  # ggml lists the innermost dimension first
        if found != target.shape:
            raise gguf.unsupported(f"tensor {name} has shape {found}, the metadata asks for {target.shape}")
    if unexpected := sorted(gguf.tensors.keys() - table.keys() - {"rope_freqs.weight"}):
        raise gguf.unsupported(f"tensor {unexpected[0]} belongs to no {gguf.architecture} model that is known here")


def _dequantised(gguf: GgufFile, name: str, model: ModelConfig) -> np.ndarray:
    """float32 weights of one tensor as Hugging Face has them."""
    from gguf import dequantize

    tensor = gguf.tensors[name]
    try:
        weights = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise gguf.unsupported(f"{name} is of unsupported type {tensor.tensor_type.name}") from None
    part = name.split(".")[-2]
    if part.endswith("norm"):
        return weights - model.norm_offset
    heads = {"attn_q": model.num_heads, "attn_k": model.num_kv_heads}.get(part)
    return weights if heads is None or gguf.architecture not in INTERLEAVED else unpermute(weights, heads)


def unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, in] of Q or K (then its KV heads) from interleaved rotary pairs to two halves.

    Within a head, row 2i goes to i and row 2i + 1 to head_dim / 2 + i, which undoes `permute` of llama.cpp's converter.
    """
    rows, width = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
