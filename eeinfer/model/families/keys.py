"""Readers of single keys of a `config.json`. Whatever is unusable is a ValueError or KeyError that names the key."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

Config = dict[str, Any]

# Kinds of RoPE -> the numbers that a config must give. `dynamic` counts on contexts of at most max_position_embeddings.
SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": (),
}


def count(config: Config, key: str, default: int | None = None) -> int:
    """A positive integer."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise KeyError(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; it must be a positive integer")
    return value


def number(values: Config, key: str, default: float | None = None) -> float:
    """A positive, finite number."""
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise KeyError(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{key} is {value!r}; it must be a positive number")
    return float(value)


def optional_number(values: Config, key: str, default: float | None) -> float | None:
    """A positive number, or None where the config says null; `default` where it says nothing."""
    return default if key not in values else None if values[key] is None else number(values, key)


def choice(config: Config, key: str, default: str, known: Sequence[str]) -> str:
    """One of the known names."""
    value = config.get(key, default)
    if value not in known:
        raise ValueError(f"{key} is {value!r}; known for this architecture: {', '.join(map(repr, known))}")
    return str(value)


def refuse(config: Config, key: str, why: str) -> None:
    """A switch that must be off."""
    if config.get(key):
        raise ValueError(f"{key} is {config[key]!r}; {why}")


def windows(config: Config, layer_types: Sequence[str], default: int | None = None) -> tuple[int | None, ...]:
    """`sliding_window` in the layers of type "sliding_attention"; empty where there are none."""
    if (listed := config.get("layer_types")) is not None:
        if not isinstance(listed, list) or len(listed) != len(layer_types):
            raise ValueError(f"layer_types must be a list with an entry for each of {len(layer_types)} layers")
        layer_types = listed
    if unknown := [kind for kind in layer_types if kind not in {"full_attention", "sliding_attention"}]:
        raise ValueError(f"layer_types has {unknown[0]!r}; known are 'full_attention' and 'sliding_attention'")
    if "sliding_attention" not in layer_types:
        return ()
    window = count(config, "sliding_window", default)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def rope(config: Config, max_position: int, theta: float = 10_000.0) -> tuple[float, dict[str, Any]]:
    """Base and scaling. Newer configs keep both in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`.

    Args:
        config: of the model.
        max_position: longest context.
        theta: base where the config gives none.
    """
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise TypeError(f"{key} is {given!r}; it must be an object")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in list(SCALING_KEYS):
        raise ValueError(f"RoPE kind {kind!r} is not supported; known are {', '.join(SCALING_KEYS)}")
    if missing := [name for name in SCALING_KEYS[kind] if given.get(name) is None]:
        raise ValueError(f"RoPE kind {kind!r} needs {', '.join(missing)}")
    scaling: dict[str, Any] = {name: number(given, name) for name in SCALING_KEYS[kind]}
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError("low_freq_factor must be below high_freq_factor")
    if kind == "yarn":
        scaling |= _yarn(given, scaling["factor"], max_position)
    if kind == "longrope":
        scaling |= _longrope(config, given, max_position)
    base = number({"rope_theta": given.get("rope_theta", config.get("rope_theta"))}, "rope_theta", theta)
    return base, scaling | {"rope_type": kind}


def _yarn(given: Config, factor: float, max_position: int) -> dict[str, Any]:
    """The optional keys of YaRN, with the defaults of its paper."""
    scale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    default = _yarn_factor(factor)
    if scale and all_dim:
        default = _yarn_factor(factor, number(given, "mscale")) / _yarn_factor(factor, number(given, "mscale_all_dim"))
    return {
        "original_max_position_embeddings": number(given, "original_max_position_embeddings", max_position),
        "attention_factor": number(given, "attention_factor", default),
        "beta_fast": number(given, "beta_fast", 32),
        "beta_slow": number(given, "beta_slow", 1),
        "truncate": bool(given.get("truncate", True)),
    }


def _yarn_factor(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(config: Config, given: Config, max_position: int) -> dict[str, Any]:
    """What LongRoPE needs in the context of the first training; the long factors are for longer ones."""
    original = longrope_context(config, given, max_position)
    factors = given.get("short_factor")
    if not isinstance(factors, list) or not factors:
        raise ValueError(f"short_factor is {factors!r}; it must be a list of numbers")
    factor = number(given, "factor", max_position / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "short_factor": [number({"short_factor": value}, "short_factor") for value in factors],
        "original_max_position_embeddings": float(original),
        "attention_factor": number(given, "attention_factor", default),
    }


def longrope_context(config: Config, given: Config, max_position: int) -> int:
    """The context of the first training; some configs keep it beside the scaling."""
    key = "original_max_position_embeddings"
    return count({key: config.get(key, given.get(key))}, key, max_position)
