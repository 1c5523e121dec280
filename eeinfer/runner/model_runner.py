"""The ModelRunner: carries out plans on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eeinfer.core.plan import Complete, Draw, Outcome, Pass, Plan, Prefill, Row, Span, Verdict
from eeinfer.core.readiness import Readiness
from eeinfer.core.request import TokenLogprob
from eeinfer.exits.check import Checked, Exit
from eeinfer.exits.completion import complete
from eeinfer.model.decoder import Decoder
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.runner.capture import Capture
from eeinfer.runner.graphs import DecodeGraphs
from eeinfer.runner.memory import zeros
from eeinfer.runner.row_pool import CacheShape, RowPool, padded
from eeinfer.runner.sampler import sample, token_logprobs
from eeinfer.runner.span_tokens import SpanTokens
from eeinfer.runner.verdicts import exit_verdicts


class ModelRunner:
    """Owns the KV cache and the rows in flight. Synchronises host and device once a plan, where verdicts are read.

    Args:
        decoder: the model.
        exits: where tokens may leave, shallowest first; empty for full depth.
        completion: a name of `eeinfer.config.schema.Completion`.
        shape: of the cache.
        cache: of another runner of the same model and shape that rests while this one works; None: a new one.
        readiness: decides who is ready in place of the measure.
        capture: captures the steps of decoding; None: they run as they are.

    Attributes:
        shape: of the cache.
        stages: the layers between exits; the last stage ends at the model's own head.
        cache: [layers, 2, num_blocks + 2, block_size, kv_heads, head_dim]; see CacheShape for the last two blocks.
        graphs: carry out the plans of decoding, where steps are captured.
    """

    def __init__(
        self,
        decoder: Decoder,
        exits: Sequence[Exit],
        completion: str,
        shape: CacheShape,
        *,
        cache: Tensor | None = None,
        readiness: Readiness | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.decoder = decoder
        self.exits = tuple(exits)
        self.completion = completion
        self.shape = shape
        ends = [*(e.head.layers_executed for e in exits), decoder.num_layers]
        self.stages = tuple(range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))
        config = decoder.config
        sizes = (config.num_layers, 2, shape.allocated, shape.block_size, config.num_kv_heads, config.head_dim)
        self.cache = zeros(sizes, decoder.dtype, decoder.device) if cache is None else cache
        assert self.cache.shape == sizes, "a shared cache has the shape of this runner's"
        self._readiness = readiness
        self._rows = RowPool(shape, decoder.device)
        self.graphs: DecodeGraphs | None = None
        if capture is not None:
            self.graphs = DecodeGraphs(
                *(decoder, self.exits, self.stages, completion, shape),
                cache=self.cache,
                capture=capture,
                readiness=readiness,
            )

    @torch.inference_mode()
    def run(self, plan: Plan) -> Outcome:
        """Carry out a plan. One Verdict for each span or row; none for Complete."""
        match plan:
            case Prefill():
                return self._prefill(plan)
            case Pass():
                return self._pass(plan) if self.graphs is None else self.graphs.run(plan)
            case Complete():
                (self._complete if self.graphs is None else self.graphs.complete)(plan)
                return ()

    def _clear(self, tables: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """Zero the slots of each block table from position `starts[i]` on: its sequence has written nothing there.

        Blocks from the prefix cache are full and lie before that, so what they hold stays.

        Attention in torch reads whole blocks and gives what is masked a weight of 0; what a former holder left there
        may be NaN or infinite, and 0 times NaN is NaN.
        """
        if not self.decoder.reads_whole_tables:
            return
        size = self.shape.block_size
        slots = [
            table[position // size] * size + position % size
            for table, start in zip(tables, starts, strict=True)
            for position in range(start, len(table) * size)
        ]
        if slots:
            self.cache.flatten(2, 3).index_fill_(2, torch.tensor(slots, device=self.cache.device), 0)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in all layers."""
        if pairs:
            blocks, copies = torch.tensor(pairs, device=self.cache.device).T
            self.cache.index_copy_(2, copies, self.cache.index_select(2, blocks))

    # Decoding

    def _pass(self, plan: Pass) -> Outcome:
        rows = plan.rows
        if plan.stage == 0:
            fresh = [row for row in rows if row.position % self.shape.block_size == 0]
            self._clear([row.block_table for row in fresh], [row.position for row in fresh])
            hidden, batch = self._embed([row.token for row in rows]), self._rows.begin(rows)
        else:
            hidden, batch = self._rows.take(rows)
        hidden, before = self.decoder.run(self.stages[plan.stage], hidden, batch, self.cache)
        if plan.stage == len(self.stages) - 1:
            return self._pick(hidden, [row.draw for row in rows])
        self._rows.keep(rows, hidden, batch)
        return self._leave(plan, hidden, before)

    def _leave(self, plan: Pass, hidden: Tensor, before: Tensor) -> Outcome:
        """Check the exit at the end of a stage and pick the tokens of the rows that leave there."""
        exit_ = self.exits[plan.stage]
        checked = exit_.check(hidden, before)
        return exit_verdicts(
            plan,
            exit_,
            checked.confidence.tolist(),
            self._readiness,
            lambda leaving: self._exit_tokens(exit_, checked, hidden, plan.rows, leaving),
        )

    def _exit_tokens(
        self, exit_: Exit, checked: Checked, hidden: Tensor, rows: Sequence[Row], leaving: list[int]
    ) -> tuple[list[int], dict[int, tuple[TokenLogprob, ...]]]:
        """Tokens of the rows that leave, and by row the log-probabilities that were asked for."""
        index = torch.tensor(leaving, device=hidden.device)
        draws = [rows[i].draw for i in leaving]
        logits = exit_.head.logits(hidden[index]) if checked.logits is None else checked.logits[index]
        argmax = self.decoder.largest(logits)[1] if checked.argmax is None else checked.argmax[index]
        tokens = sample(logits, draws, argmax)
        told = token_logprobs(logits, draws, tokens)
        return tokens.tolist(), {leaving[i]: logprobs for i, logprobs in told.items()}

    def _complete(self, plan: Complete) -> None:
        for stage in sorted(set(plan.stages)):
            rows = [row for row, ran in zip(plan.rows, plan.stages, strict=True) if ran == stage]
            self._fill(stage, *self._rows.take(rows))

    def _fill(self, stage: int, hidden: Tensor, batch: TokenBatch) -> None:
        """Complete tokens that ran the stages up to this one."""
        learned = self.exits[stage].head.learned_kv
        complete(self.completion, self.decoder, self.stages[stage].stop, hidden, batch, self.cache, learned)

    # Prefill, and replay after preemption

    def _prefill(self, plan: Prefill) -> Outcome:
        """Run all tokens through the stages; a replayed token stops, and is completed, at its recorded depth."""
        spans = plan.spans
        self._copy(plan.copies)
        self._clear([s.block_table for s in spans], [s.start + len(s.tokens) for s in spans])
        tables = padded([span.block_table for span in spans], self.shape.null_block).to(self.decoder.device)
        tokens = SpanTokens.of(spans)
        hidden = self._embed([token for span in spans for token in span.tokens])
        for index, stage in enumerate(self.stages):
            if not tokens.depths:
                break
            hidden, _ = self.decoder.run(stage, hidden, tokens.batch(tables, self.shape.block_size), self.cache)
            if stage.stop < self.decoder.num_layers and (stopping := tokens.stopping_at(stage.stop)):
                batch = tokens.take(stopping).batch(tables, self.shape.block_size)
                self._fill(index, hidden[stopping], batch)
                going = tokens.beyond(stage.stop)
                tokens, hidden = tokens.take(going), hidden[going]
        return self._first_tokens(hidden, tokens, spans)

    def _first_tokens(self, hidden: Tensor, tokens: SpanTokens, spans: Sequence[Span]) -> Outcome:
        wanted = [i for i, span in enumerate(spans) if span.draw is not None]
        if not wanted:
            return tuple(Verdict() for _ in spans)
        last = [tokens.last_of(i) for i in wanted]
        draws = [span.draw for span in spans if span.draw is not None]
        picked = dict(zip(wanted, self._pick(hidden[last], draws), strict=True))
        return tuple(picked.get(i, Verdict()) for i in range(len(spans)))

    # Both

    def _embed(self, tokens: list[int]) -> Tensor:
        return self.decoder.embed(torch.tensor(tokens, device=self.decoder.device))

    def _pick(self, hidden: Tensor, draws: Sequence[Draw]) -> Outcome:
        """Tokens of rows at full depth. The largest logit is finite unless one is NaN or infinite, or all are -inf."""
        logits = self.decoder.logits(hidden)
        largest, argmax = self.decoder.largest(logits)
        tokens = sample(logits, draws, argmax)
        failed = ~largest.isfinite()
        told = token_logprobs(logits, draws, tokens)
        packed = torch.stack((tokens, failed.to(tokens.dtype)), dim=1)  # one copy to the host
        return tuple(
            Verdict(None if bad else token, failed=bool(bad), logprobs=told.get(i))
            for i, (token, bad) in enumerate(packed.tolist())
        )
