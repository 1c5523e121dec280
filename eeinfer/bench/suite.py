"""Runs a benchmark: cells of a group are interleaved A B C A B C in one process, on the same requests and cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from eeinfer.bench.breakdown import TimedDecoder, TimedRunner, breakdown, timer_for
from eeinfer.bench.cells import Cell, Resolve, plan_groups
from eeinfer.bench.measure import measure
from eeinfer.bench.options import Options
from eeinfer.bench.probes import Probes, probe
from eeinfer.bench.quality import answer_ids, quality, rouge_note
from eeinfer.bench.readiness import RecordedTrace, SimulatedExits, read_trace
from eeinfer.bench.record import Run
from eeinfer.bench.roofline import Measured, WorkCounter, best_rates, cell_entry, rates_entry
from eeinfer.bench.subject import Subject
from eeinfer.bench.sweep import Group
from eeinfer.bench.workload import check_context, check_fits, drawn, limited, read_requests, synthetic, traced
from eeinfer.calibration.loss import TIE, token_losses
from eeinfer.config.schema import Settings
from eeinfer.core.readiness import Readiness
from eeinfer.core.request import Request, RequestOutput
from eeinfer.engine.build import Located, Note, build_engine, build_runner
from eeinfer.engine.encode import encode
from eeinfer.errors import EeinferError
from eeinfer.model.decoder import Decoder
from eeinfer.runner.memory import num_blocks

WARMUP_TOKENS = 4
BREAKDOWN_TOKENS = 16


class Suite:
    """Everything that one benchmark measures.

    Args:
        options: what.
        located: the model; its weights are not needed yet, and what is wrong with the options shows here.
        resolve: the settings with those of a cell, by dotted key, on top.
        note: called with one-line notices for the user.

    Attributes:
        groups: each group with its cells, `full` first.
        interrupted: the user stopped it, or it failed on the way; rounds that were complete by then are kept.
        failure: what it failed with.
        requests: of each group.
        roofline: what the probes of the machine found.

    Raises:
        ConfigError: options that do not fit each other or the model.
        EeinferError: files that cannot be read.
    """

    def __init__(self, options: Options, located: Located, resolve: Resolve, note: Note) -> None:
        self.options = options
        self.interrupted = False
        self.failure: EeinferError | None = None
        self.roofline: dict[str, Any] | None = None
        self.requests: dict[Group, list[Request]] = {}
        self._note = _once_each(note)
        self._depths = None if options.trace is None else read_trace(options.trace)
        self._prompts = _read_prompts(options)
        self.groups = plan_groups(options, self._depths, located, resolve, self._note)

    def run(self, subject: Subject, progress: Callable[[str], None]) -> None:
        """Measure all groups.

        Args:
            subject: the model.
            progress: called with what is about to run.

        Raises:
            EeinferError: nothing could be measured.
        """
        for group, cells in self.groups.items():  # all of them, before the first takes its time
            self.requests[group] = self._requests(subject, group)
            self._check(subject, group, cells[0].settings)
        decoder = subject.model.decoder
        probes = None
        if self.options.roofline:  # first, as it may find too little memory
            progress("measuring what the machine could give")
            probes = probe(decoder.config, decoder.dtype, decoder.device)
        try:
            for group, cells in self.groups.items():
                self._run_group(subject, group, cells, progress)
        except KeyboardInterrupt:
            self.interrupted = True
        except EeinferError as error:
            if not any(cell.runs for cells in self.groups.values() for cell in cells):
                raise
            self.interrupted, self.failure = True, error
        if probes is not None:
            self._add_roofline(decoder, probes)

    def _run_group(self, subject: Subject, group: Group, cells: list[Cell], progress: Callable[[str], None]) -> None:
        requests = self.requests[group]
        readiness = self._readiness(requests)
        cache: Tensor | None = None
        for cell in cells:
            cell.runner = build_runner(cell.settings, subject.model, cell.planned, cache=cache, readiness=readiness)
            cache = cell.runner.cache
        self._warm_up(subject, group, cells, progress)
        for repeat in range(self.options.repeats):
            progress(f"{_name(group)}: round {repeat + 1} of {self.options.repeats}")
            first = repeat % len(cells)  # each round begins with another, so that no cell always follows the same one
            runs = [(cell, self._measure(subject, cell, requests)) for cell in (*cells[first:], *cells[:first])]
            for cell, run in runs:
                cell.runs.append(run)
        for cell in cells:
            progress(f"{_name(group)}: where the time of {cell.name} goes")
            cell.breakdown = self._breakdown(subject, cell, requests, readiness)
        if self.options.quality and readiness is None and not subject.is_random:
            progress(f"{_name(group)}: judging the answers")
            if (missing := rouge_note(requests)) is not None:
                self._note(missing)
            _judge(subject, cells, requests)
        for cell in cells:
            cell.runner = None  # with the last one goes the cache

    def _requests(self, subject: Subject, group: Group) -> list[Request]:
        options = self.options
        if group.input_len is not None:
            vocab_size = subject.located.config.vocab_size
            found = synthetic(group, options.num_prompts, vocab_size, options.seed)
        else:
            encoded = partial(encode, tokenizer=subject.model.tokenizer, vocab_size=subject.located.config.vocab_size)
            if self._depths is not None:
                found = traced(self._prompts, self._depths, options.num_prompts, encoded)
            else:
                found = drawn(self._prompts, group, options.num_prompts, encoded)
        if len(found) < group.batch:
            self._note(f"--batch {group.batch} is never full: there are {len(found)} requests")
        return found if self._depths else limited(found, group.output_len, ignore_eos=options.ignore_eos)

    def _check(self, subject: Subject, group: Group, settings: Settings) -> None:
        """Requests that could not be served, or not at full batch, are told before the first one runs."""
        config, decoder, requests = subject.located.config, subject.model.decoder, self.requests[group]
        check_context(requests, config.max_position)
        blocks = num_blocks(settings.cache, config, decoder.dtype, decoder.device, group.batch)
        check_fits(requests, group.batch, blocks, settings.cache.block_size)

    def _readiness(self, requests: Sequence[Request]) -> Readiness | None:
        if self._depths is not None:
            return RecordedTrace(self._depths, {r.id: len(r.prompt_token_ids or ()) for r in requests})
        simulated = self.options.simulated
        return None if simulated is None else SimulatedExits(simulated, self.options.seed)

    def _warm_up(self, subject: Subject, group: Group, cells: list[Cell], progress: Callable[[str], None]) -> None:
        short = _shortened(self.requests[group], WARMUP_TOKENS)
        for done in range(self.options.warmup):
            for cell in cells:
                progress(f"{_name(group)}: warm-up {done + 1} of {self.options.warmup}, {cell.name}")
                run = self._measure(subject, cell, short)
                cell.warmup_seconds += run.steps[-1].ended - run.started

    def _add_roofline(self, decoder: Decoder, probes: Probes) -> None:
        measured = [(cell, _measured(cell, group, decoder)) for group, cells in self.groups.items() for cell in cells]
        rates = best_rates(probes, [one for _, one in measured])
        self.roofline = rates_entry(probes, rates)
        for cell, one in measured:
            cell.roofline = cell_entry(rates, one)

    @staticmethod
    def _measure(subject: Subject, cell: Cell, requests: list[Request]) -> Run:
        assert cell.runner is not None, "runners are built before they run"
        return measure(build_engine(cell.settings, subject.model, cell.runner), requests)

    @staticmethod
    def _breakdown(
        subject: Subject, cell: Cell, requests: list[Request], readiness: Readiness | None
    ) -> dict[str, float] | None:
        assert cell.runner is not None, "runners are built before they run"
        timer = timer_for(subject.model.decoder.device)
        timed = replace(subject.model, decoder=TimedDecoder(subject.model.decoder, timer))
        cache = cell.runner.cache
        eager = replace(cell.settings, model=replace(cell.settings.model, enforce_eager=True))  # a graph has no parts
        runner = build_runner(eager, timed, cell.planned, cache=cache, readiness=readiness, runner_class=TimedRunner)
        return breakdown(build_engine(cell.settings, timed, runner), timer, _shortened(requests, BREAKDOWN_TOKENS))


def _measured(cell: Cell, group: Group, decoder: Decoder) -> Measured:
    ends = (0, *cell.key.exits, decoder.num_layers)
    layers = [end - start for start, end in pairwise(ends)]
    counter = WorkCounter(decoder.config, decoder.dtype, layers, cell.settings.exits.measure)
    return Measured(f"{cell.key.strategy}, {_name(group)}", counter, cell.runs)


def _read_prompts(options: Options) -> list[Request]:
    if None not in options.sweep.input_lens:
        return []
    return read_requests(options.prompts, options.seed)


def _shortened(requests: Sequence[Request], max_tokens: int) -> list[Request]:
    def short(request: Request) -> Request:
        most = min(request.sampling.max_tokens or max_tokens, max_tokens)
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    return [short(request) for request in requests]


def _judge(subject: Subject, cells: list[Cell], requests: list[Request]) -> None:
    """Quality of each cell, from its last run; an answer that several cells gave is judged once."""
    known: dict[tuple[str, tuple[int, ...]], Any] = {}
    eos = subject.model.tokenizer.eos_token_ids

    def losses(outputs: Sequence[RequestOutput]) -> list[Any]:
        keys = [(output.id, answer_ids(output)) for output in outputs]
        prompts = {request.id: request.prompt_token_ids or () for request in requests}
        new = [key for key in keys if key not in known]
        judged = token_losses(subject.model.decoder, [(prompts[name], ids) for name, ids in new], eos)
        known.update(zip(new, judged, strict=True))
        return [known[key] for key in keys]

    for cell in cells:
        if cell.runs:
            outputs, full = cell.runs[-1].outputs, cells[0].runs[-1].outputs
            cell.quality = quality(requests, outputs, full, losses(outputs), TIE)


def _name(group: Group) -> str:
    prompts = "" if group.input_len is None else f", prompts of {group.input_len}"
    return f"batch {group.batch}{prompts}, {group.output_len} new tokens"


def _once_each(note: Note) -> Note:
    """Says nothing twice: the cells of a sweep share most of what there is to say."""
    said: set[str] = set()

    def once(message: str) -> None:
        if message not in said:
            said.add(message)
            note(message)

    return once
