"""The quality curve of reports written by hand: what belongs together, the Pareto front, tables, JSON, pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from eeinfer.bench.curve import CURVE_THRESHOLDS, Curve, curve_table, curves, curves_json
from eeinfer.bench.plot import check_plot, plot_curve
from eeinfer.bench.tables import markdown_table, print_table
from eeinfer.errors import EeinferError


def figures(speed: float, mean_layers: float | None = 24.0) -> dict[str, Any]:
    """One repeat: what a report keeps of a run."""
    return {
        "seconds": 1.0,
        "prefill_seconds": 0.25,
        "decode_seconds": 0.75,
        "requests": 8,
        "failed_requests": 0,
        "prompt_tokens": 100,
        "generated_tokens": int(speed),
        "decode_tokens": int(speed),
        "decode_iterations": 10,
        "tokens_per_second": speed,
        "decode_tokens_per_second": speed,
        "requests_per_second": 1.0,
        "ttft": [],
        "tpot": [],
        "mean_layers": mean_layers,
        "exit_shares": {},
        "involuntary_exits": 0,
        "involuntary_stays": 0,
        "preemptions": 0,
        "peak_blocks": 1,
        "peak_memory": None,
    }


def cell(
    strategy: str, thresholds: list[Any], speeds: list[float], loss: float | None, batch: int = 32, **figures_of: Any
) -> dict[str, Any]:
    quality = {"strict_loss": loss, "identical": 0.5, "tie": 0.05, "rouge_l": None, "exact_match": None, "failed": 0}
    exits = [18, 24] if thresholds else []
    work = {"batch": batch, "input_len": None, "output_len": 64}
    return {
        "key": {"strategy": strategy, **work, "exits": exits, "threshold": thresholds},
        "warmup_seconds": 0.0,
        "repeats": [figures(speed, **figures_of) for speed in speeds],
        "breakdown": None,
        "quality": None if loss is None else {"loss": loss, **quality},
        "roofline": None,
    }


def report_of(*cells: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"name": "tiny", "num_layers": 30}, "cells": list(cells)}


FULL = cell("full", [], [100, 200, 100], 0.01, mean_layers=30.0)
REPORT = report_of(
    FULL,
    cell("split", [0.5, 0.5], [150, 300, 160], 0.10),
    cell("split", [0.9, 0.9], [120, 260, 110], 0.03),
    cell("split", ["inf", "inf"], [90, 210, 95], 0.01),
    cell("split", [0.7, 0.6], [110, 220, 120], 0.05),
)


def only(report: dict[str, Any]) -> Curve:
    [curve] = curves(report)
    return curve


def test_points_go_from_the_highest_threshold_down_with_paired_ratios() -> None:
    curve = only(REPORT)
    assert (curve.strategy, curve.batch, curve.exits) == ("split", 32, (18, 24))
    assert [point.label for point in curve.points] == ["inf", "0.9", "0.7,0.6", "0.5"]
    assert (curve.full.label, curve.full.speed_up, curve.full.loss) == ("full", None, 0.01)
    ratio = curve.points[1].speed_up
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == pytest.approx((1.2, 1.1, 1.3, 3))
    assert curve.points[1].mean_layers == 24


def test_the_pareto_front_counts_full_as_a_rival() -> None:
    # inf is slower than full at its loss; 0.7,0.6 is slower than 0.9 and loses more.
    assert [point.pareto for point in only(REPORT).points] == [False, True, False, True]


def test_equal_points_do_not_push_each_other_off_the_front() -> None:
    twins = report_of(FULL, cell("split", [0.9, 0.9], [120] * 3, 0.03), cell("split", [0.8, 0.8], [120] * 3, 0.03))
    assert [point.pareto for point in only(twins).points] == [True, True]
    better = report_of(*twins["cells"], cell("split", [0.7, 0.7], [120] * 3, 0.02))
    assert [point.pareto for point in only(better).points] == [False, False, True]


def test_each_strategy_set_of_exits_and_work_has_its_own_curve() -> None:
    one_exit = [cell("split", [t], [120], 0.02) for t in (0.9, 0.8)]
    for entry in one_exit:
        entry["key"]["exits"] = [24]
    report = report_of(
        *REPORT["cells"],
        *one_exit,
        *(cell("all-exit", [t, t], [101], 0.02) for t in (0.5, 0.9)),
        cell("any", [0.5, 0.5], [101], 0.02),
        cell("full", [], [50], 0.02, batch=8),
        *(cell("split", [t, t], [60], 0.03, batch=8) for t in (0.5, 0.9)),
    )
    found = curves(report)
    assert [(c.strategy, c.exits, c.batch, len(c.points)) for c in found] == [
        ("split", (18, 24), 32, 4),
        ("split", (24,), 32, 2),
        ("all-exit", (18, 24), 32, 2),
        ("split", (18, 24), 8, 2),
    ]
    assert found[3].full.loss == 0.02, "each work has its own full"
    assert found[3].points[0].speed_up is not None
    assert found[3].points[0].speed_up.median == pytest.approx(60 / 50)


def test_one_threshold_is_no_curve() -> None:
    with pytest.raises(EeinferError, match="several thresholds; run with --curve, or give --threshold more than once"):
        curves(report_of(FULL, cell("split", [0.9, 0.9], [120], 0.02)))


def test_points_without_figures_stay_and_are_never_on_the_front() -> None:
    curve = only(report_of(FULL, cell("split", [0.9, 0.9], [120], None), cell("split", [0.8, 0.8], [], 0.0)))
    assert [(p.speed_up is None, p.loss, p.pareto) for p in curve.points] == [(False, None, False), (True, 0.0, False)]


def test_json_is_whole_and_plain() -> None:
    [plain] = json.loads(json.dumps(curves_json(curves(REPORT)), allow_nan=False))
    assert plain["full"]["loss"] == 0.01
    assert plain["points"][0]["threshold"] == ["inf", "inf"]
    assert plain["points"][1]["speed_up"] == {
        "median": pytest.approx(1.2),
        "low": pytest.approx(1.1),
        "high": pytest.approx(1.3),
        "pairs": 3,
    }
    assert plain["points"][1]["pareto"] is True


def rows_of(curve: Curve) -> list[list[str]]:
    """Cells of the markdown table, its rule left out."""
    lines = [line for line in markdown_table(curve_table(curve)).splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in (lines[0], *lines[2:])]


def test_the_markdown_has_full_first_and_no_empty_column() -> None:
    text = markdown_table(curve_table(only(REPORT)))
    assert text.startswith("**split at 18, 24: batch 32, prompts as they are, 64 new tokens**\n\n|")
    assert [[cell.strip() for cell in row] for row in rows_of(only(REPORT))] == [
        ["threshold", "speed-up", "layers", "loss", "strict", "identical", "Pareto"],
        ["full", "baseline", "30.00", "1.00%", "1.00%", "50.00%", ""],
        ["inf", "0.95 (0.90 to 1.05) in the noise", "24.00", "1.00%", "1.00%", "50.00%", ""],
        ["0.9", "1.20 (1.10 to 1.30)", "24.00", "3.00%", "3.00%", "50.00%", "yes"],
        ["0.7,0.6", "1.10 (1.10 to 1.20)", "24.00", "5.00%", "5.00%", "50.00%", ""],
        ["0.5", "1.50 (1.50 to 1.60)", "24.00", "10.00%", "10.00%", "50.00%", "yes"],
    ]


def test_references_bring_their_columns() -> None:
    report = report_of(FULL, *(cell("split", [t, t], [120], 0.02) for t in (0.5, 0.9)))
    report["cells"][1]["quality"] |= {"rouge_l": 0.25, "exact_match": 0.125}
    headers, full, first, second = ([cell.strip() for cell in row[-3:]] for row in rows_of(only(report)))
    assert headers == ["ROUGE-L", "exact", "Pareto"]
    assert (full[:2], first[:2], second[:2]) == (["–", "–"], ["–", "–"], ["0.250", "12.50%"])


def test_it_fits_a_terminal_of_120_columns() -> None:
    report = report_of(FULL, *(cell("split", [t, t], [120, 170, 110], 0.02) for t in (0.5, 0.9)))
    report["cells"][1]["quality"] |= {"rouge_l": 0.25, "exact_match": 0.125}
    console = Console(width=120, record=True, file=StringIO())
    print_table(curve_table(only(report)), console)
    lines = console.export_text().splitlines()
    assert any("1.10 (0.85 to 1.20) in the noise" in line and "12.50%" in line for line in lines)


def test_the_default_thresholds_are_a_falling_grid() -> None:
    assert list(CURVE_THRESHOLDS) == sorted(set(CURVE_THRESHOLDS), reverse=True)
    assert 0 < CURVE_THRESHOLDS[-1] < CURVE_THRESHOLDS[0] < 1


def test_a_png_shows_the_curve(tmp_path: Path) -> None:
    from matplotlib.image import imread

    plot_curve(REPORT, tmp_path / "curve.PNG")
    pixels = imread(tmp_path / "curve.PNG", format="png")[..., :3]
    assert pixels.shape[:2] == (736, 1024)
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    assert (np.abs(pixels - blue).max(axis=-1) < 0.02).sum() > 500, "no line in the curve's colour"


def test_an_svg_names_work_thresholds_and_floor(tmp_path: Path) -> None:
    path = tmp_path / "curve.svg"
    path.write_text("old")
    plot_curve(REPORT, path)
    written = path.read_text(encoding="utf-8")
    assert "<svg" in written
    # Text is drawn as paths, with a comment that repeats it.
    for text in ("batch 32, prompts as they are, 64 new tokens", "0.7,0.6", "loss of full, 1.00%", "split at 18, 24"):
        assert f"<!-- {text} -->" in written


def test_several_works_have_a_panel_each(tmp_path: Path) -> None:
    more = [
        part
        for batch in (1, 8)
        for part in (
            cell("full", [], [50], 0.02, batch=batch),
            *(cell("split", [t, t], [60], 0.03, batch=batch) for t in (0.5, 0.9)),
        )
    ]
    plot_curve(report_of(*REPORT["cells"], *more), tmp_path / "curve.svg")
    written = (tmp_path / "curve.svg").read_text(encoding="utf-8")
    assert [written.count(f"<!-- batch {batch}, ") for batch in (1, 8, 32)] == [1, 1, 1]
    assert written.count("<!-- speed-up over full -->") == 3, "an empty panel stays"


def test_what_cannot_be_plotted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EeinferError, match=r"curve.pdf: a plot is written as .png or .svg"):
        check_plot(tmp_path / "curve.pdf")
    unjudged = report_of(FULL, *(cell("split", [t, t], [120], None) for t in (0.5, 0.9)))
    with pytest.raises(EeinferError, match="no point has both a speed-up and a loss"):
        plot_curve(unjudged, tmp_path / "curve.png")
    with pytest.raises(EeinferError, match=r"cannot write the plot \(No such file or directory\)"):
        plot_curve(REPORT, tmp_path / "missing" / "curve.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EeinferError, match=r"plots need the package matplotlib; pip install -e"):
        plot_curve(REPORT, tmp_path / "curve.png")


def test_the_modules_bring_in_nothing_heavy() -> None:
    program = "import sys, eeinfer.bench.curve, eeinfer.bench.plot\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "matplotlib"} & set(ended.stdout.split()) == set()
