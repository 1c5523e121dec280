"""The offline interface: prompts in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from eeinfer.config.load import Loaded, load_settings
from eeinfer.config.schema import Settings
from eeinfer.core.request import FinishReason, Request, RequestOutput, SamplingParams
from eeinfer.engine.build import Located, build_engine, build_runner, load_model, locate, plan_exits
from eeinfer.engine.certificate import Standing, standing
from eeinfer.engine.engine import Engine, Stats
from eeinfer.engine.parallel_sampling import Gathered, sequences_of
from eeinfer.errors import ConfigError, RequestError

# Names that would be unclear without their section.
_KEYWORDS = {"model": "model.name", "exits": "exits.layers"}


class LLM:
    """A model with its exits, ready to answer batches of prompts.

    Args:
        model: a name in the local store, a Hub id or a local folder.
        note: called with one-line notices for the user; by default they are dropped.
        **settings: any setting by its own name (`strategy="split"`, `threshold=0.9`, `num_blocks=512`; `exits=` for
            `exits.layers`). Environment variables and packaged settings apply beneath them.

    Attributes:
        settings: what is in force.
        located: the model's folder, traits and heads.
        standing: whether the calibration in use holds; None: there is none, or nothing leaves early.
        engine: the engine underneath.

    Raises:
        EeinferError: settings, model or heads cannot be used.
    """

    def __init__(self, model: str | None = None, *, note: Callable[[str], None] | None = None, **settings: Any) -> None:
        named = settings if model is None else settings | {"model": model}
        flags = {_dotted(name): value for name, value in named.items()}
        self._load(lambda packaged: load_settings(flags=flags, packaged=packaged), note or (lambda _: None))

    @classmethod
    def from_loaded(
        cls, resolve: Callable[[Path | None], Loaded], *, note: Callable[[str], None], located: Located | None = None
    ) -> LLM:
        """Build from settings that `resolve` loads.

        Args:
            resolve: loads the settings, given the file that ships with the model's heads; first called with None, to
                learn which model is meant.
            note: called with one-line notices for the user.
            located: the model that the settings name, where it has been found before.
        """
        llm = cls.__new__(cls)
        llm._load(resolve, note, located)  # noqa: SLF001 (its own class)
        return llm

    def _load(
        self,
        resolve: Callable[[Path | None], Loaded],
        note: Callable[[str], None],
        located: Located | None = None,
    ) -> None:
        self.located: Located = located or locate(resolve(None).settings.model, note)
        loaded = resolve(self.located.packaged_settings)
        self.settings: Settings = loaded.settings
        planned = plan_exits(self.settings, self.located, note)
        self.standing: Standing | None = standing(loaded.calibration, self.settings, self.located, planned)
        if self.standing and (notice := self.standing.notice):
            note(notice)
        model = load_model(self.settings.model, self.located, note)
        runner = build_runner(self.settings, model, planned, note=note)
        self.engine: Engine = build_engine(self.settings, model, runner)

    @property
    def stats(self) -> Stats:
        """Counters since the model was loaded."""
        return self.engine.stats

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.located.config.num_layers

    @property
    def exits(self) -> tuple[int, ...]:
        """Layers executed at each exit in use."""
        return tuple(exit_.head.layers_executed for exit_ in self.engine.runner.exits)

    def generate(
        self,
        requests: Sequence[Request | str] | str,
        sampling: SamplingParams | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
        on_step: Callable[[Stats], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer all requests, batched; answers are in the order of the requests.

        A request that cannot be served becomes an answer with `finish_reason` ERROR; the others run. After `drain`,
        which a callback may call, those that had not been started have no answer.

        Args:
            requests: requests, or plain prompts, which take `sampling`; a single prompt is a list of one.
            sampling: for plain prompts.
            on_output: called with each answer when it is complete.
            on_step: called with the counters after each step.
        """
        several = [requests] if isinstance(requests, str) else requests
        named = [_as_request(i, request, sampling) for i, request in enumerate(several)]
        done: dict[str, RequestOutput] = {}
        by_id = {request.id: request for request in named}
        if len(by_id) < len(named):
            raise RequestError("two requests have the same id; ids must be unique")

        def finish(output: RequestOutput) -> None:
            if self.standing:
                output = replace(output, certified=self.standing.of(by_id[output.id]))
            done[output.id] = output
            if on_output:
                on_output(output)

        try:
            self._run(named, finish, on_step)
        except BaseException:
            self.engine.abort()
            raise
        self.engine.scheduler.check()
        return [done[request.id] for request in named if request.id in done]

    def drain(self) -> None:
        """Start no more requests; those that run are answered."""
        self.engine.drain()

    def _run(
        self, requests: list[Request], finish: Callable[[RequestOutput], None], on_step: Callable[[Stats], None] | None
    ) -> None:
        gathered = Gathered()
        for request in requests:
            gathered.expect(request)
            try:
                for sequence in sequences_of(request):
                    self.engine.add(sequence)
            except RequestError as error:
                self.stats.failed += request.sampling.n
                finish(RequestOutput(request.id, "", FinishReason.ERROR, 0, (), str(error)))
        while self.engine.has_work:
            for output in self.engine.step().finished:
                if (whole := gathered.take(output)) is not None:
                    finish(whole)
            if on_step:
                on_step(self.stats)


def _as_request(index: int, request: Request | str, sampling: SamplingParams | None) -> Request:
    if isinstance(request, Request):
        return request
    return Request(id=str(index), prompt=request, sampling=sampling or SamplingParams())


def _dotted(name: str) -> str:
    """The dotted key of a setting given by its own name."""
    if name in _KEYWORDS:
        return _KEYWORDS[name]
    for section in fields(Settings):
        if name in {field.name for field in fields(section.default_factory)}:  # type: ignore[arg-type]
            return f"{section.name}.{name}"
    raise ConfigError(f"LLM has no setting {name!r}; see `eeinfer config show` for all of them")
