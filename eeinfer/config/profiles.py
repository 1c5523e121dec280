"""Profiles: named sets of settings in files, `[profile.NAME.SECTION]`, one of which is chosen for a run."""

from __future__ import annotations

from collections.abc import Sequence

from eeinfer.config.sources import Contents, Source
from eeinfer.config.suggest import did_you_mean
from eeinfer.errors import ConfigError

Files = Sequence[tuple[Source, Contents]]  # from low to high


def profile_entries(name: str, files: Files) -> list[tuple[Source, str, object, str]]:
    """(file, dotted key, value, origin) of a profile's settings, lowest first: those it inherits, then its own.

    A profile of the same name in several files is one; what later files say wins.

    Raises:
        ConfigError: no file has the profile or one that it inherits, or it inherits itself.
    """
    found: list[tuple[Source, str, object, str]] = []
    for one in reversed(_lineage(name, files)):
        for source, contents in files:
            if one in contents.profiles:
                origin = f"profile {one} in {source.path}"
                found += [(source, key, value, origin) for key, value in contents.profiles[one].entries]
    return found


def _lineage(name: str, files: Files) -> list[str]:
    """The profile and those beneath it, each the one that the one before inherits."""
    known = dict.fromkeys(one for _, contents in files for one in contents.profiles)
    chain: list[str] = []
    wanted: str | None = name
    by = "--profile"
    while wanted is not None:
        if wanted not in known:
            hint = did_you_mean(wanted, known) if known else "; no file of settings that was read has profiles"
            raise ConfigError(f"{by}: unknown profile {wanted!r}{hint}")
        if wanted in chain:
            raise ConfigError(f"{by}: the profiles {' > '.join([*chain, wanted])} inherit each other; cut the circle")
        chain.append(wanted)
        source, inherits = _inherits(wanted, files)
        by, wanted = f"{source}: profile.{wanted}.inherits", inherits
    return chain


def _inherits(name: str, files: Files) -> tuple[str, str | None]:
    """The file that says last what a profile inherits, and what it says."""
    said = [(str(source.path), own.inherits) for source, contents in files if (own := contents.profiles.get(name))]
    return next((pair for pair in reversed(said) if pair[1] is not None), said[-1])
