"""Shapes that kernels are checked on."""

from __future__ import annotations

from typing import NamedTuple

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Shape(NamedTuple):
    """One row of the table: attention and what stands before it. `max_position` decides how decoding splits keys."""

    dtype: torch.dtype
    head_dim: int
    block_size: int
    heads: int
    kv_heads: int
    max_position: int = 4096
    window: int | None = None
    softcap: float | None = None
    rotary_dim: int | None = None
    qk_norm: bool = False

    def __str__(self) -> str:
        traits = {"window": self.window, "softcap": self.softcap, "rotary": self.rotary_dim, "qk norm": self.qk_norm}
        told = "".join(f", {name} {value}" for name, value in traits.items() if value)
        return (
            f"{name_of(self.dtype)}, heads {self.heads}/{self.kv_heads} of {self.head_dim}, "
            f"blocks of {self.block_size}{told}"
        )


# All number types, head sizes and block sizes, in the pairs that models use and some that they do not. The first three
# are those of the models that other cells run, whose kernels are then compiled.
SHAPES = (
    Shape(BF16, 128, 16, 32, 8, max_position=131072),
    Shape(BF16, 64, 16, 8, 2, max_position=512),
    Shape(FP32, 64, 16, 8, 2, max_position=512),
    Shape(BF16, 64, 32, 9, 3),
    Shape(BF16, 128, 256, 16, 8, qk_norm=True),
    Shape(BF16, 256, 64, 8, 4, window=100, softcap=50.0),
    Shape(FP16, 64, 16, 14, 2),
    Shape(FP16, 80, 128, 8, 8, rotary_dim=32),
    Shape(FP16, 128, 64, 32, 8, window=33),
    Shape(FP32, 96, 16, 6, 2),
    Shape(FP32, 128, 32, 8, 1),
    Shape(FP32, 64, 256, 4, 4, window=7),
    Shape(FP32, 256, 128, 4, 2, softcap=30.0),
)
DRY_SHAPES = (
    Shape(BF16, 64, 16, 4, 2),
    Shape(FP32, 80, 32, 3, 1, window=9, rotary_dim=32, qk_norm=True),
)
DTYPES = (BF16, FP16, FP32)
CONTEXTS = (1, 15, 16, 17, 128, 255, 513, 1100, 2049)
DRY_CONTEXTS = (1, 17, 40)


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
