"""What a calibration is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from eeinfer.errors import ConfigError

TOLERANCE, CONFIDENCE = 0.02, 0.95


@dataclass(frozen=True, slots=True)
class Aim:
    """What is asked for: a certified tolerance, or, with `budget`, a mean depth without a guarantee.

    Raises:
        ConfigError: a value means nothing.
    """

    tolerance: float = TOLERANCE
    confidence: float = CONFIDENCE
    budget: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tolerance <= 1:
            raise ConfigError(
                f"--tolerance {self.tolerance:g}: it is the share of tokens that may differ, so give a number above 0 "
                f"and up to 1, such as {TOLERANCE}; without any loss there is only `--strategy full`"
            )
        if not 0 < self.confidence < 1:
            raise ConfigError(f"--confidence {self.confidence:g}: give a number between 0 and 1, such as {CONFIDENCE}")
        if self.budget is not None and not self.budget > 0:
            raise ConfigError(f"--budget {self.budget:g}: give mean layers per token, a number above 0")

    def delta(self, sets: int) -> float:
        """Level of the tests on each of so many exit sets."""
        return (1 - self.confidence) / sets
