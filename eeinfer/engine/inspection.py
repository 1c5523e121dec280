"""What a model is and what it takes to serve it here, from configs and headers: no weights are read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from math import inf, prod
from pathlib import Path
from typing import Any

import torch

from eeinfer.config.load import Loaded
from eeinfer.config.schema import Settings
from eeinfer.engine.build import Located, Note, PlannedExit, device_of, dtype_of, locate, plan_exits
from eeinfer.engine.certificate import read_certificate, standing
from eeinfer.exits.files import Base, HeadsFile, load_specs
from eeinfer.model.fingerprint import stored_tensors
from eeinfer.model.folder import CONFIG_FILE, read_json, read_json_if_present
from eeinfer.model.store import MANIFEST_FILE
from eeinfer.model.weights import weight_bytes
from eeinfer.runner.memory import bytes_per_block, fitting_blocks, free_memory

Section = dict[str, Any]
_EMBEDDINGS = re.compile(r"embed|\bw[tp]e\b")


def inspection(resolve: Callable[[Path | None], Loaded], note: Note) -> dict[str, Section | None]:
    """Sections of plain values: model, parameters, exits, memory and calibration, which is None without one.

    Raises:
        EeinferError: the settings, the model's files or its heads cannot be used.
    """
    located = locate(resolve(None).settings.model, note)
    loaded = resolve(located.packaged_settings)
    settings = loaded.settings
    planned = plan_exits(settings, located, note, read=_without_tensors)
    return {
        "model": _model(located),
        "parameters": _parameters(located),
        "exits": _exits(settings, located, planned),
        "memory": _memory(settings, located),
        "calibration": _calibration(loaded, located, planned),
    }


def _without_tensors(folder: Path, base: Base) -> HeadsFile:
    specs = load_specs(folder, base)
    return HeadsFile(specs, tuple({} for _ in specs))


def _model(located: Located) -> Section:
    folder = _folder(located)
    config = read_json(folder / CONFIG_FILE)
    manifest = read_json_if_present(folder / MANIFEST_FILE)
    return {
        "name": located.base.name,
        "folder": str(folder),
        "source": " ".join(str(manifest[key]) for key in ("source", "version", "note") if manifest.get(key)) or None,
        "fingerprint": located.base.fingerprint,
        "architecture": ", ".join(map(str, config["architectures"])),
        "family": config.get("model_type"),
        **asdict(located.config),
    }


def _parameters(located: Located) -> Section:
    """Counts by part; what is in the files twice, as the head of some tied models is, counts once."""
    counts: Counter[str] = Counter()
    tensors = stored_tensors(_folder(located))
    for name, tensor in tensors.items():
        counts[_part(name)] += prod(tensor.shape)
    if located.config.tied:
        del counts["lm_head"]
    return {
        "total": counts.total(),
        **{part: counts[part] for part in ("embedding", "layers", "lm_head", "other")},
        "file_bytes": sum(tensor.size for tensor in tensors.values()),
        "file_dtypes": sorted({tensor.dtype for tensor in tensors.values()}),
    }


def _part(name: str) -> str:
    if re.search(r"\.\d+\.", name):
        return "layers"
    return "lm_head" if name.startswith("lm_head") else "embedding" if _EMBEDDINGS.search(name) else "other"


def _exits(settings: Settings, located: Located, planned: list[PlannedExit]) -> Section:
    """Every exit that has a head or is asked for; the threshold is None where no token can leave."""
    config = located.config
    tuned = load_specs(located.heads, located.base) if located.heads else ()
    in_use = {exit_.spec.layers_executed: exit_ for exit_ in planned}
    specs = {spec.layers_executed: spec for spec in (*tuned, *(exit_.spec for exit_ in planned))}
    return {
        "heads": str(located.heads) if located.heads else None,
        "strategy": settings.batching.strategy,
        "measure": settings.exits.measure,
        "exits": [
            {
                **asdict(specs[depth]),
                "parameters": sum(
                    map(prod, specs[depth].tensor_shapes(config.hidden_size, config.vocab_size).values())
                ),
                "threshold": _finite(in_use[depth].threshold) if depth in in_use else None,
            }
            for depth in sorted(specs)
        ],
    }


def _finite(threshold: float) -> float | str:
    return "-inf" if threshold == -inf else threshold


def _memory(settings: Settings, located: Located) -> Section:
    config, cache = located.config, settings.cache
    device = device_of(settings.model.device)
    dtype: torch.dtype = dtype_of(settings.model.dtype, config.dtype)
    weights, free = weight_bytes(config, dtype), free_memory(device)
    size = bytes_per_block(config, dtype, cache.block_size)
    blocks = max(0, fitting_blocks(cache, device, free - weights, size))
    if cache.num_blocks != "auto":
        blocks = min(blocks, cache.num_blocks)
    return {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": weights,
        "free_bytes": free,
        "kv_bytes_per_token": bytes_per_block(config, dtype, 1),
        "tokens": blocks * cache.block_size,
        "full_contexts": blocks * cache.block_size // config.max_position,
    }


def _calibration(loaded: Loaded, located: Located, planned: list[PlannedExit]) -> Section | None:
    """What the calibration in use promises, and why it does not hold for what would run, if so."""
    if loaded.calibration is None:
        return None
    certificate = read_certificate(loaded.calibration)
    held = standing(loaded.calibration, loaded.settings, located, planned)
    return {
        "file": loaded.calibration.origin,
        **{key: getattr(certificate, key) for key in ("certified", "tolerance", "confidence", "n", "mean_layers")},
        "reason": (held.difference if held else "no exit is in use") or None,
    }


def _folder(located: Located) -> Path:
    assert located.folder is not None, "random weights have no files"
    return located.folder
