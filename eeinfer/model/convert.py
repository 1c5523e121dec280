"""Checkpoints in other formats made into Hugging Face folders with safetensors: GGUF files, and pickles."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eeinfer.errors import ModelError
from eeinfer.model.folder import CONFIG_FILE, INDEX_FILE, PICKLE_SUFFIXES, WEIGHTS_FILE, read_json
from eeinfer.model.gguf_import import Progress, import_gguf

if TYPE_CHECKING:
    from torch import Tensor

PICKLE_FILE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# What is copied beside the weights: configs, tokenizers and chat templates.
COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")


def convert(source: Path, target: Path, *, dtype: str, progress: Progress) -> None:
    """Writes the model in `source` as the new folder `target`, whole or not at all.

    Args:
        source: a GGUF file, or a folder with config.json and weights as pickles.
        target: must not be there yet, or be empty.
        dtype: of the weights of a GGUF file: bfloat16, float16 or float32. Pickled weights keep theirs.
        progress: called with a label, the tensors or files done, and how many there are.

    Raises:
        ModelError: `source` cannot be used, or `target` is in the way.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} is there already; name a new folder, or remove it")
    if not source.exists():
        raise ModelError(f"{source}: no such file or folder; give a GGUF file, or a folder with {PICKLE_FILE}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.partial-", dir=target.parent) as work:
        made = Path(work) / "model"
        if source.is_dir():
            _convert_pickles(source, made, progress)
        else:
            import_gguf(source, made, dtype=dtype, progress=progress)
        if target.exists():
            target.rmdir()
        made.rename(target)


def _convert_pickles(source: Path, made: Path, progress: Progress) -> None:
    """Weights of `source` file by file, and everything beside them that describes the model."""
    from safetensors.torch import save_file

    files = _pickle_files(source)
    read_json(source / CONFIG_FILE)
    made.mkdir()
    for path in sorted(source.iterdir()):
        if path.suffix in COPIED and path.name not in {PICKLE_INDEX, INDEX_FILE}:
            shutil.copyfile(path, made / path.name)
    weight_map: dict[str, str] = {}
    total = 0
    for done, file in enumerate(files):
        progress("converting", done, len(files))
        tensors = _unpickled(file)
        if twice := tensors.keys() & weight_map.keys():
            raise ModelError(f"{file}: tensor {min(twice)} is in another file, too; keep one of them")
        name = WEIGHTS_FILE if len(files) == 1 else f"model-{done + 1:05}-of-{len(files):05}.safetensors"
        save_file(tensors, made / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (made / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    progress("converting", len(files), len(files))


def _pickle_files(folder: Path) -> list[Path]:
    """The pickles with the model's weights: the shards of the index, else pytorch_model.bin, else the only pickle."""
    if (index := folder / PICKLE_INDEX).is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{index}: has no weight_map; fetch the model again")
        files = [folder / str(name) for name in sorted(set(shards.values()))]
        if missing := [file for file in files if not file.is_file()]:
            raise ModelError(f"{missing[0]}: missing, though {PICKLE_INDEX} lists it; fetch the model again")
        return files
    if (folder / PICKLE_FILE).is_file():
        return [folder / PICKLE_FILE]
    found = [path for path in sorted(folder.iterdir()) if path.suffix in PICKLE_SUFFIXES]
    if len(found) != 1:
        which = f"several pickles ({', '.join(p.name for p in found)})" if found else "no weights as a pickle"
        raise ModelError(f"{folder}: has {which} and no {PICKLE_INDEX}; name the weights {PICKLE_FILE}")
    return found


def _unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors in a pickle, each with memory of its own; nothing in it but tensors is let in, and no code runs."""
    import torch

    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (unpickling fails in any way that a file can be made to)
        first = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{file}: cannot be read as tensors alone ({first}); what else a pickle holds is never run, so take a copy "
            f"of the model with safetensors"
        ) from None
    if not isinstance(found, dict) or not found or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise ModelError(f"{file}: holds no table of tensors by name; convert the checkpoint with the tool it is from")
    # Tied matrices share their memory, which the format cannot say.
    return {str(name): tensor.detach().clone().contiguous() for name, tensor in found.items()}
