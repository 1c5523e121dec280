"""`eeinfer doctor`: whether this machine can serve, and with what."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eeinfer.cli.options import Resolver, takes_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

UNWELL = 1


@takes_settings("model.device")
def doctor(
    resolve: Resolver,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Look at the machine: versions, device, memory, what computes and why, compilers, model store; and test it.

    The test takes some seconds and needs no model: a tiny random one answers in batches, with early exit and
    preemption, and its tokens and depths must be those of a reference in float64. Native kernels, where they are used,
    must be as near to float32 as torch is in bfloat16. Ends with 1 when something is wrong.
    """
    found = []
    for finding in _findings(resolve):
        found.append(finding)
        if not as_json:
            typer.echo(f"{'FAIL' if finding['problem'] else 'ok  '}  {finding['name'] + ':':<18} {finding['text']}")
            if finding["problem"]:
                typer.echo(f"      {finding['problem']}")
    healthy = not any(finding["problem"] for finding in found)
    if as_json:
        typer.echo(json.dumps({"ok": healthy, "findings": found}, indent=2, ensure_ascii=False))
    if not healthy:
        raise typer.Exit(UNWELL)


def _findings(resolve: Resolver) -> Iterator[dict[str, Any]]:
    """The findings of the engine, if it can be loaded at all."""
    try:
        from eeinfer.engine.doctor import findings
    except (ImportError, OSError) as error:  # a broken installation of torch
        fix = f"cannot be loaded ({error}): install eeinfer and torch again, in a new environment"
        yield {"name": "installation", "text": "not complete", "problem": fix, "facts": {}}
        return
    yield from map(asdict, findings(resolve))
