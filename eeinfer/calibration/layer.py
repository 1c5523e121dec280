"""The calibration file: a TOML layer with the settings of exits and the certificate that belongs to them."""

from __future__ import annotations

from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import tomli_w

from eeinfer.calibration.result import Result
from eeinfer.engine.certificate import Certificate
from eeinfer.errors import EeinferError
from eeinfer.version import own_version


def write_layer(result: Result, path: Path) -> None:
    """Write the thresholds, which are inf when nothing was certified or met the budget, with their certificate.

    The file is a layer of settings: `calibration.toml` beside the exit heads, or one for `-c`.

    Raises:
        EeinferError: the file cannot be written.
    """
    exits = result.judge.settings.exits
    layers, thresholds = _chosen(result)
    document: dict[str, Any] = {
        "exits": {
            "layers": list(layers),
            "measure": exits.measure,
            "threshold": list(thresholds),
            "decay": exits.decay,
            "completion": exits.completion,
        },
        "calibration": {name: value for name, value in asdict(certificate(result)).items() if value is not None},
    }
    text = f"# {headline(result)}\n{tomli_w.dumps(document)}"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EeinferError(f"--output {path}: cannot be written ({error.strerror}); name another file") from None


def headline(result: Result) -> str:
    """The result in one line."""
    aim, chosen = result.aim, result.chosen
    if chosen is None:
        return f"Not certified, all thresholds are inf: {result.reason}."
    loss, layers = chosen.sample.loss, chosen.sample.mean_layers
    figures = (
        f"mean loss {loss:.4f} on {result.n} prompts, {layers:.2f} of {result.judge.located.config.num_layers} layers"
    )
    if not result.certified:
        return f"Not certified: {result.reason}; {figures}."
    return (
        f"Certified: with {aim.confidence:.4g} confidence the mean loss of a prompt is at most {aim.tolerance:g} "
        f"({figures}; p = {chosen.p_value:.2g})."
    )


def certificate(result: Result) -> Certificate:
    """What goes into the table `[calibration]`."""
    policy = result.judge.policy(*_chosen(result))
    chosen, promised = result.chosen, result.aim.budget is None
    return Certificate(
        certified=result.certified,
        reason=result.reason,
        policy=policy.fingerprint,
        model=policy.model,
        heads=policy.heads,
        dtype=policy.dtype,
        strategy=policy.strategy,
        max_tokens=policy.max_tokens,
        n=result.n,
        tie=result.judge.tie,
        data=result.data,
        seed=result.judge.settings.sampling.seed,
        version=own_version(),
        tolerance=result.aim.tolerance if promised else None,
        confidence=result.aim.confidence if promised else None,
        delta=round(result.delta, 12) if promised else None,
        mean_loss=chosen.sample.loss if chosen else None,
        strict_loss=chosen.sample.strict_loss if chosen else None,
        full_loss=result.full.loss,
        p_value=chosen.p_value if chosen else None,
        mean_layers=chosen.sample.mean_layers if chosen else None,
    )


def _chosen(result: Result) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if result.chosen is not None:
        return result.chosen.exits, result.chosen.thresholds
    exits = result.outcomes[0].exits
    return exits, (inf,) * len(exits)
