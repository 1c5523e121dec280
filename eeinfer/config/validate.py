"""Validation of one value against its declaration, and the words for what would have been allowed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen, Predicate

from eeinfer.config.schema import Settings, declared
from eeinfer.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

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
    section, _, name = key.partition(".")
    try:
        document = json.dumps({section: {name: value}})
    except (TypeError, RecursionError):  # a TOML date, or an absurd nesting
        raise ValueError from None
    # JSON and not Python mode: strict about "3" and true, while lists may become tuples and tables dataclasses.
    settings = _adapter().validate_json(document, strict=True)
    return getattr(getattr(settings, section), name)


@cache
def _adapter() -> TypeAdapter[Settings]:
    from pydantic import TypeAdapter

    return TypeAdapter(Settings)


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
