"""Readiness from elsewhere than confidence, so that the engine can be measured apart from the model."""

from __future__ import annotations

from typing import Protocol

from eeinfer.core.plan import Row


class Readiness(Protocol):
    """Decides in place of a measure. The check at the exit still runs; only its verdict is replaced."""

    def ready(self, row: Row, layers_executed: int) -> bool:
        """Whether `row` is ready at the exit after `layers_executed` layers."""
