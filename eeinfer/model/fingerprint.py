"""Quick identity of a base model, so that exit heads and calibrations are not used with another one.

What is hashed: the config fields that decide the numbers, and of every tensor its name, type, shape and up to three
fixed samples of its bytes. Tensors are taken in name order, so the same weights in one file or in many shards have
the same fingerprint. A few megabytes are read whatever the model's size is, except that small tensors are read whole.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eeinfer.core.unique_keys import RepeatedKeyError, unique_keys
from eeinfer.errors import ModelError
from eeinfer.model.folder import CONFIG_FILE, read_json, weight_files

SAMPLE_BYTES = 64 * 1024
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

# Fields of config.json without which the same weights give other numbers; absent, null and false count as the same.
# RoPE is added by `_rope`, KV heads and head size by `_heads`: releases of transformers spell or leave them out.
NUMERIC_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "sliding_window_pattern",
    "hidden_activation",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "n_embd",
    "n_inner",
    "n_layer",
    "n_head",
    "num_layers",
    "num_heads",
    "layer_norm_epsilon",
    "activation_function",
    "window_size",
    "attention_types",
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, as the header of its file describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int  # offset in the file, bytes
    size: int  # bytes


def fingerprint(folder: Path) -> str:
    """Identifies the model in a Hugging Face folder: "sha256:" and 64 hex digits.

    Raises ModelError naming the file: config.json missing or not JSON, weights missing, damaged or truncated, a
    tensor that occurs twice, and folders that hold pickles only.
    """
    digest = hashlib.sha256()
    config = read_json(folder / CONFIG_FILE)
    digest.update(json.dumps(_numeric_config(config), sort_keys=True).encode())
    for _, tensor in sorted(stored_tensors(folder).items()):
        _update(digest, tensor)
    return f"sha256:{digest.hexdigest()}"


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint in `folder` by name, from the headers of its files.

    Raises ModelError as `fingerprint` does.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise ModelError(
                    f"{file}: tensor {tensor.name} is also in {tensors[tensor.name].file.name}; remove one"
                )
            tensors[tensor.name] = tensor
    return tensors


def _numeric_config(config: dict[str, Any]) -> dict[str, Any]:
    fields = {name: config[name] for name in NUMERIC_FIELDS if config.get(name)} | _heads(config)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds:  # some releases list the types where all are the same
        fields["layer_types"] = kinds
    if config.get("use_sliding_window"):
        fields["max_window_layers"] = config.get("max_window_layers")
    if config.get("use_sliding_window") is False:  # Qwen: some releases of transformers keep the size of a window off
        fields.pop("sliding_window", None)
    return {name: _number(value) for name, value in fields.items()} | {"rope": _rope(config)}


def _number(value: Any) -> Any:
    """10000 and 10000.0 are the same number, but not the same JSON."""
    return float(value) if isinstance(value, int) else value


def _heads(config: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    default = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else None
    return {
        "head_dim": config.get("head_dim") or default,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
    }


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings in one spelling.

    transformers 4 has rope_theta and rope_scaling (with `type` in old files), 5 has rope_parameters for everything.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if (local := rope.pop("sliding_attention", None)) or "full_attention" in rope:  # Gemma 3, kept by type of layer
        rope = (rope.get("full_attention") or {}) | {"local": (local or {}).get("rope_theta")}
    rope.setdefault("local", config.get("rope_local_base_freq"))
    rope["rope_type"] = rope.pop("rope_type", rope.pop("type", None)) or "default"
    rope.pop("type", None)
    rope.setdefault("rope_theta", config.get("rope_theta"))
    rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rope["rope_type"] != "default":  # some kinds scale with the context length; without scaling it decides nothing
        rope["max_position_embeddings"] = config.get("max_position_embeddings")
    return {key: _number(value) for key, value in rope.items() if value is not None}


def _read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file: 8 bytes header length, JSON header, data. Checks that all of it is there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{path}: not a complete safetensors file; fetch the model again")
        encoded = file.read(length)
    try:
        header = json.loads(encoded, object_pairs_hook=unique_keys)
        header.pop("__metadata__", None)
        tensors = [_tensor(path, 8 + length, name, entry) for name, entry in header.items()]
    except RepeatedKeyError as error:
        raise ModelError(f"{path}: tensor {error.key} occurs twice; fetch the model again") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: the safetensors header is damaged ({error!r}); fetch the model again") from error
    end = max((tensor.start + tensor.size for tensor in tensors), default=8 + length)
    if end != size:
        raise ModelError(f"{path}: the file has {size} bytes, its header promises {end}; fetch the model again")
    return tensors


def _tensor(path: Path, data_start: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError(f"tensor {name} has offsets {begin}, {end}")
    return StoredTensor(
        name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), path, data_start + begin, end - begin
    )


def _update(digest: Any, tensor: StoredTensor) -> None:
    """Adds name, type, shape and samples: all of a tensor up to 64 KiB, else 64 KiB from start, middle and end."""
    digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
    offsets = (0, (tensor.size - SAMPLE_BYTES) // 2, tensor.size - SAMPLE_BYTES) if tensor.size > SAMPLE_BYTES else (0,)
    with tensor.file.open("rb") as file:
        for offset in offsets:
            file.seek(tensor.start + offset)
            digest.update(file.read(min(SAMPLE_BYTES, tensor.size)))
