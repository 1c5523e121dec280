"""From options to what is measured: groups of cells, each group interleaved, `full` first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from eeinfer.config.schema import Strategy
from eeinfer.config.suggest import did_you_mean
from eeinfer.config.validate import validated_text
from eeinfer.errors import ConfigError

STRATEGIES = ("full", "all-exit", "split")


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that are interleaved, as they do the same work.

    Attributes:
        batch: most sequences in flight.
        input_len: tokens of each synthetic prompt; None: prompts of a file.
        output_len: most new tokens of a request.
    """

    batch: int
    input_len: int | None
    output_len: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """The axes of a benchmark; every combination is measured.

    Attributes:
        batches, output_lens: at least one each.
        input_lens: tokens of synthetic prompts; (None,): the prompts of a file.
        strategies: compared with `full`, which is always there and first.
        exits: layers executed at each exit, one set an entry; (None,): those of the heads.
        thresholds: one for all exits or one an exit, per entry; (None,): the packaged ones.
    """

    batches: tuple[int, ...]
    input_lens: tuple[int | None, ...]
    output_lens: tuple[int, ...]
    strategies: tuple[str, ...]
    exits: tuple[tuple[int, ...] | None, ...] = (None,)
    thresholds: tuple[float | tuple[float, ...] | None, ...] = (None,)

    def groups(self) -> Iterator[Group]:
        """All groups; batch sizes change slowest."""
        for batch, input_len, output_len in product(self.batches, self.input_lens, self.output_lens):
            yield Group(batch, input_len, output_len)

    def cells(self, group: Group) -> Iterator[dict[str, Any]]:
        """The settings of each cell of a group, by dotted key; `full` first."""
        shared = {"batching.max_num_seqs": group.batch}
        yield shared | {"batching.strategy": "full"}
        others = [name for name in self.strategies if name != "full"]
        for strategy, exits, threshold in product(others, self.exits, self.thresholds):
            chosen = {"exits.layers": exits, "exits.threshold": threshold}
            given = {key: value for key, value in chosen.items() if value is not None}
            yield shared | {"batching.strategy": strategy} | given


def counts(texts: Sequence[str], option: str) -> tuple[int, ...]:
    """Positive integers from comma lists, in order and once each.

    Raises:
        ConfigError: names the option and the entry.
    """
    return _once(_count(entry, option) for entry in _entries(texts, option))


def strategies(texts: Sequence[str]) -> tuple[str, ...]:
    """Names of strategies from comma lists.

    Raises:
        ConfigError: an unknown name.
    """
    known = get_args(Strategy)
    names = _once(_entries(texts, "--strategy"))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--strategy: unknown strategy {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    return names


def setting_values(texts: Sequence[str], key: str, option: str) -> tuple[Any, ...]:
    """One validated value of the setting `key` for each time that `option` was given; (None,) when it was not.

    Raises:
        ConfigError: a value that the setting does not take.
    """
    return _once(validated_text(key, text, option) for text in texts) or (None,)


def _entries(texts: Sequence[str], option: str) -> Iterator[str]:
    for text in texts:
        for entry in text.split(","):
            if not entry.strip():
                raise ConfigError(f"{option} {text!r} has an empty entry; write a list such as 1,8,32")
            yield entry.strip()


def _count(entry: str, option: str) -> int:
    if not entry.isascii() or not entry.isdigit() or int(entry) < 1:
        raise ConfigError(f"{option}: {entry!r} must be an integer from 1 on")
    return int(entry)


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
