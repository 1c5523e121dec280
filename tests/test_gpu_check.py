"""`scripts/gpu_check.py`: a dry run of all of it, and what decides whether it stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

pytest.importorskip("triton", reason="triton is not installed here; it is for Linux alone")

from gpu.place import Place, row_error  # noqa: E402 - scripts, found by the lines above
from gpu.report import Cell, DoesNotFitError, Report, Target, WrongResultError  # noqa: E402
from gpu.trace import read_timeline  # noqa: E402

# What a machine with torch and triton on it may well lack.
ABSENT = {
    *("annotated_types", "filelock", "gguf", "huggingface_hub", "jinja2", "psutil", "pydantic", "scipy", "tomli_w"),
    "transformers",
}
PROGRAM = f"""
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"no {{name}} here", name=name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, {str(SCRIPTS)!r})
import gpu_check
sys.exit(gpu_check.main(sys.argv[1:]))
"""


def test_a_dry_run_passes_every_cell_where_little_is_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "--dry", "--full", "--jobs", "2", "--output", str(tmp_path / "out.json")]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    kinds = {name.partition(":")[0] for name in report["cells"]}
    assert kinds == {"kernels", "engine", "figures"}
    assert not [name for name, entry in report["cells"].items() if {"wrong", "broke", "skipped"} & set(entry)]
    assert report["targets"]
    assert report["dry"]
    assert "nothing was measured on a GPU" in ended.stdout
    assert all(f"] {name}: " in ended.stdout for name in report["cells"])


def wrong() -> dict[str, Any]:
    raise WrongResultError("2 and 2 are 5")


def broken() -> dict[str, Any]:
    raise ZeroDivisionError


def too_large() -> dict[str, Any]:
    raise DoesNotFitError("1 GiB needed, 0 free")


@pytest.mark.parametrize(
    ("run", "keep_going", "key", "goes_on", "failed"),
    [
        (lambda: {"line": "fine"}, False, "line", True, False),
        (wrong, False, "wrong", False, True),
        (wrong, True, "wrong", True, True),
        (broken, False, "broke", True, True),
        (too_large, False, "skipped", True, False),
    ],
)
def test_what_becomes_of_a_cell(
    tmp_path: Path, run: Callable[[], dict[str, Any]], key: str, *, keep_going: bool, goes_on: bool, failed: bool
) -> None:
    report = Report(tmp_path / "out.json", 100.0, keep_going, {})
    assert report.run(Cell("cell", 1.0, run)) == goes_on
    assert bool(report.failed) == failed
    assert key in json.loads((tmp_path / "out.json").read_text())["cells"]["cell"]


def test_a_cell_beyond_the_budget_does_not_run(tmp_path: Path) -> None:
    report = Report(tmp_path / "out.json", 10.0, keep_going=False, header={})
    assert report.run(Cell("long", 11.0, wrong))
    assert "11 s" in report.cells["long"]["skipped"]
    assert not report.failed


def test_targets_have_a_side() -> None:
    assert Target("ratio", 1.2, 1.25, at_most=True).met
    assert not Target("ratio", 1.3, 1.25, at_most=True).met
    assert Target("speed", 3.0, 3.0, at_most=False).met


def test_the_worst_row_counts_and_nan_is_wrong() -> None:
    reference = torch.tensor([[1000.0, 0.0], [0.0, 1e-3]])
    assert row_error(reference + torch.tensor([[0.0, 0.0], [0.0, 1e-3]]), reference) == pytest.approx(1.0)
    assert row_error(torch.full_like(reference, torch.nan), reference) == torch.inf


def test_a_timeline_tells_the_host_from_gaps_between_kernels() -> None:
    """Two kernels that overlap, a gap of 1 µs within a graph, and one of 100 µs while the host works."""
    spans = [(0, 10, "nvjet_gemm"), (5, 10, "_attend_split"), (16, 4, "_rms_norm"), (120, 30, "nvjet_gemm")]
    events = [{"cat": "kernel", "ts": ts, "dur": dur, "name": name} for ts, dur, name in spans]
    found = read_timeline(
        [*events, {"cat": "cpu_op", "ts": 30, "dur": 50, "name": "aten::add"}, {"ph": "M"}], {"kernel"}
    )
    assert found.span == pytest.approx(150e-6)
    assert found.host == pytest.approx(100e-6)
    assert found.busy == pytest.approx(49e-6)
    assert found.kinds == pytest.approx({"matrix products": 40e-6, "attention": 10e-6, "norms and activations": 4e-6})
    assert found.names["nvjet_gemm"] == (pytest.approx(40e-6), 2)


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch in the place of the kernels, one of them off by a little."""
    from gpu import kernels

    from eeinfer.ops.parts import TORCH, Parts

    def off(out: torch.Tensor) -> torch.Tensor:
        return out * 1.001

    parts: dict[str, Parts] = {
        "rows": replace(TORCH, gated=lambda x, name: off(TORCH.gated(x, name))),
        "decode": replace(TORCH, attention=lambda *args: off(TORCH.attention(*args))),
        "prefill": replace(TORCH, attention=lambda *args: off(TORCH.attention(*args))),
    }
    place = Place(torch.device("cpu"), dry=True, full=False)
    for kind, own in parts.items():
        monkeypatch.setattr(kernels, "triton_parts", lambda _, own=own: own)
        outcome = kernels.outcome_of(kernels.Task(kind, {"rows": 2}.get(kind, 1)), place)
        assert "float32" in outcome.what
        assert outcome.wrong is not None, outcome
