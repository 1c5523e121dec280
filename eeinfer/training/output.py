"""The folder that tuned heads are written to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

import tomli_w

from eeinfer.config.load import CALIBRATION_NAME
from eeinfer.engine.build import PACKAGED_SETTINGS
from eeinfer.errors import EeinferError
from eeinfer.training.selective import PRECISION


def prepare(output: Path) -> None:
    """Make the folder and see that it takes files, before the long work.

    Raises:
        EeinferError: it cannot be written to, or holds a calibration, which would count for the new heads.
    """
    if (output / CALIBRATION_NAME).exists():
        raise EeinferError(
            f"--output {output}: {CALIBRATION_NAME} there belongs to other heads; move it away, or name another folder"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=output).close()
    except OSError as error:
        raise EeinferError(f"--output {output}: cannot write there ({error.strerror}); name another folder") from None


def write_settings(
    output: Path, layers: Sequence[int], measure: str, thresholds: Sequence[float], completion: str | None = None
) -> None:
    """The `eeinfer.toml` beside the heads: their exits, measure and thresholds, and completion if it is not usual."""
    exits = {"layers": list(layers), "measure": measure, "threshold": list(thresholds)}
    table = {"exits": exits if completion is None else exits | {"completion": completion}}
    comment = (
        f"# Thresholds at which, on held-out prompts, {PRECISION:.0%} of the tokens that leave agree with the full\n"
        f"# model's. They carry no statistical guarantee.\n"
    )
    (output / PACKAGED_SETTINGS).write_text(comment + tomli_w.dumps(table), encoding="utf-8")
