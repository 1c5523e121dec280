"""Facts about the machine and the software on it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# What native kernels and oneDNN choose by, as Linux spells it on x86 and on Arm.
_FEATURES = (
    *("avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "sve2", "bf16", "i8mm"),
)
_PACKAGES = ("eeinfer", "torch", "triton", "tokenizers", "safetensors", "huggingface_hub", "gguf", "numpy", "typer")
_COMPILERS = ("cc", "c++", "gcc", "g++", "clang++", "nvcc")


def versions() -> dict[str, str | None]:
    """Python and the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu_name() -> str:
    """The processor's name."""
    names = _cpuinfo("model name")
    return names[0] if names else platform.processor() or platform.machine()


def cpu_features() -> list[str] | None:
    """The instruction sets that decide about speed; None where the system does not tell."""
    flags = {flag for line in (_cpuinfo("flags") or _cpuinfo("Features"))[:1] for flag in line.split()}
    return [name for name in _FEATURES if name in flags] if flags else None


def _cpuinfo(key: str) -> list[str]:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # not Linux
    return [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == key]


def cores() -> int | None:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def compilers() -> dict[str, str]:
    """The compilers found, each with the line of its `--version` that names it."""
    found: dict[str, str] = {}
    for name in _COMPILERS:
        if (path := shutil.which(name)) is not None:
            try:
                ended = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - fixed words
            except (OSError, subprocess.SubprocessError):
                continue  # a stub that asks for an installation
            lines = [line for line in ended.stdout.splitlines() if any(c.isdigit() for c in line)]
            found[name] = next((line.strip() for line in lines if "release" in line), lines[0] if lines else path)
    return found
