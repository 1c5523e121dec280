"""What stands above and below the tables of a report: what was run, how figures are defined, what to mind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eeinfer.bench.columns import Row, key_name, split_names

_ENOUGH = 5  # repeats
_SETTINGS = {"measure": "exits.measure", "completion": "exits.completion"}


def heading(report: Mapping[str, Any]) -> list[str]:
    """What was run, where, and what all cells share."""
    model, workload, place = report["model"], report["workload"], report["environment"]
    source = f"eeinfer {report['eeinfer_version']}" + (f", commit {report['commit']}" if report["commit"] else "")
    where = place.get("device_name") or place.get("cpu")
    end = ", answers of full length" if workload["ignore_eos"] else ""
    _, shared = split_names([cell["key"] for cell in report["cells"]])
    name = f"{model['name']} (random weights)" if model["random_weights"] else model["name"]
    what = f"{name}, {model['num_layers']} layers, {model['dtype']}"
    most = "at most " if len({(c["key"]["batch"], c["key"]["input_len"]) for c in report["cells"]}) > 1 else ""
    amount = f"{most}{workload['num_prompts']} prompts, {workload['prompt_tokens']} prompt tokens in all,"
    settings = report["settings"]
    shared |= {name: settings[key] for name, key in _SETTINGS.items() if key in settings}
    lines = [
        f"{what}, on {place.get('device')} ({where}, {place.get('threads')} threads); {source}",
        f"{amount} from {workload['source']}, seed {workload['seed']}{end}",
    ]
    return [*lines, "; ".join(f"{name} {text}" for name, text in shared.items())] if shared else lines


def notes(report: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """What to know when reading the tables."""
    return [*_warnings(report, rows), *_repeats(report, rows), *_definitions(rows), *_roofline(report["roofline"])]


def _warnings(report: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    workload = report["workload"]
    if report["interrupted"]:
        yield "Interrupted: only rounds that every strategy of a group had finished are counted."
    if empty := [key_name(row.cell["key"]) for row in rows if not row.summary.repeats]:
        yield f"No complete round of: {'; '.join(empty)}."
    if workload["simulate_exits"] is not None:
        yield f"Exits were simulated ({workload['simulate_exits']}): speed is that of the engine, answers mean nothing."
    if workload["trace"] is not None:
        yield f"Depths were replayed from {workload['trace']}: speed is that of the engine, answers mean nothing."
    if report["model"]["random_weights"]:
        yield "The weights are random: answers mean nothing."
    for row in rows:
        name = key_name(row.cell["key"])
        if row.summary.failed_requests:
            yield f"{name}: {row.summary.failed_requests} requests failed."
        if failed := row.figure("quality", "failed"):
            yield f"{name}: {failed} answers have no loss, since they failed."
        if bug := row.figure("roofline", "bug"):
            yield f"{name}: {bug}."


def _repeats(report: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    most = max((row.summary.repeats for row in rows), default=0)
    if most > 1:
        yield (
            f"Median (lowest to highest) of {most} interleaved repeats. Speed-ups are taken within a repeat; in the "
            "noise means that the repeats lie on both sides of 1."
        )
        if most < _ENOUGH:
            yield f"{most} repeats are few: now and then equals lie on one side of 1 by chance. --repeats 5 is safer."
    elif most == 1:
        yield "One repeat: there is no spread, so a difference may be noise. Use --repeats 3 or more."
    missing = {"agreement": "quality", "where a decode step went": "breakdown"}
    if unmeasured := [what for what, part in missing.items() if not any(row.cell[part] for row in rows)]:
        yield f"Not measured: {', '.join(unmeasured)}."
    seconds, done = sum(row.cell["warmup_seconds"] for row in rows), report["workload"]["warmup"]
    yield f"Warm-up took {seconds:.1f} s and is not counted." if done else "There was no warm-up."


def _definitions(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "All requests arrive at the start: TTFT has the wait for a place in the batch. TPOT excludes the first token. "
        "Percentiles are over requests."
    )
    yield "Mean layers and tokens per exit leave out each answer's first token, which the prompt gives at full depth."
    if any(row.summary.exit_efficiency for row in rows):
        yield (
            "Exit efficiency: speed-up of decoding over what the skipped layers' share of full's time would give, "
            "nothing subtracted for checks and completion."
        )
    if ties := {row.figure("quality", "tie") for row in rows} - {None}:
        gap = ", ".join(f"{tie:g}" for tie in ties)
        yield (
            f"Loss, a mean over answers: share of its tokens whose probability at full depth is more than {gap} below "
            "the highest; strict: that are not the most likely. That of full is rounding, the floor. Identical: "
            "answers with the same tokens as those of full."
        )


def _roofline(found: Mapping[str, Any] | None) -> Iterator[str]:
    for name, words, scale, unit in (
        ("read", "Read bandwidth", 1e9, "GB/s"),
        ("matrix", "Matrix rate", 1e12, "TFLOP/s"),
    ):
        if found and name in found:
            yield f"{words}: at best {found[name]['best'] / scale:.3g} {unit} (by {found[name]['by']})."
