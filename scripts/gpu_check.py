"""Checks eeinfer on a GPU and measures it there: kernels, graphs, engines, then figures. See gpu_check.sh.

Every cell prints a line and is in the JSON file before the next begins. The first wrong result ends the run with exit
code 1. What does not fit the device, by arithmetic, or the budget, is skipped with the figures.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from math import inf
from pathlib import Path
from typing import Any

BUDGET = 280.0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(os.environ.get("OUT") or ".")
    parser.add_argument("--output", type=Path, default=folder / "gpu_check.json", help="the JSON file (%(default)s)")
    parser.add_argument("--budget", type=float, help=f"seconds for everything ({BUDGET:.0f}; none in a dry run)")
    parser.add_argument("--full", action="store_true", help="more models, batches, contexts and block sizes")
    parser.add_argument("--keep-going", action="store_true", help="a wrong result does not end the run")
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny, kernels interpreted: measures nothing")
    parser.add_argument("--only", metavar="WORD", help="only cells whose names contain this")
    parser.add_argument("--jobs", type=int, help="processes that compile kernels (up to 10; 1 in a dry run)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the cells; returns the exit code."""
    given = _arguments(arguments)
    if given.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import torch
    from gpu.place import Place
    from gpu.report import Report

    if not given.dry and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no CUDA device here; --dry runs the same cells on a CPU", file=sys.stderr
        )
        return 2
    place = Place(torch.device("cpu" if given.dry else "cuda"), given.dry, given.full)
    if given.dry:
        print("DRY RUN: kernels are interpreted on a CPU, graphs are called in place of replayed; times mean nothing")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    budget = given.budget or (inf if given.dry else BUDGET)
    report = Report(given.output, budget, given.keep_going, _header(place))
    print(", ".join(f"{name} {value}" for name, value in report.header["environment"].items()), flush=True)
    for cell in _cells(place, report, given.jobs):
        if (given.only is None or given.only in cell.name) and not report.run(cell):
            break
    report.write()
    report.summary()
    if given.dry:
        print("DRY RUN: nothing was measured on a GPU")
    return 1 if report.failed else 0


def _cells(place: Any, report: Any, jobs: int | None) -> Iterator[Any]:
    from gpu import engines, figures, kernels

    yield from kernels.cells(place, jobs or (1 if place.dry else min(10, os.cpu_count() or 1)))
    yield from engines.cells(place)
    yield from figures.cells(place, report)


def _header(place: Any) -> dict[str, Any]:
    import torch

    from eeinfer.bench.environment import commit

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if not place.dry:
        properties = torch.cuda.get_device_properties(place.device)
        found |= {"device": properties.name, "memory": f"{properties.total_memory / 2**30:.0f} GiB"}
        found |= {"processors": properties.multi_processor_count, "cuda": torch.version.cuda, "driver": _driver()}
    return {
        "schema": "eeinfer-gpu-check",
        "version": 1,
        "dry": place.dry,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "environment": found,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - fixed words
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
