"""Where the cells run and how large they are there, and small helpers that all of them share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eeinfer.config.load import load_settings
from eeinfer.config.schema import Settings
from eeinfer.model.families import ModelConfig
from eeinfer.ops.norm import at_least_float32
from eeinfer.runner.capture import Capture, DryCapture

# Largest allowed error of a row, ||out - reference|| / ||reference||. Float32 leaves no room for TF32 (3e-4).
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}


@dataclass(frozen=True, slots=True)
class Place:
    """Where cells run.

    Attributes:
        device: of everything.
        dry: on a CPU, with kernels interpreted and graphs called in place of replayed: nothing is measured there.
        full: more cells.
    """

    device: torch.device
    dry: bool
    full: bool

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> int:
        """Bytes that can still be allocated, after what is no longer used has been given back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]
        return 2**34  # of a dry run, whose models are tiny

    @property
    def kernels(self) -> str:
        """What computes the layers of most cells; interpreted kernels would take a dry run minutes."""
        return "torch" if self.dry else "triton"

    def capture(self, settings: Settings) -> Capture | None:
        """What stands for graphs in a dry run; None leaves it to the device."""
        return DryCapture() if self.dry and not settings.model.enforce_eager else None

    def settings(self, **sections: Any) -> Settings:
        """Settings from `section__key=value`; no file and no variable adds to them."""
        flags = {name.replace("__", "."): value for name, value in sections.items()}
        return load_settings(flags={"model.device": str(self.device)} | flags, environ={}).settings


def tiny_config(*, dry: bool, **traits: Any) -> ModelConfig:
    """A Llama of few layers: heads as real models have them on a device, smaller in a dry run."""
    sizes: dict[str, Any] = {
        "num_layers": 6,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": 4096,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
    }
    if dry:
        sizes |= {"num_layers": 3, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}
        sizes |= {"num_heads": 4, "head_dim": 16}
    defaults: dict[str, Any] = {
        "max_position": 512,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default"},
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tied": False,
        "dtype": "float32",
    }
    return ModelConfig(**(sizes | defaults | traits))


def row_error(out: Tensor, reference: Tensor) -> float:
    """Largest relative error of a row (the last dimension); infinite where `out` is not finite and should be."""
    wide = at_least_float32(reference.dtype)
    out, reference = out.flatten(0, -2).to(wide), reference.flatten(0, -2).to(wide)
    scale = torch.linalg.vector_norm(reference, dim=-1).clamp_min(1e-30)
    error = torch.linalg.vector_norm(out - reference, dim=-1) / scale
    return float(torch.where(error.isnan(), torch.inf, error).max())


def median_of(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    if len(ordered) % 2 == 0:
        middle = (middle + ordered[len(ordered) // 2 - 1]) / 2
    return middle, ordered[0], ordered[-1]


def generator(place: Place, seed: int) -> torch.Generator:
    """Random numbers on the device, the same for the same seed."""
    return torch.Generator(place.device).manual_seed(seed)


Random = Callable[..., Tensor]


def normal(place: Place, seed: int) -> Random:
    """Draws of normal numbers of any shape: `draw(shape, dtype)`."""
    source = generator(place, seed)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=source, device=place.device).to(dtype)

    return draw
