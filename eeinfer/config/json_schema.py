"""A JSON schema (draft 7) of the files of settings, by which editors complete and check them."""

from __future__ import annotations

from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from eeinfer.config.constraints import Ge, Gt, Le, MinLen
from eeinfer.config.schema import declared
from eeinfer.config.sources import CALIBRATION, INHERITS, PROFILE

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
_BOUNDS = {Ge: ("minimum", "ge"), Gt: ("exclusiveMinimum", "gt"), Le: ("maximum", "le"), MinLen: ("min", "min_length")}


def json_schema() -> dict[str, Any]:
    """The schema. Rules that JSON schema has no words for, such as increasing lists, are left to the loader."""
    sections = _sections()
    profile = {INHERITS: {"type": "string", "description": "The profile beneath this one."}} | sections
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Settings of eeinfer",
        **_table(
            sections
            | {
                PROFILE: {
                    "description": "Named sets of settings; --profile NAME chooses one.",
                    "type": "object",
                    "additionalProperties": _table(profile),
                },
                CALIBRATION: {"description": "What calibrate-thresholds certified.", "type": "object"},
            }
        ),
    }


def _sections() -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {}
    for key, (annotation, default, help_text) in declared().items():
        section, _, name = key.partition(".")
        about: dict[str, Any] = {"description": help_text}
        if not isinstance(default, float) or isfinite(default):  # JSON knows no infinity
            about["default"] = list(default) if isinstance(default, tuple) else default
        tables.setdefault(section, {})[name] = schema_of(annotation) | about
    return {section: _table(properties) for section, properties in tables.items()}


def _table(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schema_of(annotation: Any) -> dict[str, Any]:
    """The schema of one declared type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:
        return {"anyOf": [schema_of(one) for one in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": schema_of(args[0])}
    if origin is Annotated:
        schema = schema_of(args[0])
        return schema | dict(_rule(schema["type"], rule) for rule in args[1:] if type(rule) in _BOUNDS)
    return {"type": _TYPES[annotation]}


def _rule(kind: str, rule: Any) -> tuple[str, Any]:
    keyword, attribute = _BOUNDS[type(rule)]
    if keyword == "min":
        keyword = "minItems" if kind == "array" else "minLength"
    return keyword, getattr(rule, attribute)
