"""The version of eeinfer."""

from __future__ import annotations

from importlib import metadata


def own_version() -> str:
    """As installed; from a checkout that is only on the path there is none."""
    try:
        return metadata.version("eeinfer")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
