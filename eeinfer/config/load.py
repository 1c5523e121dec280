"""Settings from their layers, each with its origin. Tables merge, lists replace.

From low to high: built-in defaults, packaged with the exit heads, the calibration beside them, the user's file, the
project's, files that were named (later ones win), the profile, environment, `--set`, explicit arguments.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eeinfer.config.profiles import Files, profile_entries
from eeinfer.config.schema import Settings, declared
from eeinfer.config.sources import Contents, Source, read_assignments, read_environ, read_file
from eeinfer.config.validate import validated, validated_text
from eeinfer.errors import ConfigError

DEFAULT = "built-in default"
ARGUMENT = "argument"
CALIBRATION_NAME = "calibration.toml"  # beside the exit heads
FOLDERS = ("model.name", "model.heads")  # settings that may be folders


class Given(NamedTuple):
    """A validated value and where it came from."""

    value: Any
    origin: str


Layer = dict[str, Given]  # by dotted key


class Calibration(NamedTuple):
    """The highest calibration file among the layers.

    `settings` are its own values by dotted key, whatever layers above say. `table` is `[calibration]`, as it stands.
    """

    origin: str
    settings: Mapping[str, Any]
    table: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, by dotted key, the origin of each value; and the calibration file among the layers, if any."""

    settings: Settings
    origins: Mapping[str, str]
    calibration: Calibration | None = None

    def values(self) -> dict[str, Any]:
        """Every value by dotted key, in the order of the schema."""
        parts = ((key, key.partition(".")) for key in self.origins)
        return {key: getattr(getattr(self.settings, section), name) for key, (section, _, name) in parts}

    def to_toml(self, *, origins: bool = False) -> str:
        """A complete TOML file that loads to the same settings; with `origins`, each origin as a comment."""
        lines: list[str] = []
        section = ""
        for key, value in self.values().items():
            if key.partition(".")[0] != section:
                section = key.partition(".")[0]
                lines += ["", f"[{section}]"]
            line = f"{key.partition('.')[2]} = {toml_value(value)}"
            lines.append(f"{line:<40} # {self.origins[key]}" if origins else line)
        return "\n".join(lines[1:]) + "\n"


def load_settings(
    *,
    places: Sequence[Source] = (),
    files: Sequence[Path] = (),
    profile: str | None = None,
    environ: Mapping[str, str] = os.environ,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Any] = {},
    packaged: Path | None = None,
) -> Loaded:
    """Merges the layers and validates them.

    Args:
        places: the files of the user and the project, from `eeinfer.config.files`.
        files: further TOML files, later ones win.
        profile: the name of a profile in `places` and `files`; it wins over their other settings.
        environ: variables named `EEINFER_SECTION__KEY`; a value is read as TOML, then as a comma list, then as text.
        assignments: `section.key=value`, values read as those of the environment.
        flags: dotted key to value, only what was explicitly given; a string is read as those of the environment.
        packaged: the `eeinfer.toml` that ships with the exit heads, or their `calibration.toml`. A `calibration.toml`
            beside it is the next layer.

    Raises:
        ConfigError: an unknown name, a wrong type or range, a file that cannot be read; names the origin and the fix.
    """
    shipped, calibration = _merged(_read(_shipped(packaged)))
    read = _read([*places, *(Source(path, str(path)) for path in files)])
    given, own_calibration = _merged(read)
    given.update(_profile_layer(profile, read))
    given.update(_text_layer(read_environ(environ)))
    given.update(_text_layer(read_assignments(assignments)))
    given.update(_argument_layer(flags))
    defaults = {key: Given(d.default, DEFAULT) for key, d in declared().items()}
    _check_lengths(defaults | shipped)
    layer = defaults | _still_valid(shipped, given, packaged) | given
    _check_lengths(layer)
    origins = {key: layer[key].origin for key in defaults}
    return Loaded(_settings(layer), origins, own_calibration or calibration)


def check_file(source: Source, contents: Contents) -> None:
    """Validate what a file holds, by itself.

    Raises:
        ConfigError: a wrong type or range, or thresholds that do not match the exits.
    """
    layer, _ = _merged([(source, contents)])
    _check_lengths({key: Given(d.default, DEFAULT) for key, d in declared().items()} | layer)


def _shipped(packaged: Path | None) -> Iterator[Source]:
    """The files that come with the exit heads."""
    if packaged is None:
        return
    calibration = packaged.with_name(CALIBRATION_NAME)
    if packaged != calibration:
        yield Source(packaged, f"{packaged} (packaged with the exit heads)")
    if calibration.is_file():
        yield Source(calibration, f"{calibration} (calibration of the exit heads)")


def _read(sources: Iterable[Source]) -> Files:
    return [(source, read_file(source)) for source in sources]


def _merged(files: Files) -> tuple[Layer, Calibration | None]:
    """The values of files, later ones win, and the last calibration among them. All of a file is validated."""
    layer: Layer = {}
    calibration = None
    for source, contents in files:
        own = {key: _given(source, key, value, source.origin) for key, value in contents.entries}
        layer.update(own)
        if contents.calibration is not None:
            values = {key: given.value for key, given in own.items()}
            calibration = Calibration(source.origin, values, contents.calibration)
        for name, profile in contents.profiles.items():
            for key, value in profile.entries:
                _given(source, key, value, f"{source.path}, profile {name}")
    return layer, calibration


def _given(source: Source, key: str, value: object, origin: str) -> Given:
    """A validated value of a file. A folder that begins with `./` or `../` is meant from where the file is."""
    checked = validated(key, value, origin)
    if key in FOLDERS and checked.startswith(("./", "../")):
        checked = os.path.normpath(source.path.absolute().parent / checked)
    return Given(checked, origin)


def _profile_layer(name: str | None, files: Files) -> Layer:
    if name is None:
        return {}
    return {key: _given(source, key, value, origin) for source, key, value, origin in profile_entries(name, files)}


def _text_layer(entries: Iterator[tuple[str, str, str]]) -> Iterator[tuple[str, Given]]:
    return ((key, Given(validated_text(key, text, origin), origin)) for key, text, origin in entries)


def _argument_layer(flags: Mapping[str, Any]) -> Iterator[tuple[str, Given]]:
    for key, value in flags.items():
        assert key in declared(), f"{key} is not a setting"
        if isinstance(value, str):
            yield key, Given(validated_text(key, value, ARGUMENT), ARGUMENT)
        else:
            yield key, Given(validated(key, value, ARGUMENT), ARGUMENT)


def _still_valid(shipped: Layer, given: Layer, packaged: Path | None) -> Layer:
    """The packaged layer, without its threshold when another measure, decay, other heads or other exits are asked for.

    A threshold means nothing without the measure, the decay and the heads it was chosen for. Of exits that are among
    the packaged ones, the thresholds stay.
    """
    if "exits.threshold" not in shipped or "exits.threshold" in given:
        return shipped
    for key in ("exits.measure", "exits.decay", "model.heads"):
        own = shipped.get(key, Given(declared()[key].default, DEFAULT)).value
        if key not in given or given[key].value == own:
            continue
        if key == "model.heads" and packaged and Path(given[key].value).resolve() == packaged.parent.resolve():
            continue  # the file ships with the very heads that were asked for
        return shipped | {"exits.threshold": _dropped(given[key].origin, key)}
    if "exits.layers" not in given:
        return shipped
    kept = _thresholds_of(shipped, given["exits.layers"].value)
    return shipped | {"exits.threshold": kept or _dropped(given["exits.layers"].origin, "exits.layers")}


def _thresholds_of(shipped: Layer, layers: Any) -> Given | None:
    """The packaged thresholds of these exits; None unless all are among the packaged ones."""
    threshold, known = shipped["exits.threshold"], shipped.get("exits.layers")
    if known is None or layers == known.value:
        return threshold if known else None
    if not isinstance(threshold.value, tuple) or not isinstance(layers, tuple) or not set(layers) <= set(known.value):
        return None
    of = dict(zip(known.value, threshold.value, strict=True))
    return Given(tuple(of[n] for n in layers), f"{threshold.origin}, of the exits asked for")


def _dropped(origin: str, key: str) -> Given:
    why = f"{DEFAULT}, not the packaged threshold, as {origin} sets {key}"
    return Given(declared()["exits.threshold"].default, why)


def _check_lengths(layer: Layer) -> None:
    layers, threshold = layer["exits.layers"], layer["exits.threshold"]
    if isinstance(layers.value, tuple) and isinstance(threshold.value, tuple):
        exits, thresholds = len(layers.value), len(threshold.value)
        if exits != thresholds:
            raise ConfigError(
                f"exits.threshold has {thresholds} values ({threshold.origin}) but exits.layers has {exits} "
                f"({layers.origin}); give one threshold for all exits or one per exit"
            )


def _settings(layer: Layer) -> Settings:
    sections: dict[str, dict[str, Any]] = {}
    for key, given in layer.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = given.value
    classes = {section: type(getattr(Settings(), section)) for section in sections}
    return Settings(**{section: classes[section](**values) for section, values in sections.items()})


def toml_value(value: Any) -> str:
    """A setting as TOML writes it, on one line."""
    import tomli_w

    if isinstance(value, tuple):  # on one line, where tomli_w would take one a value
        return f"[{', '.join(map(toml_value, value))}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
