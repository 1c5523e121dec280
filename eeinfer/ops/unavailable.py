"""Why kernels cannot be used."""

from __future__ import annotations


class Unavailable(Exception):  # noqa: N818 - a reason, not an error: callers fall back to torch
    """Why there are no kernels of some kind here. `fixable`: the words name what the user can do."""

    def __init__(self, why: str, *, fixable: bool = False) -> None:
        super().__init__(why)
        self.fixable = fixable
