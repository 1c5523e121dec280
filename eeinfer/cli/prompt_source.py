"""Where `--prompts` reads from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from eeinfer.errors import EeinferError


def prompt_source(given: str) -> Path | BinaryIO:
    """The prompt file that `given` names; - is standard input.

    Raises:
        EeinferError: standard input is closed.
    """
    if given != "-":
        return Path(given)
    if sys.stdin is None:
        raise EeinferError("--prompts -: standard input is closed; name a file")
    return sys.stdin.buffer
