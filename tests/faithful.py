"""A tiny model whose deeper layers change little, so that shallow exits are mostly right."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file
from tiny import write_model

SHALLOW, DEEP = 3, 5  # exits of its 6 layers


def write_faithful_model(folder: Path) -> Path:
    """The variant `gqa` with the output of the layers from `SHALLOW` on scaled down."""
    write_model(folder, "gqa")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        if layer >= SHALLOW and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * (0.08 if layer < DEEP else 0.02)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompt_text(prefix: str, number: int) -> str:
    """A text for each number."""
    return f"{prefix} {number * 7919 % 1000}: tell {'ab' * (number % 5)}"


def write_prompts(path: Path, count: int, prefix: str = "p") -> Path:
    """Prompts of different texts."""
    lines = [{"id": f"{prefix}{i}", "prompt": prompt_text(prefix, i)} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path
