"""The files of a Hugging Face model folder. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eeinfer.errors import ModelError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
PICKLE_SUFFIXES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ModelError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a model is a Hugging Face folder that holds it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); fetch the model again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds no JSON object; fetch the model again")
    return content


def read_json_if_present(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file.

    Raises:
        ModelError: it holds something else.
    """
    return read_json(path) if path.is_file() else {}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with the model's weights: the shards of the index, else model.safetensors.

    Raises:
        ModelError: there are none, a shard of the index is missing, or the weights are pickles.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{index}: has no weight_map; fetch the model again")
        files = [folder / str(name) for name in sorted(set(shards.values()))]
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file}: missing, though {INDEX_FILE} lists it; fetch the model again")
        return files
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"{folder}: its weights are a pickle ({pickles[0]}), which can run code when it is loaded and is refused; "
            "convert them to safetensors with `eeinfer convert`"
        )
    raise ModelError(f"{folder}: no {WEIGHTS_FILE} and no {INDEX_FILE}; this is not a complete model folder")
