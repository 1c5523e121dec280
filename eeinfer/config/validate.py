"""Validation of one value against its declaration, and the words for what would have been allowed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from eeinfer.config.constraints import Ge, Gt, Le, MinLen, Predicate
from eeinfer.config.schema import declared
from eeinfer.errors import ConfigError

_NOUNS = {int: ("an integer", "integers"), float: ("a number", "numbers"), str: ("text", "texts")}


def validated(key: str, value: object, origin: str) -> Any:
    """`value` as the setting `key` holds it (lists become tuples, integers floats where a float is declared).

    Raises:
        ConfigError: the type or range is wrong; names the origin, the key, what is allowed and the value.
    """
    try:
        return _accept(key, value)
    except ValueError:
        raise _refusal(key, value, origin) from None


def validated_text(key: str, text: str, origin: str) -> Any:
    """As `validated`, for text from the environment or the command line: the first reading that `key` accepts.

    Raises:
        ConfigError: no reading of the text is of the declared type and range.
    """
    for reading in _readings(text):
        try:
            return _accept(key, reading)
        except ValueError:
            continue
    raise _refusal(key, text, origin)


def _accept(key: str, value: object) -> Any:
    return _fitted(declared()[key].annotation, value)


def _fitted(annotation: Any, value: object) -> Any:
    """`value` as a declared type holds it, strict about "3" and true; ValueError when it does not fit."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:
        return _first_fit(args, value)
    if origin is Annotated:
        found = _fitted(args[0], value)
        if all(constraint.holds(found) for constraint in args[1:]):
            return found
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_fitted(args[0], one) for one in value)
    elif origin is Literal:
        if type(value) is str and value in args:
            return value
    elif annotation is float and type(value) is int:
        return _as_float(value)
    elif type(value) is annotation:
        return _encodable(value) if type(value) is str else value
    raise ValueError


def _first_fit(annotations: Iterable[Any], value: object) -> Any:
    for annotation in annotations:
        try:
            return _fitted(annotation, value)
        except ValueError:
            continue
    raise ValueError


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError from None


def _encodable(text: str) -> str:
    """Text without halves of characters, as the environment gives them for bytes that are not UTF-8."""
    text.encode()
    return text


def _readings(text: str) -> Iterator[object]:
    """TOML first (a lone value may also mean a list of one), then a comma list, then the plain string."""
    value = _toml_value(text)
    yield value
    if not isinstance(value, list):
        yield [value]
    yield [_toml_value(part.strip()) for part in text.split(",")]
    yield text


def _toml_value(text: str) -> object:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text  # more than one key: the text had lines of its own


def _refusal(key: str, value: object, origin: str) -> ConfigError:
    return ConfigError(f"{origin}: {key} must be {allowed(declared()[key].annotation)}; got {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = f"[{', '.join(map(_shown, value))}]" if isinstance(value, list | tuple) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004 - about a line


def allowed(annotation: Any, *, plural: bool = False) -> str:
    """A declared type in words: `"auto" or a list of integers >= 1 (not empty, strictly increasing)`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:
        return " or ".join(allowed(a) for a in args)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(f'"{a}"' for a in args)
    if origin is tuple:
        return f"a list of {allowed(args[0], plural=True)}"
    if origin is Annotated:
        bounds, rules = _rules(args[1:])
        words = allowed(args[0], plural=plural) + " and".join(bounds) + (f" ({', '.join(rules)})" if rules else "")
        return words.replace(") (", ", ")
    return "true or false" if annotation is bool else _NOUNS[annotation][plural]


def _rules(constraints: tuple[object, ...]) -> tuple[list[str], list[str]]:
    """The constraints in words: bounds of a number, and the others."""
    bounds, rules = [], []
    for constraint in constraints:
        match constraint:
            case Ge(low):
                bounds.append(f" >= {low}")
            case Gt(low):
                bounds.append(f" > {low}")
            case Le(high):
                bounds.append(f" <= {high}")
            case MinLen():
                rules.append("not empty")
            case Predicate(func):
                rules.append(func.__name__.replace("_", " "))
    return bounds, rules
