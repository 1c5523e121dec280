"""How large the KV cache can be on CUDA: measured, by running the largest steps on a small cache first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from eeinfer.config.schema import Settings
from eeinfer.core.plan import Draw, Pass, Prefill, Row, Span
from eeinfer.core.strategy import leave_rule
from eeinfer.errors import ConfigError
from eeinfer.exits.check import Exit
from eeinfer.exits.measures import LOGIT_MEASURES
from eeinfer.model.decoder import Decoder
from eeinfer.model.families import ModelConfig
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.runner.capture import DryCapture
from eeinfer.runner.decode_buffers import DecodeBuffers
from eeinfer.runner.graphs import row_sizes
from eeinfer.runner.memory import free_memory, num_blocks
from eeinfer.runner.model_runner import ModelRunner
from eeinfer.runner.row_pool import CacheShape

_PER_GRAPH = 4 * 2**20  # bytes that the driver keeps for a graph of some hundred kernels


class Meter(Protocol):
    """Watches an allocator."""

    def start(self) -> None:
        """Count from here."""

    def peak(self) -> int:
        """Most bytes that were allocated since `start`, beside what was allocated then."""


class CudaMeter:
    """Torch's allocator for a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        """See Meter."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """See Meter."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


class StepMemory(NamedTuple):
    """Bytes that the largest prefill and the largest decode batch take for a while, beside weights and cache."""

    prefill: int
    decode: int


def cache_shape(settings: Settings, decoder: Decoder, exits: Sequence[Exit], *, captures: bool) -> CacheShape:
    """The shape of the cache of a run.

    Without `cache.num_blocks`, what the steps of the run need is measured on CUDA and kept free. On a CPU the default
    of `cache.memory_fraction` leaves room for it.

    Args:
        settings: of the run.
        decoder: the model, in memory.
        exits: in use.
        captures: decode steps are captured, which takes memory of its own.

    Raises:
        ConfigError: the cache does not fit; the message has the figures.
    """
    config, device = decoder.config, decoder.device
    reserved = 0
    if device.type == "cuda" and settings.cache.num_blocks == "auto":
        memory = measured(settings, decoder, exits, CudaMeter(device))
        torch.cuda.empty_cache()
        reserved = max(memory) + (graph_memory(settings, decoder, exits, memory) if captures else 0)
    max_num_seqs = settings.batching.max_num_seqs
    blocks = num_blocks(settings.cache, config, decoder.dtype, device, max_num_seqs, reserved=reserved)
    return CacheShape.fitted(blocks, settings.cache.block_size, max_num_seqs)


def measured(settings: Settings, decoder: Decoder, exits: Sequence[Exit], meter: Meter) -> StepMemory:
    """Run the largest prefill and the largest decode batch on a cache that just holds them.

    What attention in plain torch gathers of long contexts comes on top: kernels that stop at the end of a context are
    launched once for the longest.

    Raises:
        ConfigError: they do not fit.
    """
    batching, block_size = settings.batching, settings.cache.block_size
    lengths = _lengths(batching.max_num_batched_tokens, batching.max_num_seqs, decoder.config)
    tables, blocks = [], 0
    for length in lengths:
        needed = -(-length // block_size)
        tables.append(tuple(range(blocks, blocks + needed)))
        blocks += needed
    shape = CacheShape(blocks, block_size, batching.max_num_seqs)
    try:
        runner = ModelRunner(decoder, exits, settings.exits.completion, shape)
        meter.start()
        runner.run(_prefill(lengths, tables, decoder.num_layers))
        prefill = meter.peak()
        meter.start()
        for stage in range(len(runner.stages)):
            runner.run(_pass(stage, batching.max_num_seqs))
        if not decoder.reads_whole_tables:
            _run_widest(runner)
        return StepMemory(prefill, meter.peak())
    except torch.OutOfMemoryError:
        free = free_memory(decoder.device) / 2**20
        raise ConfigError(
            f"{free:.0f} MiB are free on {decoder.device} beside the weights, too little for a prefill of "
            f"{sum(lengths)} tokens and {batching.max_num_seqs} rows: lower batching.max_num_batched_tokens or "
            f"batching.max_num_seqs, or end other programs there"
        ) from None


def graph_memory(settings: Settings, decoder: Decoder, exits: Sequence[Exit], memory: StepMemory) -> int:
    """Bytes that CUDA graphs take: their pool, which fits the largest step, static buffers, and the driver's share."""
    config, rows = decoder.config, settings.batching.max_num_seqs
    blocks = rows * -(-config.max_position // settings.cache.block_size)
    buffers = DecodeBuffers(
        CacheShape(blocks, settings.cache.block_size, rows),
        max_position=config.max_position,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=decoder.dtype,
        device=torch.device("meta"),
        capture=DryCapture(),
    )
    headless = sum(exit_.measure not in LOGIT_MEASURES for exit_ in exits)
    count = len(row_sizes(rows)) * (1 + 2 * len(exits) + headless)
    return memory.decode + buffers.nbytes + count * _PER_GRAPH


def _lengths(budget: int, max_num_seqs: int, config: ModelConfig) -> list[int]:
    """A prefill of as many tokens as may be, in the longest spans."""
    left = min(budget, max_num_seqs * config.max_position)
    whole, rest = divmod(left, config.max_position)
    return [config.max_position] * whole + [rest] * (rest > 0)


def _prefill(lengths: Sequence[int], tables: Sequence[tuple[int, ...]], depth: int) -> Prefill:
    return Prefill(
        tuple(
            Span(slot, (0,) * length, 0, table, (depth,) * length, Draw())
            for slot, (length, table) in enumerate(zip(lengths, tables, strict=True))
        )
    )


@torch.inference_mode()
def _run_widest(runner: ModelRunner) -> None:
    """All rows through all layers, with block tables as wide as the longest context."""
    decoder, block_size, rows = runner.decoder, runner.shape.block_size, runner.shape.max_num_seqs
    width = -(-decoder.config.max_position // block_size)
    positions = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
    batch = TokenBatch.decode(positions, positions.new_zeros(rows, width), block_size)
    decoder.run(range(decoder.num_layers), decoder.embed(positions), batch, runner.cache)


def _pass(stage: int, rows: int) -> Pass:
    """All rows, none of which has any context; they may share a block, as what they compute is not looked at."""
    made = tuple(Row("", slot, 0, 0, (0,), Draw(), 1, 2) for slot in range(rows))
    return Pass(stage, made, leave_rule("split", sticky=False), (False,) * rows)
