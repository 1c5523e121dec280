"""The JSON schema accepts what the loader accepts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from fake_llm import runner
from hypothesis import given, settings
from hypothesis import strategies as st

from eeinfer.config.json_schema import json_schema
from eeinfer.config.schema import declared
from eeinfer.config.validate import validated
from eeinfer.errors import ConfigError

SECTIONS = json_schema()["properties"]
TYPES = {"boolean": bool, "integer": int, "number": int | float, "string": str, "array": list, "object": dict}


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """The part of draft 7 that the schema uses, but for `properties`."""
    if "anyOf" in schema:
        return any(accepts(one, value) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    if not isinstance(value, TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    return (
        ("minimum" not in schema or value >= schema["minimum"])
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("maximum" not in schema or value <= schema["maximum"])
        and ("minLength" not in schema or len(value) >= schema["minLength"])
        and ("minItems" not in schema or len(value) >= schema["minItems"])
        and ("items" not in schema or all(accepts(schema["items"], one) for one in value))
    )


SCALARS = (
    st.integers(-2, 2**63)
    | st.floats(-2, 3, allow_nan=False)
    | st.booleans()
    | st.sampled_from(["", "auto", "margin", "split", "copy", "float32", "x"])
)
VALUES = SCALARS | st.lists(st.integers(-1, 9), max_size=4).map(sorted).map(lambda xs: sorted(set(xs)))


@pytest.mark.parametrize("key", declared())
@given(value=VALUES)
@settings(max_examples=40, deadline=None)
def test_the_schema_agrees_with_the_loader(key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    schema = SECTIONS[section]["properties"][name]
    try:
        validated(key, value, "test")
        valid = True
    except ConfigError:
        valid = False
    assert accepts(schema, value) == valid


def test_the_schema_knows_profiles_defaults_and_no_other_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = json.loads(runner(monkeypatch, capsys)("config", "schema").out, parse_constant=pytest.fail)
    assert schema["additionalProperties"] is False
    sections = {key.partition(".")[0] for key in declared()}
    assert set(schema["properties"]) == sections | {"profile", "calibration"}
    assert set(schema["properties"]["profile"]["additionalProperties"]["properties"]) == sections | {"inherits"}
    for key, (_, default, help_text) in declared().items():
        section, _, name = key.partition(".")
        own = schema["properties"][section]["properties"][name]
        assert own["description"] == help_text
        if default != math.inf:
            assert accepts(own, own["default"])
