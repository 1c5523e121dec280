"""`eeinfer inspect`: what a model is, and what it takes to serve it here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eeinfer.cli.options import Resolver, note, pulled_models, takes_settings

if TYPE_CHECKING:
    from collections.abc import Iterator


@takes_settings(
    "model.heads",
    "model.dtype",
    "model.device",
    "exits.layers",
    "exits.threshold",
    "exits.measure",
    "cache.num_blocks",
    "cache.block_size",
)
def inspect(
    resolve: Resolver,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A name in the local store, a Hub id or a folder.",
            show_default="model.name of the settings",
            autocompletion=pulled_models,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Say what a model is and what it takes to serve it here: sizes, exits, KV cache, calibration.

    Reads configs and headers alone; weights are sampled for the fingerprint and not loaded.
    """
    flags = resolve.flags if model is None else {**resolve.flags, "model.name": model}
    resolve = replace(resolve, flags=flags)
    resolve()  # bad settings are told before torch is loaded
    from eeinfer.engine.inspection import inspection

    found = inspection(resolve, note)
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False, default=str))
        return
    from rich.table import Table

    from eeinfer.cli.meter import table_console

    table = Table.grid(padding=(0, 2))
    for label, text in _lines(found):
        table.add_row(label, text)
    table_console().print(table, highlight=False, markup=False)


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The label and the text of each line."""
    model, counts, memory = found["model"], found["parameters"], found["memory"]
    yield "model", model["name"]
    yield "folder", model["folder"]
    if model["source"]:
        yield "source", model["source"]
    yield "fingerprint", model["fingerprint"]
    yield "architecture", f"{model['architecture']} ({model['family']})"
    yield "layers", str(model["num_layers"])
    yield "hidden size", f"{model['hidden_size']}, MLP {model['intermediate_size']}, vocabulary {model['vocab_size']}"
    yield "attention", f"{model['num_heads']} heads of {model['head_dim']}, {model['num_kv_heads']} KV heads"
    yield "context", f"{model['max_position']} tokens"
    tied = ", the head is the embedding" if model["tied"] else f", head {_count(counts['lm_head'])}"
    parts = f"layers {_count(counts['layers'])}, embedding {_count(counts['embedding'])}{tied}"
    yield "parameters", f"{_count(counts['total'])}: {parts}"
    yield "files", f"{_size(counts['file_bytes'])} in {', '.join(counts['file_dtypes'])}"
    yield from _exit_lines(found["exits"])
    yield "weights", f"{_size(memory['weight_bytes'])} in {memory['dtype']} on {memory['device']}"
    yield "KV cache", f"{memory['kv_bytes_per_token']} bytes a token"
    contexts = f"{memory['tokens']} tokens ({memory['full_contexts']} full contexts)"
    yield "fits here", f"{contexts} beside the weights, with {_size(memory['free_bytes'])} free"
    yield "calibration", _calibration_text(found["calibration"])


def _gate(width: int, tokens: int | None) -> str:
    return f"gate of {width}" + ("" if tokens is None else f" with {tokens} tokens")


def _exit_lines(exits: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "exit heads", exits["heads"] or "none: exits use the model's own head"
    if not exits["exits"]:
        yield "exits", "none, pass for example --exits 8,16 --threshold 0.9"
    for one in exits["exits"]:
        words = [
            f"after {one['layers_executed']} layers: {one['kind']}",
            *([f"rank {one['rank']}"] if one["rank"] else []),
            *([_gate(**one["gate"])] if one["gate"] else []),
            *([] if one["tied"] else ["own vocabulary matrix"]),
            f"{_count(one['parameters'])} parameters",
            "not in use" if one["threshold"] is None else f"leaves at {exits['measure']} >= {one['threshold']}",
        ]
        yield "exit", ", ".join(words)


def _calibration_text(calibration: dict[str, Any] | None) -> str:
    if calibration is None:
        return "none: thresholds carry no guarantee"
    where = f" ({calibration['file']})"
    if not calibration["certified"] or calibration["reason"]:
        return f"does not hold: {calibration['reason']}{where}"
    if calibration["tolerance"] is None:
        return f"of a budget, without a guarantee{where}"
    return f"loss <= {calibration['tolerance']:g} with confidence {calibration['confidence']:g}{where}"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
