"""JSON objects whose keys occur once: the standard library keeps the last of several without a word."""

from __future__ import annotations

from typing import Any


class RepeatedKeyError(ValueError):
    """An object has a key twice; `key` is its name."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} occurs twice")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`; for `json.loads(…, object_pairs_hook=unique_keys)`.

    Raises:
        RepeatedKeyError: a key occurs twice.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKeyError(key)
        found[key] = value
    return found
