"""Decode steps with fixed shapes and addresses, so that a device can record and replay them (CUDA graphs).

There is one graph for each stage, number of rows and width of block tables; both are rounded up to a few sizes, and
what is left of a size is padding rows (see `DecodeBuffers`). A graph gathers its rows from the slots of the row pool,
runs the layers, scatters them back, checks the exit and leaves a verdict. The host waits in one place: where it reads
that verdict, or tokens that the graph could not pick.

Graphs of the narrowest tables are captured before the first request; those of wider ones, for all numbers of rows at
once, when a context first needs them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from eeinfer.core.plan import Complete, Draw, Outcome, Pass, Row, Verdict
from eeinfer.core.readiness import Readiness
from eeinfer.errors import EeinferError
from eeinfer.exits.check import Exit
from eeinfer.exits.completion import complete
from eeinfer.exits.measures import LOGIT_MEASURES
from eeinfer.model.decoder import Decoder
from eeinfer.runner.capture import Capture, Step
from eeinfer.runner.decode_buffers import DecodeBuffers
from eeinfer.runner.row_pool import CacheShape
from eeinfer.runner.sampler import sample, token_logprobs
from eeinfer.runner.verdicts import Picked, exit_verdicts

Kind = Literal["stage", "head", "complete"]
_NARROWEST = 1024  # tokens


def row_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are captured for: 1, 2, 4, then in steps of 8, 16 and 32, and `most` itself."""
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max(most, 128), 32))
    return (*takewhile(lambda rows: rows < most, steps), most)


def table_widths(widest: int, block_size: int) -> tuple[int, ...]:
    """Widths of block tables that graphs are captured for: 1,024 tokens, then 4 times as many each, and `widest`.

    Attention is launched for the whole width, though it stops at each row's context: too wide a table costs launches
    of nothing, too many widths cost graphs.
    """
    narrowest = -(-_NARROWEST // block_size)
    return (*takewhile(lambda width: width < widest, (narrowest * 4**i for i in range(16))), widest)


class Key(NamedTuple):
    """What a graph does: run a stage, run the head of an exit on rows that leave there, or complete them.

    `place` is the index of the stage, of the exit, or of the stage after which completion starts.
    """

    kind: Kind
    place: int
    rows: int
    width: int


class DecodeGraphs:
    """Carries out the plans of decoding by replaying captured steps.

    Args:
        decoder: the model. What it and the exits do on a decode batch must not depend on values, but on shapes alone.
        exits: where tokens may leave, shallowest first.
        stages: the layers between exits.
        completion: a name of `eeinfer.config.schema.Completion`.
        shape: of the cache.
        cache: with its null block and its trash block.
        capture: records steps.
        readiness: decides who is ready in place of the measure.
    """

    def __init__(
        self,
        decoder: Decoder,
        exits: Sequence[Exit],
        stages: Sequence[range],
        completion: str,
        shape: CacheShape,
        *,
        cache: Tensor,
        capture: Capture,
        readiness: Readiness | None,
    ) -> None:
        self._decoder, self._exits, self._stages, self._completion = decoder, exits, stages, completion
        self._cache, self._capture, self._readiness = cache, capture, readiness
        config = decoder.config
        self._buffers = DecodeBuffers(
            shape,
            max_position=config.max_position,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=decoder.dtype,
            device=decoder.device,
            capture=capture,
        )
        self._sizes = row_sizes(shape.max_num_seqs)
        self._widths = table_widths(self._buffers.width, shape.block_size)
        self._graphs: dict[Key, Step] = {}

    @torch.inference_mode()
    def prepare(self) -> int:
        """Capture the graphs of the narrowest tables. Returns how many there are."""
        self._capture_all(1)
        return len(self._graphs)

    def run(self, plan: Pass) -> Outcome:
        """Run a stage on its rows and pick the tokens of those that leave."""
        key = self._key("stage", plan.stage, len(plan.rows), max(len(row.block_table) for row in plan.rows))
        replay = self._graph(key)
        if plan.stage == 0:
            fresh = self._buffers.begin(plan.rows, key.rows)
            if len(fresh) and self._decoder.reads_whole_tables:  # see ModelRunner
                self._cache.index_fill_(2, fresh, 0)
        else:
            self._buffers.point(plan.rows, key.rows)
        replay()
        if plan.stage == len(self._stages) - 1:
            return self._full_depth(plan.rows, key.rows)
        exit_ = self._exits[plan.stage]
        told = self._told(key.rows, tokens=exit_.measure in LOGIT_MEASURES)
        pick = partial(self._leaving, plan, key.rows, told)
        return exit_verdicts(plan, exit_, told[: len(plan.rows)], self._readiness, pick)

    def complete(self, plan: Complete) -> None:
        """Fill the KV of the stages that rows skipped."""
        for stage in sorted(set(plan.stages)):
            rows = [row for row, ran in zip(plan.rows, plan.stages, strict=True) if ran == stage]
            key = self._key("complete", stage, len(rows), max(len(row.block_table) for row in rows))
            replay = self._graph(key)
            self._buffers.point(rows, key.rows)
            replay()

    # Verdicts, on the host

    def _told(self, size: int, *, tokens: bool) -> list[float]:
        """The scores of the rows of the last step, padding rows included, and after them their tokens."""
        return self._capture.download(self._buffers.verdict[: 2 * size if tokens else size])

    def _full_depth(self, rows: Sequence[Row], size: int) -> Outcome:
        told = self._told(size, tokens=True)
        tokens, logprobs = self._tokens([row.draw for row in rows], range(len(rows)), size, told)
        return tuple(
            Verdict(token if told[i] else None, failed=not told[i], logprobs=logprobs.get(i))
            for i, token in enumerate(tokens)
        )

    def _leaving(self, plan: Pass, size: int, told: list[float], leaving: list[int]) -> Picked:
        """Tokens of the rows at the places `leaving`, which leave at the end of the stage that ran last."""
        rows = [plan.rows[i] for i in leaving]
        places: Sequence[int] = leaving
        if self._exits[plan.stage].measure not in LOGIT_MEASURES:
            key = self._key("head", plan.stage, len(rows), 1)
            replay = self._graph(key)
            self._buffers.point(rows, key.rows)
            replay()
            size, told, places = key.rows, self._told(key.rows, tokens=True), range(len(rows))
        tokens, logprobs = self._tokens([row.draw for row in rows], places, size, told)
        return tokens, {leaving[i]: one for i, one in logprobs.items()}

    def _tokens(self, draws: Sequence[Draw], places: Sequence[int], size: int, told: list[float]) -> Picked:
        """A token for each draw: of rows that ask for nothing the one told, of others what the sampler picks.

        Args:
            draws: of n rows.
            places: of these rows in the last step, whose logits are there still.
            size: of that step.
            told: what it told.
        """
        tokens = [int(told[size + place]) for place in places]
        asking = [i for i, draw in enumerate(draws) if _asks(draw)]
        if not asking:
            return tokens, {}
        buffers, own = self._buffers, [draws[i] for i in asking]
        where = buffers.upload([places[i] for i in asking])
        logits = buffers.logits.index_select(0, where)
        argmax = buffers.verdict[size : 2 * size].index_select(0, where).to(torch.int64)
        picked = sample(logits, own, argmax)
        logprobs = token_logprobs(logits, own, picked)
        buffers.verdict[: len(own)].copy_(picked)
        for i, token in zip(asking, self._told(len(own), tokens=False), strict=True):
            tokens[i] = int(token)
        return tokens, {asking[i]: one for i, one in logprobs.items()}

    # Graphs

    def _key(self, kind: Kind, place: int, rows: int, width: int) -> Key:
        """The graph that does this for at least so many rows and blocks."""
        if kind == "head" or (kind == "complete" and self._completion != "oracle"):
            width = self._widths[-1]  # reads no context
        return Key(kind, place, _at_least(rows, self._sizes), _at_least(width, self._widths))

    def _graph(self, key: Key) -> Step:
        """What replays this graph. It may be captured here, so inputs are filled afterwards."""
        if key not in self._graphs:
            self._capture_all(key.width)
        return self._graphs[key]

    def _capture_all(self, width: int) -> None:
        """Capture what is missing for tables of this width, largest first: all at once, and not one by one later on."""
        for rows in reversed(self._sizes):
            kinds: list[tuple[Kind, int]] = [("stage", stage) for stage in range(len(self._stages))]
            for place, exit_ in enumerate(self._exits):
                kinds += [("complete", place)]
                kinds += [("head", place)] * (exit_.measure not in LOGIT_MEASURES)
            for kind, place in kinds:
                key = self._key(kind, place, rows, width)
                if key not in self._graphs:
                    self._graphs[key] = self._captured(key)

    def _captured(self, key: Key) -> Step:
        self._buffers.blank(key.rows)
        try:
            return self._capture.capture(partial(self._step, key))
        except torch.OutOfMemoryError as error:
            raise EeinferError(
                f"no memory is left to capture a CUDA graph for {key.rows} rows ({error}); lower "
                f"cache.memory_fraction or batching.max_num_seqs, or pass --enforce-eager"
            ) from None

    def _step(self, key: Key) -> None:
        """What is captured: nothing in it may wait for the device, or depend on values that lie there."""
        match key.kind:
            case "stage":
                self._stage(key)
            case "head":
                logits = self._exits[key.place].head.logits(self._buffers.load(key.rows))
                self._tell_largest(logits)
            case "complete":
                hidden, batch = self._buffers.load(key.rows), self._buffers.batch(key.rows, key.width)
                first = self._stages[key.place].stop
                learned = self._exits[key.place].head.learned_kv
                complete(self._completion, self._decoder, first, hidden, batch, self._cache, learned)

    def _stage(self, key: Key) -> None:
        decoder, buffers = self._decoder, self._buffers
        hidden = buffers.load(key.rows) if key.place else decoder.embed(buffers.tokens(key.rows))
        batch = buffers.batch(key.rows, key.width)
        hidden, before = decoder.run(self._stages[key.place], hidden, batch, self._cache)
        if key.place == len(self._stages) - 1:
            self._tell_largest(decoder.logits(hidden))
            return
        buffers.store(hidden)
        checked = self._exits[key.place].check(hidden, before)
        buffers.tell(checked.confidence, checked.logits, checked.argmax)

    def _tell_largest(self, logits: Tensor) -> None:
        """Tokens, and as score whether the logits are finite: the largest is, unless one is NaN or all are -inf."""
        largest, argmax = self._decoder.largest(logits)
        self._buffers.tell(largest.isfinite(), logits, argmax)


def _asks(draw: Draw) -> bool:
    """Whether a row asks for more than the argmax."""
    return draw.temperature > 0 or draw.shaping is not None or bool(draw.banned) or draw.logprobs is not None


def _at_least(count: int, sizes: Sequence[int]) -> int:
    return sizes[bisect_left(sizes, count)]
