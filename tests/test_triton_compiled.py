"""Triton kernels are compiled for an H200 where there is none: types, products' shapes, shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed here; it is for Linux alone")

SHARED_MEMORY = 227 * 1024  # bytes that a block of a Hopper GPU can have
KERNELS = {
    *("_attend_split", "_merge_splits", "_attend_tile", "_rotate_and_store", "_store_layers"),
    *("_rms_norm", "_gated", "_part_stats", "_merge_parts"),
}


def test_all_kernels_compile(tmp_path: Path) -> None:
    program = Path(__file__).with_name("triton_compiler.py")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(program.parent.parent)}
    ended = subprocess.run([sys.executable, program], env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [line.split("\t") for line in ended.stdout.splitlines()]
    assert {name for name, _, _ in lines} == KERNELS
    assert max(int(shared) for _, _, shared in lines) <= SHARED_MEMORY
