"""Tables, markdown and CSV of reports, and the comparison of two."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from sample_report import cell, report

from eeinfer.bench.columns import rows_of
from eeinfer.bench.compare import compare, print_comparison
from eeinfer.bench.metrics import Ratio
from eeinfer.bench.tables import csv_text, markdown, print_report, tables
from eeinfer.errors import EeinferError

DEPTHS = (18, 21, 30, 21)


def console(width: int = 120) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=False)


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def printed(made: Mapping[str, Any], width: int = 120) -> str:
    shown = console(width)
    print_report(made, shown)
    return text_of(shown)


def sweep() -> dict[str, Any]:
    fast = (1.6, 1.9, 1.5)
    return report(
        *(
            cell(name, fast if name == "split" else (2.0, 2.1, 1.9), DEPTHS if name == "split" else (30,), batch=batch)
            for batch in (1, 8, 64)
            for name in ("full", "all-exit", "split")
        )
    )


def test_a_table_has_a_row_for_each_strategy_full_first() -> None:
    for table in tables(rows_of(report(cell(), cell("all-exit"), cell("split")))):
        assert [row[0] for row in table.rows] == ["full", "all-exit", "split"]
        assert {len(row) for row in table.rows} == {len(table.headers)}


def test_what_varies_is_in_the_rows_and_the_rest_above() -> None:
    text = printed(sweep())
    above = text.split("Speed")[0]
    assert "exits 18, 21; threshold 0.9, 0.85" in above
    assert "output 64" in above
    assert "batch" not in above
    assert tables(rows_of(sweep()))[0].headers[:2] == ("batch", "strategy")


def test_no_cell_is_broken_at_120_columns() -> None:
    made = sweep()
    lines = printed(made).splitlines()
    for table in tables(rows_of(made)):
        for row in table.rows:
            assert any(all(text in line for text in row) for line in lines), row


def test_no_figure_is_broken_at_80_columns() -> None:
    words = {word for word in printed(report(), 200).split() if any(c.isdigit() for c in word)}
    assert words <= set(printed(report(), 80).split())


def test_figures_in_words() -> None:
    noisy = cell("any", (2.05, 1.99, 1.95))
    text = printed(report(cell(), cell("split", (1.6, 1.9, 1.5), DEPTHS), noisy))
    assert "2.5 (2.4 to 2.6)" in text
    assert "1.25 (1.11 to 1.27)\n" in text.replace("  ", "\n")
    assert "0.98 (0.97 to 1.06) in the noise" in text
    assert "18:25.0% 21:50.0% 30:25.0%" in text
    assert "TPOT excludes the first token" in text
    assert "more than 0.05 below" in text
    assert "Warm-up took 1.5 s" in text


def test_one_repeat_says_that_it_has_no_spread() -> None:
    text = printed(report(cell(seconds=(2.0,)), cell("split", (1.6,))))
    assert "1.25 (1 repeat)" in text
    assert "One repeat: there is no spread" in text
    assert "in the noise" not in text


def test_missing_figures_are_told_with_a_reason() -> None:
    made = report(cell(timed=False, memory=None), cell("split", judged=False, timed=False))
    text = printed(made)
    assert "– under exit efficiency: no layer was skipped" in text
    assert "– under loss, strict loss, identical: the answers were not judged." in text
    assert "– under peak memory GiB" in text
    assert "Not measured: where a decode step went." in text
    assert "ROUGE-L" not in text


def test_an_interrupted_benchmark_is_marked() -> None:
    text = printed(report(cell(seconds=()), cell("split", ()), interrupted=True))
    assert "Interrupted: only rounds" in text
    assert "No complete round of: full (batch 32" in text
    assert "– under" not in text


def test_answers_that_mean_nothing_are_marked() -> None:
    made = report(model={"random_weights": True}, workload={"simulate_exits": "0.3@18", "warmup": 0})
    text = printed(made)
    assert "Exits were simulated (0.3@18)" in text
    assert "The weights are random" in text
    assert "There was no warm-up." in text


def test_a_roofline_is_shown_with_its_rates() -> None:
    floor = {
        "floor_seconds_per_iteration": 0.01,
        "measured_seconds_per_iteration": 0.025,
        "ratio": 2.5,
        "bound": "read",
    }
    wrong = floor | {"ratio": 0.5, "bug": "the ratio is under 1"}
    machine = {"read": {"best": 18e9, "by": "mv"}, "matrix": {"best": 1.3e12, "by": "mm"}}
    text = printed(report(replace(cell(), roofline=floor), replace(cell("split"), roofline=wrong), roofline=machine))
    assert all(part in text for part in ("25.00", "10.00", "2.50", "read"))
    assert "threshold 0.9, 0.85): the ratio is under 1." in text
    assert "Read bandwidth: at best 18 GB/s (by mv)." in text
    assert "Matrix rate: at best 1.3 TFLOP/s (by mm)." in text


def test_markdown_tables_are_well_formed() -> None:
    made = report(model={"name": "a|b"})
    lines = [line for line in markdown(made).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines if "tokens/s" in line} == {6, 5}
    assert "| full | 2.5 (2.4 to 2.6) | baseline |" in markdown(made)


def test_csv_has_raw_numbers() -> None:
    made = report(cell(), cell("split", (1.6, 1.9, 1.5), DEPTHS, threshold=(float("inf"), 0.5), judged=False))
    full, split = csv.DictReader(io.StringIO(csv_text(made)))
    assert float(full["tokens_per_second_median"]) == pytest.approx(2.5)
    assert (full["speed_up_median"], split["loss"]) == ("", "")
    assert float(split["speed_up_median"]) == pytest.approx(1.25)
    assert float(split["tpot_p50"]) == pytest.approx(1.5 / 4)
    assert (split["exits"], split["threshold"]) == ("18 21", "inf 0.5")
    assert split["exit_shares"] == "18:0.25 21:0.5 30:0.25"
    assert float(full["breakdown_attention"]) == pytest.approx(0.004)
    assert csv_text(report() | {"cells": []}).strip() == ""


# Comparison


def test_ratios_are_over_all_pairs_of_runs() -> None:
    a, b = report(cell(seconds=(2.0, 4.0))), report(cell(seconds=(1.0, 2.0)))
    (row,) = compare(a, b).rows
    assert row.tokens_per_second == Ratio(pytest.approx(2.0), pytest.approx(1.0), pytest.approx(4.0), 4)
    assert row.tpot is not None
    assert row.tpot.low == pytest.approx(0.9 / 3.9)
    assert row.loss == 0


def test_what_differs_comes_first() -> None:
    b = report(workload={"seed": 1}, interrupted=True)
    b["environment"] |= {"threads": 4, "OMP_NUM_THREADS": "4"}
    b["commit"] = "other"
    a = report()
    found = compare(a, b)
    names = [difference.name for difference in found.differences]
    assert names == ["commit", "environment.OMP_NUM_THREADS", "environment.threads", "workload.seed"]
    shown = console()
    print_comparison(a, b, shown)
    text = text_of(shown)
    assert text.index("environment.threads") < text.index("B over A")
    assert "B was interrupted" in text
    assert "+0.00" in text


def test_cells_of_one_report_only_are_named() -> None:
    a, b = report(cell(), cell("split")), report(cell(), cell("split", threshold=(0.5, 0.5), judged=False))
    assert [row.key["strategy"] for row in compare(a, b).rows] == ["full"]
    shown = console()
    print_comparison(a, b, shown)
    assert "Only in A: split (batch 32, input as given, output 64, exits 18, 21, threshold 0.9, 0.85)" in text_of(shown)
    assert "Only in B: split (batch 32, input as given, output 64, exits 18, 21, threshold 0.5)" in text_of(shown)


def test_missing_figures_of_a_comparison_have_a_reason() -> None:
    shown = console()
    print_comparison(report(cell()), report(cell(seconds=(), judged=False)), shown)
    assert "–: one of the two has no such figure" in text_of(shown)


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(EeinferError, match=r"no cell in common: A has full \(batch 1,.*B has full \(batch 8,"):
        compare(report(cell(batch=1)), report(cell(batch=8)))
