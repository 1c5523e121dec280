"""The files of exit heads: `exit_config.json` and `exit_heads.safetensors`, in one folder.

Strict: a missing, unexpected or wrongly shaped tensor is an error that names it, nothing is ever initialised at random,
and heads that were made for another base model are refused.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eeinfer.core.unique_keys import RepeatedKeyError, unique_keys
from eeinfer.errors import HeadsError
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec, HeadKind
from eeinfer.exits.learned_kv import LearnedKVSpec

CONFIG_NAME = "exit_config.json"
TENSORS_NAME = "exit_heads.safetensors"
FORMAT_VERSION = 1
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FIX = "make the heads again with `eeinfer tune-heads`"
_ENTRY_KEYS = {field.name for field in fields(ExitSpec)} | {"results"}


@dataclass(frozen=True, slots=True)
class Base:
    """The model that heads belong to: its name (for people), fingerprint and sizes."""

    name: str
    fingerprint: str
    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True, slots=True, eq=False)
class HeadsFile:
    """Heads as read: `tensors[i]` belongs to `specs[i]`, float or bfloat16 as stored, on the CPU."""

    specs: tuple[ExitSpec, ...]
    tensors: tuple[dict[str, Tensor], ...]


def has_heads(folder: Path) -> bool:
    """Whether `folder` holds exit heads (an `exit_config.json`)."""
    return (folder / CONFIG_NAME).is_file()


def heads_fingerprint(folder: Path) -> str:
    """What identifies the heads in `folder`: "sha256:" and the SHA-256 of what `sha256sum` prints of both files.

    Heads without tensors may have one file only.

    Raises:
        HeadsError: a file cannot be read.
    """
    digest = sha256()
    for path in (folder / CONFIG_NAME, folder / TENSORS_NAME):
        try:
            with path.open("rb") as file:
                digest.update(f"{file_digest(file, 'sha256').hexdigest()}  {path.name}\n".encode())
        except FileNotFoundError:
            if path.name == CONFIG_NAME:
                raise HeadsError(f"{path} is missing: name a folder that holds {CONFIG_NAME}") from None
        except OSError as error:
            raise HeadsError(f"{path} cannot be read: {error.strerror}") from None
    return "sha256:" + digest.hexdigest()


def save_heads(
    folder: Path, base: Base, heads: HeadsFile, *, header: dict[str, Any], results: list[dict[str, Any]]
) -> None:
    """Write both files into `folder`, which exists.

    Args:
        folder: where to.
        base: the model they belong to.
        heads: what to write.
        header: how they were made (settings, data fingerprint); kept under `made_with`.
        results: measured figures of each exit.
    """
    tensors = {
        f"exits.{i}.{name}": tensor.contiguous() for i, own in enumerate(heads.tensors) for name, tensor in own.items()
    }
    entries = [asdict(spec) | {"results": result} for spec, result in zip(heads.specs, results, strict=True)]
    config = {
        "format_version": FORMAT_VERSION,
        "base_model": {"name": base.name, "fingerprint": base.fingerprint},
        "hidden_size": base.hidden_size,
        "vocab_size": base.vocab_size,
        "num_layers": base.num_layers,
        "made_with": header,
        "exits": entries,
    }
    save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_heads(folder: Path, base: Base) -> HeadsFile:
    """Read and check the heads in `folder`.

    Raises:
        HeadsError: a file is missing or malformed, or the heads belong to another base model.
    """
    specs = load_specs(folder, base)
    return HeadsFile(specs, _read_tensors(folder / TENSORS_NAME, specs, base))


def load_specs(folder: Path, base: Base) -> tuple[ExitSpec, ...]:
    """Read and check what `exit_config.json` says of the heads in `folder`, without their tensors.

    Raises:
        HeadsError: as `load_heads`.
    """
    path = folder / CONFIG_NAME
    config = _read_config(path)
    _check_base(path, config, base)
    specs = tuple(_read_spec(path, i, entry, base) for i, entry in enumerate(config["exits"]))
    depths = [spec.layers_executed for spec in specs]
    if depths != sorted(set(depths)):
        raise HeadsError(f"{path}: exits must be in increasing order of layers_executed, without repeats; got {depths}")
    return specs


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadsError(f"{path} is missing: name a folder that holds {CONFIG_NAME} and {TENSORS_NAME}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise HeadsError(f"{path} cannot be read as JSON ({error}); {_FIX}") from None
    if not isinstance(config, dict) or config.get("format_version") != FORMAT_VERSION:
        found = config.get("format_version") if isinstance(config, dict) else None
        raise HeadsError(f"{path}: format_version is {found!r}, this version reads {FORMAT_VERSION}; {_FIX}")
    if not isinstance(config.get("exits"), list) or not config["exits"]:
        raise HeadsError(f"{path}: `exits` must be a list with at least one entry; {_FIX}")
    return config


def _check_base(path: Path, config: dict[str, Any], base: Base) -> None:
    for key, found in (("hidden_size", base.hidden_size), ("vocab_size", base.vocab_size)):
        if config.get(key) != found:
            raise HeadsError(
                f"{path}: {key} is {config.get(key)!r}, but the model {base.name} has {found}; {_FIX}, for it"
            )
    made_for = config.get("base_model")
    if not isinstance(made_for, dict) or not isinstance(made_for.get("fingerprint"), str):
        raise HeadsError(
            f"{path}: base_model.fingerprint is missing, so the heads cannot be matched to a model; {_FIX}"
        )
    if made_for["fingerprint"] != base.fingerprint:
        raise HeadsError(
            f"{path}: these heads were made for another base: {made_for.get('name')} with fingerprint "
            f"{made_for['fingerprint'][:19]}…, but {base.name} has {base.fingerprint[:19]}…. The same architecture "
            f"with other weights (another quantisation, the Hub original of a dequantised model) is another base: tune "
            f"heads for this one with `eeinfer tune-heads`, or pass `--heads none`"
        )


def _read_spec(path: Path, index: int, entry: Any, base: Base) -> ExitSpec:
    where = f"{path}: exits[{index}]"
    if not isinstance(entry, dict):
        raise HeadsError(f"{where} must be an object")
    if unknown := sorted(set(entry) - _ENTRY_KEYS):
        raise HeadsError(f"{where} has unknown keys {unknown}; known are {sorted(_ENTRY_KEYS)}")
    if entry.get("kind") not in list(get_args(HeadKind)):
        raise HeadsError(f"{where}: kind is {entry.get('kind')!r}; known kinds are {', '.join(get_args(HeadKind))}")
    depth: Any = entry.get("layers_executed")
    temperature = entry.get("temperature", 1.0)
    if not _is_count(depth) or not depth < base.num_layers:
        raise HeadsError(f"{where}: layers_executed is {depth!r}; it must lie in 1 … {base.num_layers - 1}")
    if not is_positive(temperature):
        raise HeadsError(f"{where}: temperature is {temperature!r}; it must be a positive number")
    if not isinstance(entry.get("tied", True), bool):
        raise HeadsError(f"{where}: tied is {entry['tied']!r}; it must be true or false")
    sizes = _read_sizes(where, entry)
    tied, gate = entry.get("tied", True), _read_gate(where, entry)
    completion = _read_completion(where, entry, base.num_layers - depth - 1)
    return ExitSpec(
        depth, entry["kind"], tied=tied, temperature=float(temperature), gate=gate, completion=completion, **sizes
    )


def _read_sizes(where: str, entry: dict[str, Any]) -> dict[str, int | None]:
    """The sizes that an entry may hold or leave out: rank and intermediate."""
    allowed = {
        "rank": "a positive integer, or null for a full matrix",
        "intermediate": "the positive width of the MLP for kind mlp, and null for other kinds",
    }
    sizes = {key: entry.get(key) for key in allowed}
    is_mlp = entry["kind"] == "mlp"
    for key, value in sizes.items():
        fits = key != "intermediate" or is_mlp == (value is not None)
        if not fits or (value is not None and not _is_count(value)):
            raise HeadsError(f"{where}: {key} is {value!r}; it must be {allowed[key]}")
    return sizes


def _read_gate(where: str, entry: dict[str, Any]) -> GateSpec | None:
    """Sizes of the gate. Older files have its width alone, and False where there is none."""
    gate = entry.get("gate")
    if gate is None or gate is False:
        return None
    sizes = gate if isinstance(gate, dict) else {"width": gate}
    fits = "width" in sizes and set(sizes) <= {"width", "tokens"}
    if not fits or not all(_is_count(n) or (key == "tokens" and n is None) for key, n in sizes.items()):
        raise HeadsError(
            f"{where}: gate is {gate!r}; it must be null for no gate, or an object with a positive width and, for a "
            f"gate with a shortlist, positive tokens"
        )
    return GateSpec(**sizes)


def _read_completion(where: str, entry: dict[str, Any], layers: int) -> LearnedKVSpec | None:
    """Sizes of the learned completion; `layers` are left after the first that the exit skips."""
    sizes = entry.get("completion")
    if sizes is None:
        return None
    names = [field.name for field in fields(LearnedKVSpec)]
    if not isinstance(sizes, dict) or set(sizes) != set(names) or not all(_is_count(n) for n in sizes.values()):
        raise HeadsError(
            f"{where}: completion is {sizes!r}; it must be null for none, or an object with positive {', '.join(names)}"
        )
    if sizes["layers"] != layers:
        raise HeadsError(
            f"{where}: completion has {sizes['layers']} layers, but {layers} are left after the first that this exit "
            f"skips; {_FIX}"
        )
    return LearnedKVSpec(**sizes)


def is_positive(value: Any) -> bool:
    """Whether a JSON value is a number above 0 that float64 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _read_tensors(path: Path, specs: tuple[ExitSpec, ...], base: Base) -> tuple[dict[str, Tensor], ...]:
    shapes = [spec.tensor_shapes(base.hidden_size, base.vocab_size) for spec in specs]
    expected = {f"exits.{i}.{name}": shape for i, own in enumerate(shapes) for name, shape in own.items()}
    found = _read_safetensors(path) if expected or path.exists() else {}
    if missing := sorted(set(expected) - set(found)):
        raise HeadsError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all); {_FIX}")
    if unexpected := sorted(set(found) - set(expected)):
        names = f"{unexpected[0]} ({len(unexpected)} in all)"
        raise HeadsError(f"{path}: unexpected tensor {names}; {CONFIG_NAME} describes heads without it; {_FIX}")
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise HeadsError(
                f"{path}: {name} has shape {tuple(found[name].shape)}, {CONFIG_NAME} asks for {shape}; {_FIX}"
            )
        if found[name].dtype not in _DTYPES:
            raise HeadsError(f"{path}: {name} is {found[name].dtype}; heads are bfloat16, float16, float32 or float64")
        if not torch.isfinite(found[name]).all():
            raise HeadsError(f"{path}: {name} holds NaN or infinite values; {_FIX}")
    return tuple({name: found[f"exits.{i}.{name}"] for name in own} for i, own in enumerate(shapes))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
        with path.open("rb") as file:  # of two tensors of one name the library gives the last
            json.loads(file.read(int.from_bytes(file.read(8), "little")), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise HeadsError(f"{path} is missing; it belongs beside {CONFIG_NAME}") from None
    except RepeatedKeyError as error:
        raise HeadsError(f"{path}: tensor {error.key} occurs twice; {_FIX}") from None
    except (SafetensorError, OSError) as error:
        raise HeadsError(f"{path} is not a readable safetensors file ({error}); {_FIX}") from None
    return tensors
