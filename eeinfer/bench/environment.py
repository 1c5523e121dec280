"""Where a benchmark ran: the machine, the software, and the commit of the checkout."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from eeinfer.engine.machine import cores, cpu_name

_CHECKOUT = Path(__file__).resolve().parents[2]
_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "CUDA_VISIBLE_", "LD_PRELOAD")  # decide about speed


def environment(*, threads: int, device: str, device_name: str | None) -> dict[str, Any]:
    """The machine and the software that decide about speed.

    Args:
        threads: that torch computes with.
        device: `cpu`, `cuda:0` …
        device_name: of an accelerator.
    """
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": threads,
        "device": device,
        "device_name": device_name,
        "memory_bytes": _memory_bytes(),
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }


def _memory_bytes() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import psutil

    return int(psutil.virtual_memory().total)


def commit(checkout: Path = _CHECKOUT) -> str | None:
    """The commit that this package was run from, with `-dirty` when tracked files differ; None if it is no checkout."""
    git_dir = checkout / ".git"  # asked for by name: an installed package may lie inside somebody else's checkout
    if not git_dir.exists():
        return None
    place = [f"--git-dir={git_dir}", f"--work-tree={checkout}"]
    command = ["git", *place, "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        ended = subprocess.run(  # noqa: S603 - fixed words
            command, capture_output=True, text=True, timeout=10, check=True, cwd=checkout, env=quiet
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or it does not trust the folder: a report without commit is still a report
    return ended.stdout.strip() or None
