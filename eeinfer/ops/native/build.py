"""Builds the native kernels on first use and loads them; says why where that cannot be.

Nothing but a C++ compiler is needed. The result is kept in the model store, under a name that tells apart sources,
flags (`$CXXFLAGS` too) and compilers, so that it is built once.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

from eeinfer.ops.unavailable import Unavailable

SOURCES = Path(__file__).parent
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread"),
    *("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
    "-mprefer-vector-width=512",
)
CPU_FLAGS = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"})
COMPILERS = ("c++", "g++", "clang++")


def cpu_flags() -> frozenset[str]:
    """What the CPU can do, as Linux spells it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def compiler() -> tuple[str, ...]:
    """The C++ compiler, its path first: `$CXX`, which may hold arguments, or the first of the usual names.

    Raises:
        Unavailable: there is none.
    """
    if asked := os.environ.get("CXX"):
        words = asked.split()
        if not words or (path := shutil.which(words[0])) is None:
            raise Unavailable(f"CXX={shlex.quote(asked)} is not a program here; set it to a C++ compiler", fixable=True)
        return (path, *words[1:])
    if found := next((path for name in COMPILERS if (path := shutil.which(name))), None):
        return (found,)
    raise Unavailable("there is no C++ compiler; install g++ or set CXX", fixable=True)


def load(folder: Path) -> ctypes.CDLL:
    """The library, built into `folder` if it is not there yet.

    Raises:
        Unavailable: the CPU lacks instructions, there is no compiler, or it failed.
    """
    if platform.system() != "Linux":
        raise Unavailable(f"native kernels are for Linux, and this is {platform.system()}")
    if missing := sorted(CPU_FLAGS - cpu_flags()):
        raise Unavailable(f"this CPU has no {', '.join(missing)}")
    return _load(folder)


@cache
def _load(folder: Path) -> ctypes.CDLL:
    command = compiler()
    path = folder / f"kernels-{_digest(command)}.so"
    try:
        if path.exists() and (kept := _opened(path)):
            return kept
        _build(command, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be made or loaded: {error}", fixable=True) from None


def _opened(path: Path) -> ctypes.CDLL | None:
    """The library that is there; None if it is damaged, as after a full disk, and has to be built again."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _flags() -> tuple[str, ...]:
    """Ours, then those of `$CXXFLAGS`."""
    return (*FLAGS, *os.environ.get("CXXFLAGS", "").split())


def _digest(command: tuple[str, ...]) -> str:
    about = sha256(" ".join((*_flags(), *command)).encode())
    about.update(str(Path(command[0]).resolve().stat().st_size).encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        about.update(source.read_bytes())
    return about.hexdigest()[:16]


def _build(compiler_command: tuple[str, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may build at once: each writes a file of its own, and the last to rename wins.
    with NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as file:
        target = Path(file.name)
    try:
        command = [*compiler_command, *_flags(), str(SOURCES / "kernels.cpp"), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own sources
        if done.returncode:
            last = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
            told = last or f"it ended with {done.returncode} and said nothing"
            raise Unavailable(f"{compiler_command[0]} failed: {told}", fixable=True)
        ctypes.CDLL(str(target))  # before it gets its name: what cannot be loaded is not kept
        target.chmod(0o755)
        target.replace(path)
    finally:
        target.unlink(missing_ok=True)
