"""Fills a decoder's weights from safetensors, one tensor at a time, and accounts for every tensor in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eeinfer.errors import ModelError
from eeinfer.model.families import ModelConfig
from eeinfer.model.folder import weight_files
from eeinfer.model.weights import Weights, destinations, empty_weights, stored


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read all weights of the model in `folder`, converted to `dtype` on `device`.

    Raises:
        ModelError: a file is missing or corrupt, or a tensor is missing, unexpected, duplicate, wrongly shaped or holds
            NaN or infinite values.
    """
    weights = empty_weights(config, dtype, device)
    pending = dict(destinations(config, weights))
    filled: dict[str, Path] = {}
    for path in weight_files(folder):
        try:
            # Each tensor goes straight to the device, and there to its place: never is there a second copy of them all.
            with safe_open(path, framework="pt", device=str(device)) as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    _fill(name, shard, path, pending, filled, config)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}); fetch the model again") from None
    if pending:
        name = next(iter(pending))
        raise ModelError(
            f"{folder}: tensor {name} is missing from the checkpoint ({len(pending)} in all); fetch the model again"
        )
    if config.norm_offset:
        for name, tensor in stored(weights).items():
            if name.endswith("norm"):
                tensor.add_(config.norm_offset)
    return weights


def _fill(
    name: str, shard: Any, path: Path, pending: dict[str, Tensor], filled: dict[str, Path], config: ModelConfig
) -> None:
    if name.endswith(config.names.ignored) or (name == "lm_head.weight" and config.tied):
        return
    stored_name = name
    if config.names.prefix_optional and not name.startswith((config.names.prefix, "lm_head.")):
        name = config.names.prefix + name
    if name in filled:
        raise ModelError(f"{path}: tensor {name} is also in {filled[name]}; keep one of them")
    if name not in pending:
        raise ModelError(
            f"{path}: unexpected tensor {name}; config.json describes a model without it: are both of the same model?"
        )
    target = pending.pop(name)
    filled[name] = path
    shape = tuple(shard.get_slice(stored_name).get_shape())
    if shape != tuple(target.shape):
        raise ModelError(
            f"{path}: {name} has shape {shape}, but config.json asks for {tuple(target.shape)}: are both of the same "
            f"model?"
        )
    stored = shard.get_tensor(stored_name)
    target.copy_(stored)
    if not _all_finite(target):
        if _all_finite(stored.double()):
            raise ModelError(f"{path}: {name} has values beyond {_name(target)}; pass --dtype {_name(stored)}")
        raise ModelError(f"{path}: {name} holds NaN or infinite values; fetch the model again, or repair it")


def _all_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN and no infinity; the extremes take NaN along, and are found at the pace of memory."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
