"""What a check has found so far: a line a cell on standard output, and all of it as JSON after each cell."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

Entry = dict[str, Any]


class WrongResultError(Exception):
    """Something was computed that is not what the reference gives. The message is one line."""


class DoesNotFitError(Exception):
    """A cell that this device has no room for, by arithmetic. The message holds the figures."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to check or to measure.

    Attributes:
        name: unique.
        seconds: it takes about.
        run: does it; returns what the JSON keeps, with the line to print as `line`.
    """

    name: str
    seconds: float
    run: Callable[[], Entry]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that is aimed at, beside what was measured. A miss is no error.

    Attributes:
        name: what is measured.
        value: what was.
        bound: what is aimed at.
        at_most: the bound is an upper one.
    """

    name: str
    value: float
    bound: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether the figure is as good as was aimed at."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def line(self) -> str:
        """In words."""
        side = "at most" if self.at_most else "at least"
        return f"{'met   ' if self.met else 'MISSED'} {self.name}: {self.value:.3g}, aimed at {side} {self.bound:g}"


@dataclass(slots=True)
class Report:
    """Runs cells one after another.

    Attributes:
        path: of the JSON file.
        budget: seconds for all cells; one that would not end in time is skipped.
        keep_going: a wrong result does not end the run.
        header: what the JSON begins with.
        cells: outcomes by name.
        targets: collected by the cells.
        failed: names of cells that were wrong or broke.
    """

    path: Path
    budget: float
    keep_going: bool
    header: Mapping[str, Any]
    cells: dict[str, Entry] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _started: float = field(default_factory=perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds since the report was begun."""
        return perf_counter() - self._started

    def run(self, cell: Cell) -> bool:
        """Run a cell. False when nothing more should run."""
        left = self.budget - self.elapsed
        if cell.seconds > left:
            why = f"it takes about {cell.seconds:.0f} s and {max(left, 0):.0f} s of the budget are left"
            return self._keep(cell.name, {"skipped": why, "line": f"skipped: {why}"})
        started = perf_counter()
        goes_on = True
        try:
            entry = cell.run()
        except DoesNotFitError as why:
            entry = {"skipped": str(why), "line": f"skipped: {why}"}
        except WrongResultError as wrong:
            self.failed.append(cell.name)
            entry, goes_on = {"wrong": str(wrong), "line": f"WRONG: {wrong}"}, self.keep_going
        except Exception as error:  # noqa: BLE001 - what one cell dies of says nothing about the next
            self.failed.append(cell.name)
            traceback.print_exc()
            first = str(error).partition("\n")[0]
            entry = {"broke": traceback.format_exc(), "line": f"BROKE: {type(error).__name__}: {first}"}
        entry["seconds"] = perf_counter() - started
        return self._keep(cell.name, entry) and goes_on

    def summary(self) -> None:
        """The targets, and what failed."""
        for target in self.targets:
            print(target.line)
        skipped = [name for name, entry in self.cells.items() if "skipped" in entry]
        if skipped:
            print(f"skipped: {', '.join(skipped)}")
        print(f"FAILED: {', '.join(self.failed)}" if self.failed else "no wrong result", f"({self.elapsed:.0f} s)")

    def _keep(self, name: str, entry: Entry) -> bool:
        self.cells[name] = entry
        print(f"[{self.elapsed:5.0f} s] {name}: {entry.get('line', 'done')}")
        sys.stdout.flush()
        self.write()
        return True

    def write(self) -> None:
        """The JSON as it stands now, whole or not at all."""
        targets = [
            {"name": t.name, "value": t.value, "bound": t.bound, "at_most": t.at_most, "met": t.met}
            for t in self.targets
        ]
        document = {**self.header, "elapsed": self.elapsed, "cells": self.cells, "targets": targets}
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(json.dumps(plain(document), indent=1, allow_nan=False), encoding="utf-8")
        partial.replace(self.path)


def plain(value: Any) -> Any:
    """As JSON holds it: no tuples, keys are text, and numbers that it has no words for are text."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
