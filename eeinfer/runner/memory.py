"""How much memory there is, and how many KV blocks fit it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from eeinfer.config.schema import CacheSettings
from eeinfer.errors import ConfigError
from eeinfer.model.families import ModelConfig
from eeinfer.model.weights import weight_bytes

_CGROUP = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
# Version 2 and 1: folder below the mount point, limit, usage, and the part of it that is page cache to be dropped.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_FRACTION = {"cpu": 0.5, "cuda": 0.9}
_NARROW = 2  # bytes of the types that models come in


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`; on the host, a container's limit counts, not the machine's."""
    if device.type == "cuda":
        # What torch's allocator keeps for later is free for whatever comes.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return max(0, min([_available(), *_cgroup_free()]))


def _available() -> int:
    """Bytes that the host can give to new work without swapping."""
    for line in _read_text(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    import psutil  # not Linux

    return int(psutil.virtual_memory().available)


def _cgroup_free() -> Iterator[int]:
    """Bytes left under each memory limit of this process's control group and of the groups around it."""
    for version in _VERSIONS:
        for group in _groups():
            folder = _CGROUP / version[0] / group
            limit, used = (_read_int(folder / name) for name in version[1:3])
            if limit is not None and used is not None:
                yield limit - used + _read_stat(folder / "memory.stat", version[3])


def _groups() -> list[str]:
    """Paths of this process's control groups and all around them, below the mount point, outermost first."""
    names = (line.split(":", 2)[-1].strip("/") for line in _read_text(_PROCESS).splitlines())
    parts = (name.split("/") for name in names if name)
    return ["", *{"/".join(names[:i]) for names in parts for i in range(1, len(names) + 1)}]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_stat(path: Path, key: str) -> int:
    entries = (line.split() for line in _read_text(path).splitlines())
    return next((int(entry[1]) for entry in entries if len(entry) == 2 and entry[0] == key), 0)  # noqa: PLR2004


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on the host, take no memory before they are written: anonymous pages are zero until then.

    `torch.zeros` would touch every page of a cache of which a short run uses a corner.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def bytes_per_block(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one KV block in all layers."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def check_weights(name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of the weights of model `name`.

    Raises:
        ConfigError: they do not fit.
    """
    needed, free = weight_bytes(config, dtype), free_memory(device)
    if needed > free:
        narrower = "" if dtype.itemsize <= _NARROW else ", pass --dtype bfloat16"
        raise ConfigError(
            f"{name} needs {needed / 2**30:.1f} GiB for its weights in {str(dtype).removeprefix('torch.')}, but "
            f"{free / 2**30:.1f} GiB are free on {device}: end other programs there{narrower} or take a smaller model"
        )
    return needed


def num_blocks(
    settings: CacheSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    *,
    reserved: int = 0,
) -> int:
    """KV blocks to allocate: as many as asked for, or as fit, but never more than `max_num_seqs` full contexts.

    Args:
        settings: of the cache.
        config: of the model.
        dtype: of the cache.
        device: where it will lie.
        max_num_seqs: most sequences in flight.
        reserved: bytes of the free memory that are needed beside the cache; not asked when the number is given.

    Raises:
        ConfigError: they do not fit; the message says how many would.
    """
    size, free = bytes_per_block(config, dtype, settings.block_size), free_memory(device)
    if settings.num_blocks != "auto":
        if settings.num_blocks * size > free:
            raise ConfigError(
                f"cache.num_blocks = {settings.num_blocks} needs {settings.num_blocks * size / 2**20:.0f} MiB, but "
                f"{free / 2**20:.0f} MiB are free on {device}: at most {free // size} fit"
            )
        return settings.num_blocks
    useful = max_num_seqs * -(-config.max_position // settings.block_size)
    fitting = fitting_blocks(settings, device, free - reserved, size)
    if fitting < 1:
        kept = f" beside {reserved / 2**20:.0f} MiB for its steps" if reserved else ""
        smaller = (
            "lower batching.max_num_batched_tokens or batching.max_num_seqs" if reserved else "take a smaller model"
        )
        raise ConfigError(
            f"not one KV block of {size / 2**20:.1f} MiB fits {_fraction(settings, device):.0%} of the "
            f"{free / 2**20:.0f} MiB free on {device}{kept}: raise cache.memory_fraction or {smaller}"
        )
    return min(useful, fitting)


def fitting_blocks(settings: CacheSettings, device: torch.device, free: int, size: int) -> int:
    """KV blocks of `size` bytes that fit the share of `free` bytes that the cache may take."""
    return int(free * _fraction(settings, device)) // size


def _fraction(settings: CacheSettings, device: torch.device) -> float:
    return _FRACTION[device.type] if settings.memory_fraction == "auto" else settings.memory_fraction
