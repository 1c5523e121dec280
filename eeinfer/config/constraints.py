"""What a setting's type leaves open: ranges and rules, declared in `Annotated` types and checked by `validate`."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ge:
    """A number from `ge` on."""

    ge: float

    def holds(self, value: float) -> bool:
        """Whether `value` is allowed."""
        return value >= self.ge


@dataclass(frozen=True, slots=True)
class Gt:
    """A number above `gt`."""

    gt: float

    def holds(self, value: float) -> bool:
        """Whether `value` is allowed."""
        return value > self.gt


@dataclass(frozen=True, slots=True)
class Le:
    """A number up to `le`."""

    le: float

    def holds(self, value: float) -> bool:
        """Whether `value` is allowed."""
        return value <= self.le


@dataclass(frozen=True, slots=True)
class MinLen:
    """A text or a list of at least `min_length`."""

    min_length: int

    def holds(self, value: Sized) -> bool:
        """Whether `value` is allowed."""
        return len(value) >= self.min_length


@dataclass(frozen=True, slots=True)
class Predicate:
    """A rule that has no other form. The name of the function says it, underscores read as spaces."""

    func: Callable[[Any], bool]

    def holds(self, value: Any) -> bool:
        """Whether `value` is allowed."""
        return self.func(value)
