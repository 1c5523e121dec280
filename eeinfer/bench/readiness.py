"""Readiness that does not come from the model: simulated exits and recorded traces.

Both say which rows are ready at an exit, so that the engine is measured apart from the model. The configured check
still runs; only its verdict is replaced (`eeinfer.core.readiness.Readiness`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from eeinfer.core.plan import Row
from eeinfer.errors import ConfigError, EeinferError

_OPTION = "--simulate-exits"
_ENTRY = re.compile(r"\s*(\d+|\d*\.\d+)\s*@\s*(\d{1,9})\s*", re.ASCII)
_DETAILS = "write the trace with `eeinfer generate --token-details`"


def parse_simulated(text: str) -> dict[int, float]:
    """Rates by layers executed, from text such as `0.3@15,0.5@22`.

    A rate is the share of rows that are ready at this exit or at one before it.

    Raises:
        ConfigError: an entry is malformed, or rates or layers are not in order.
    """
    rates: dict[int, float] = {}
    for entry in text.split(","):
        rate, layers = _parse_entry(entry)
        if rates and layers <= max(rates):
            raise ConfigError(
                f"{_OPTION}: {entry.strip()!r} comes after an exit at {max(rates)} layers; "
                f"name each exit once, the shallowest first"
            )
        if rates and rate < max(rates.values()):
            raise ConfigError(
                f"{_OPTION}: the rate of {entry.strip()!r} is below {max(rates.values())}, that of the exit before it; "
                f"rates are cumulative (the share ready at this exit or before), so they must not fall"
            )
        rates[layers] = rate
    return rates


def _parse_entry(entry: str) -> tuple[float, int]:
    if not (match := _ENTRY.fullmatch(entry)):
        raise ConfigError(f"{_OPTION}: {entry.strip()!r} is not RATE@LAYERS; write for example 0.3@15,0.5@22")
    rate, layers = float(match[1]), int(match[2])
    if rate > 1:
        raise ConfigError(f"{_OPTION}: the rate of {entry.strip()!r} is above 1; it is a share, from 0 to 1")
    if layers < 1:
        raise ConfigError(f"{_OPTION}: {entry.strip()!r} has no layer before the exit; an exit needs at least 1")
    return rate, layers


class SimulatedExits:
    """Rows ready at given rates, by a hash of seed, request and position: the same in any batch, order and strategy.

    Args:
        rates: by layers executed, cumulative, as from `parse_simulated`. An exit that is not named adds nobody.
        seed: of the hash.
    """

    def __init__(self, rates: Mapping[int, float], seed: int) -> None:
        self._rates = dict(rates)
        self._seed = seed

    def ready(self, row: Row, layers_executed: int) -> bool:
        """Whether `row` is ready at the exit after `layers_executed` layers."""
        rate = max((rate for layers, rate in self._rates.items() if layers <= layers_executed), default=0.0)
        return self._uniform(row) < rate

    def _uniform(self, row: Row) -> float:
        """A number in [0, 1) that belongs to the row. 53 bits, so that a float holds it exactly and 1 never comes."""
        text = f"{self._seed}:{row.position}:{row.request_id}"
        return (int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 11) * 2.0**-53


class RecordedTrace:
    """Rows ready where a recorded run let them leave. Tokens past the end of a record stay to full depth.

    Args:
        depths: by request id, the layers executed for each generated token, as from `read_trace`.
        prompt_tokens: by request id, of every request that will run.

    Raises:
        ConfigError: a request is not in the trace.
    """

    def __init__(self, depths: Mapping[str, Sequence[int]], prompt_tokens: Mapping[str, int]) -> None:
        if missing := [request_id for request_id in prompt_tokens if request_id not in depths]:
            raise ConfigError(
                f"--replay-trace: no answer to request {missing[0]!r} ({len(missing)} are missing): "
                f"replay it on the prompts that it was recorded on"
            )
        self._depths = depths
        self._prompt_tokens = prompt_tokens

    def ready(self, row: Row, layers_executed: int) -> bool:
        """Whether `row` is ready at the exit after `layers_executed` layers."""
        depths = self._depths[row.request_id]
        # The prompt's last token gave generated token 0, in the prefill; the first row, one further, gives token 1.
        index = row.position - self._prompt_tokens[row.request_id] + 1
        return index < len(depths) and layers_executed >= depths[index]


def read_trace(path: Path) -> dict[str, tuple[int, ...]]:
    """Layers executed for each generated token, by request id, from the answers of `eeinfer generate --token-details`.

    Lines that report an error are skipped.

    Raises:
        EeinferError: the file cannot be read, a line is no such answer, or there is none.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EeinferError(f"{path}: cannot read the trace: {error.strerror}; {_DETAILS}") from None
    depths: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        answer = _parse_answer(line, f"{path}, line {number}")
        if answer.get("error") is not None:
            continue
        request_id = answer["id"]
        if request_id in depths:
            raise EeinferError(f"{path}, line {number}: a second answer to {request_id!r}; keep the lines of one run")
        depths[request_id] = _depths(answer, f"{path}, line {number}")
    if not depths:
        raise EeinferError(f"{path}: the trace holds no answer; {_DETAILS}")
    return depths


def _parse_answer(line: bytes, where: str) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EeinferError(f"{where}: not JSON that can be read ({error}); {_DETAILS}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("id"), str):
        raise EeinferError(f"{where}: not an answer with an id; {_DETAILS}")
    return answer


def _depths(answer: Mapping[str, Any], where: str) -> tuple[int, ...]:
    tokens = answer.get("tokens")
    if not isinstance(tokens, list):
        raise EeinferError(
            f"{where}: the answer has no tokens; run generate with --token-details, on prompt lines without n that are "
            f"not of an OpenAI batch file"
        )
    depths: list[Any] = [token.get("layers_executed") if isinstance(token, dict) else None for token in tokens]
    if bad := [i for i, depth in enumerate(depths) if type(depth) is not int or depth < 1]:
        raise EeinferError(f"{where}: tokens[{bad[0]}].layers_executed is not a count of layers; {_DETAILS}")
    return tuple(depths)


def check_trace(depths: Mapping[str, Sequence[int]], exits: Collection[int], num_layers: int) -> None:
    """Make sure that tokens can leave where they left in the trace.

    Args:
        depths: as from `read_trace`.
        exits: layers executed at each exit in use.
        num_layers: full depth of the model.

    Raises:
        ConfigError: a recorded depth is neither an exit nor the full depth.
    """
    recorded = {depth for own in depths.values() for depth in own}
    unknown = recorded - {*exits, num_layers}
    if not unknown:
        return
    depth = max(unknown)
    request_id = next(name for name, own in depths.items() if depth in own)
    if depth > num_layers:
        fix = "replay it on the model that it was recorded on"
    else:
        fix = f"pass --exits {','.join(map(str, sorted(recorded - {num_layers})))}"
    raise ConfigError(
        f"--replay-trace: a token of request {request_id!r} has {depth} layers executed, which is no exit "
        f"({', '.join(map(str, sorted(exits))) or 'there is none'}) and not the full depth of {num_layers}: {fix}"
    )
