"""What `--help` shows as examples, by command; what every command has in common; and the whole command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from eeinfer.cli.verbosity import options

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("eeinfer pull", "eeinfer generate --prompts prompts.jsonl --output answers.jsonl", "eeinfer doctor"),
    "pull": ("eeinfer pull", "eeinfer pull HuggingFaceTB/SmolLM2-360M-Instruct"),
    "convert": (
        "eeinfer convert model.Q4_K_M.gguf my-model",
        "eeinfer convert ./folder-with-pytorch-model-bin ./my-model",
    ),
    "generate": (
        "eeinfer generate --prompts prompts.jsonl --output answers.jsonl",
        "eeinfer generate --num-prompts 5 --show-exits",
        "eeinfer generate --model org/name --exits 8,16 --threshold 0.9 --prompts - < prompts.jsonl",
    ),
    "tune-heads": (
        "eeinfer tune-heads --prompts prompts.jsonl --exits 18,21,24,27 --output heads",
        "eeinfer tune-heads --prompts prompts.jsonl --exits auto --method distill --output heads",
    ),
    "calibrate-thresholds": (
        "eeinfer calibrate-thresholds --prompts prompts.jsonl --tolerance 0.02 --output calibration.toml",
        "eeinfer calibrate-thresholds --budget 25",
    ),
    "bench": (
        "eeinfer bench --batch 1,8,32 --strategy full,all-exit,split",
        "eeinfer bench --curve --plot curve.svg",
        "eeinfer bench --random-weights llama-3.1-8b --simulate-exits 0.3@15,0.5@22",
    ),
    "bench compare": ("eeinfer bench compare before.json after.json",),
    "inspect": ("eeinfer inspect", "eeinfer inspect ./my-model --heads ./heads --json"),
    "doctor": ("eeinfer doctor", "eeinfer doctor --device cuda --json"),
    "config": ("eeinfer config show --origin",),
    "config show": ("eeinfer config show --origin", "eeinfer config show --profile fast --json"),
    "config path": ("eeinfer config path", "$EDITOR $(eeinfer config path --user)"),
    "config init": ("eeinfer config init", "eeinfer config init --user"),
    "config get": ("eeinfer config get exits.threshold", "eeinfer config get model.name --origin"),
    "config set": (
        "eeinfer config set exits.threshold 0.9",
        "eeinfer config set exits.layers=18,24 exits.threshold=0.8,0.9 --profile fast",
    ),
    "config unset": ("eeinfer config unset exits.threshold",),
    "config schema": ("eeinfer config schema > eeinfer.schema.json",),
}


def command_line(app: typer.Typer) -> Any:
    """The commands of `app`, each with its examples and with the options that all have."""
    root = typer.main.get_command(app)
    shared = options()
    for name, command in commands(root):
        command.params += shared
        shown = [f"`{example}`" for example in EXAMPLES.get(name, ())]
        command.epilog = "\n\n".join([*(["Examples:", *shown] if shown else []), *filter(None, [command.epilog])])
    return root


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """A command and all below it, each with its name as typed after `eeinfer`."""
    yield name, command
    for own, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {own}".lstrip())
