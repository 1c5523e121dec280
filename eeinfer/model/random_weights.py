"""Models of known shapes with random weights: they cost what the real ones do, without a download."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch

from eeinfer.config.suggest import did_you_mean
from eeinfer.errors import ConfigError
from eeinfer.model.families import ModelConfig, model_config
from eeinfer.model.weights import Weights, empty_weights, stored

STANDARD_DEVIATION = 0.02  # as the families initialise them for training

_SHAPES = Path(str(resources.files("eeinfer"))) / "data" / "shapes"


def shape_names() -> list[str]:
    """Names of the shapes that are packaged, sorted."""
    return sorted(path.stem for path in _SHAPES.glob("*.json"))


def shape_config(name: str) -> ModelConfig:
    """Sizes and traits of the released model `name`, as its own config.json gives them.

    Raises:
        ConfigError: there is no such shape; the message suggests one.
    """
    if name not in (known := shape_names()):
        raise ConfigError(f"--random-weights {name!r}: there is no such shape{did_you_mean(name, known)}")
    return model_config(_SHAPES, f"{name}.json")


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> Weights:
    """Independent normal weights and biases, gains of 1; the same for the same seed, type and kind of device.

    Every element is drawn and written, so that each takes its memory. Logits are finite and differ from row to row,
    but mean nothing: they are nearly flat, and the largest often wins by little.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in stored(weights).items():
        if name.endswith("norm"):
            tensor.fill_(1)
        else:
            tensor.normal_(0, STANDARD_DEVIATION, generator=generator)
    return weights
