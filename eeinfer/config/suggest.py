"""The nearest known name, for messages about a name that is not known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of a message: the nearest known name or, when none is near, all of them.

    Names of several parts (`exits.threshold`, `EEINFER_EXITS__THRESHOLD`) are compared by their last part, so that a
    right key in a wrong section is found.
    """
    known = list(known)
    by_leaf = {_leaf(k): k for k in known}
    nearest = get_close_matches(_leaf(name), by_leaf, n=1)
    return f"; did you mean {by_leaf[nearest[0]]!r}?" if nearest else f"; known: {', '.join(known)}"


def _leaf(name: str) -> str:
    return re.split(r"\.|__|^EEINFER_", name)[-1].lower()
