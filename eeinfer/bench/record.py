"""What a benchmark records: plain data, before any figure is made of it."""

from __future__ import annotations

from dataclasses import dataclass

from eeinfer.core.request import RequestOutput
from eeinfer.core.step import Step


@dataclass(frozen=True, slots=True)
class CellKey:
    """What is compared.

    Attributes:
        strategy: a name of `eeinfer.config.schema.Strategy`.
        batch: most sequences in flight.
        input_len: tokens of each synthetic prompt; None: the prompts of a file, as they are.
        output_len: most new tokens of a request.
        exits: layers executed at each exit; none for `full`.
        threshold: one an exit.
    """

    strategy: str
    batch: int
    input_len: int | None
    output_len: int
    exits: tuple[int, ...]
    threshold: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one cell over all requests.

    Attributes:
        started: clock when all requests had been queued and nothing had run, in seconds.
        steps: what the engine did.
        outputs: the answers, in the order of the requests.
        involuntary_exits, involuntary_stays, preemptions: see `eeinfer.core.scheduler.SchedulerStats`.
        peak_blocks: most KV blocks in use at once.
        peak_memory: bytes, of the process (CPU) or of torch's allocator (CUDA); None where it cannot be told.
    """

    started: float
    steps: tuple[Step, ...]
    outputs: tuple[RequestOutput, ...]
    involuntary_exits: int
    involuntary_stays: int
    preemptions: int
    peak_blocks: int
    peak_memory: int | None
