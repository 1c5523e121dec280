"""One run of `generate`: check that it may start, answer, put the answers in their place, say how it went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, BinaryIO

from rich.console import Console

from eeinfer.cli.answers import AnswerWriter
from eeinfer.cli.interrupt import Interrupts
from eeinfer.cli.meter import Meter
from eeinfer.cli.options import Resolver, note
from eeinfer.cli.output import settings_path, told
from eeinfer.cli.show import DepthPainter, shows_colours
from eeinfer.cli.summary import RunFigures
from eeinfer.cli.verbosity import is_quiet
from eeinfer.core.request import Request, RequestOutput
from eeinfer.engine.journal import Journal
from eeinfer.engine.prompt_file import LineError, error_line
from eeinfer.errors import EeinferError

if TYPE_CHECKING:
    from eeinfer.engine.build import Located
    from eeinfer.engine.engine import Stats
    from eeinfer.engine.llm import LLM


class Run:
    """A run over all lines of a prompt file.

    Args:
        entries: the lines.
        resolve: gives the settings.
        out: the journal of the output file, a stream that takes the lines, or None for no lines.
        token_details: whether answers have an entry a token.
        show_exits: print marked text.
    """

    def __init__(
        self,
        entries: Sequence[Request | LineError],
        resolve: Resolver,
        out: Journal | BinaryIO | None,
        *,
        token_details: bool,
        show_exits: bool,
    ) -> None:
        self._entries = entries
        self._resolve = resolve
        self._journal = out if isinstance(out, Journal) else None
        self._stream = None if isinstance(out, Journal) else out
        self._token_details = token_details
        self._console = Console() if show_exits else None
        self._kept = 0
        self._left: dict[str, int] = {}  # place of each request to be answered, by id
        self._located: Located | None = None
        self._llm: LLM | None = None
        self._load_seconds: float | None = None
        self._writer: AnswerWriter | None = None

    @property
    def _num_layers(self) -> int:
        return self._located.config.num_layers if self._located else 0

    @property
    def _open(self) -> list[Request]:
        """The requests to be answered."""
        return [entry for entry in self._entries if isinstance(entry, Request) and entry.id in self._left]

    @property
    def failures(self) -> dict[int, str]:
        """What failed, by place."""
        return self._writer.failures if self._writer else {}

    def prepare(self, *, resume: bool) -> None:
        """Find the model, see whether the journal belongs to this run, and what is left to do. Reads no weights.

        Raises:
            EeinferError: the settings, the model or the journal cannot be used.
        """
        requests = [entry for entry in self._entries if isinstance(entry, Request)]
        journal = self._journal
        if requests:
            from eeinfer.engine.build import locate  # here, so that bad lines alone are told without loading torch
            from eeinfer.engine.run_header import run_header

            self._located = locate(self._resolve().settings.model, note)
            loaded = self._resolve(self._located.packaged_settings)
            if journal is not None:
                self._kept = journal.count
                journal.begin(run_header(self._entries, loaded, self._located, token_details=self._token_details))
        elif journal is not None and journal.count:
            raise EeinferError(f"--resume: {journal.path} holds answers, but these prompts are bad lines only")
        if resume and journal is not None:
            found = f"{self._kept} answers are in {journal.path}" if self._kept else f"no answers in {journal.path} yet"
            note(f"{found}; {len(requests) - self._kept} to be made")
        places = {entry.id: place for place, entry in enumerate(self._entries) if isinstance(entry, Request)}
        self._left = {name: place for name, place in places.items() if journal is None or place not in journal}

    def answer(self) -> None:
        """Make the answers that are not there yet.

        Raises:
            EeinferError: the model cannot be used, or the answers cannot be written.
            KeyboardInterrupt: the user ended it; what was finished is kept.
        """
        if self._left:
            from eeinfer.engine.llm import LLM

            started = perf_counter()
            self._llm = LLM.from_loaded(self._resolve, note=note, located=self._located)
            self._load_seconds = perf_counter() - started
        meter = Meter(sum(request.sampling.n for request in self._open))
        self._writer = writer = self._new_writer(meter)
        for place, entry in enumerate(self._entries):
            if isinstance(entry, LineError):
                writer.put_bad_line(place, entry)
            elif self._journal is not None and place in self._journal:
                writer.keep(place, self._journal.answer(place), entry.line)
        if self._llm is not None:
            try:
                self._generate(self._llm, writer, meter)
            finally:
                writer.close()

    def publish(self) -> None:
        """Put all answers in order into the output file, with the settings of the run beside it.

        Raises:
            EeinferError: it cannot be written; the answers stay in the journal.
        """
        if self._journal is None:
            return
        bad = {i: error_line(entry) for i, entry in enumerate(self._entries) if isinstance(entry, LineError)}
        self._journal.publish(len(self._entries), bad)
        if self._resolve.latest:
            settings = settings_path(self._journal.target)
            with told(f"the answers are in {self._journal.target}, but {settings}"):
                settings.write_text(self._resolve.latest.to_toml(), encoding="utf-8")

    def report(self, file: Path | None) -> None:
        """Print the figures of what was done, and write them to `file`, if anything was.

        Raises:
            EeinferError: the file cannot be written.
        """
        if self._writer is None:
            return
        figures = RunFigures(
            total=len(self._entries),
            failed=len(self.failures),
            kept=self._kept,
            answered=self._writer.answered,
            finish_reasons=self._writer.finish_reasons,
            load_seconds=self._load_seconds,
            stats=self._llm.stats if self._llm else None,
            num_layers=self._num_layers,
            depths=self._writer.depths,
        )
        if not is_quiet():
            figures.print(Console(stderr=True))
        if file is not None:
            with told(f"--stats {file}"):
                file.write_text(json.dumps(figures.to_json(), indent=2) + "\n", encoding="utf-8")

    def _new_writer(self, meter: Meter) -> AnswerWriter:
        console, exits = self._console, self._llm.exits if self._llm else ()
        painter = DepthPainter(exits, self._num_layers, console is not None and shows_colours(console))
        return AnswerWriter(self._journal, self._stream, console, painter, meter, bool(exits), self._token_details)

    def _generate(self, llm: LLM, writer: AnswerWriter, meter: Meter) -> None:
        interrupts = Interrupts(llm.drain, note)

        def put(output: RequestOutput) -> None:
            place = self._left[output.id]
            entry = self._entries[place]
            writer.put(place, output, entry.line, entry.call)

        def step(stats: Stats) -> None:
            meter.step(stats)
            interrupts.step()

        requests = self._open
        try:
            with meter.running(), interrupts.watched():
                outputs = llm.generate(requests, on_output=put, on_step=step)
        except KeyboardInterrupt:
            outputs = []
        if len(outputs) < len(requests):
            if self._journal is not None and self._journal.count:
                note(f"stopped early; {self._journal.count} answers are in {self._journal.path}; go on with --resume")
            raise KeyboardInterrupt
