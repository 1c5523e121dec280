"""Free-running answers under a row policy, judged by the unmodified model, and remembered on disk prompt by prompt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import isnan
from os import SEEK_END
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, BinaryIO

from torch import Tensor

from eeinfer.calibration.loss import token_losses
from eeinfer.calibration.prompts import Prompt
from eeinfer.config.schema import ExitSettings, Settings
from eeinfer.core.request import GREEDY, FinishReason, Request, RequestOutput
from eeinfer.engine.build import Located, Model, PlannedExit, build_engine, build_runner, plan_exits
from eeinfer.engine.certificate import Policy, policy_of
from eeinfer.errors import EeinferError, RequestError
from eeinfer.exits.check import Exit

_GROUP = 32  # answers judged together: what an interruption can cost
PROBE = 0.5  # a threshold that keeps every exit in use

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Judged:
    """One prompt's answer under one policy.

    Attributes:
        prompt: key of the prompt.
        loss, strict_loss: see `eeinfer.calibration.loss.PromptLoss`.
        answer: token ids.
        depths: layers executed for each; the first token comes from the prompt, at full depth.
    """

    prompt: str
    loss: float
    strict_loss: float
    answer: tuple[int, ...]
    depths: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """All prompts under one policy. `seconds`: spent now; what was remembered costs none."""

    judged: tuple[Judged, ...]
    seconds: float

    @cached_property
    def losses(self) -> list[float]:
        """Loss of each prompt."""
        return [one.loss for one in self.judged]

    @cached_property
    def depths(self) -> Counter[int]:
        """Decode tokens by layers executed."""
        return Counter(depth for one in self.judged for depth in one.depths[1:])

    @property
    def loss(self) -> float:
        """Mean over prompts."""
        return fmean(self.losses)

    @property
    def strict_loss(self) -> float:
        """Mean over prompts."""
        return fmean(one.strict_loss for one in self.judged)

    @property
    def mean_layers(self) -> float:
        """Layers executed per decode token."""
        return sum(depth * count for depth, count in self.depths.items()) / max(self.depths.total(), 1)

    @property
    def shares(self) -> dict[int, float]:
        """Share of the decode tokens per depth, shallowest first."""
        return {depth: self.depths[depth] / self.depths.total() for depth in sorted(self.depths)}


@dataclass(slots=True)
class Judge:
    """Answers prompts with one model under many policies.

    Attributes:
        settings: of the run; exits, thresholds and strategy are replaced.
        located, model: what answers.
        work: folder of what is remembered, one file a policy; made when needed.
        tie: see `eeinfer.calibration.loss.token_losses`.
        progress: called with what is being done.
    """

    settings: Settings
    located: Located
    model: Model
    work: Path
    tie: float
    progress: Progress
    _cache: Tensor | None = field(default=None, init=False)

    def settings_of(self, exits: tuple[int, ...], thresholds: tuple[float, ...]) -> Settings:
        """The settings under which these thresholds are judged."""
        settings = self.settings
        return replace(
            settings,
            exits=replace(settings.exits, layers=exits, threshold=thresholds),
            batching=replace(settings.batching, strategy="split"),
            sampling=replace(settings.sampling, temperature=0.0),
        )

    def policy(self, exits: tuple[int, ...], thresholds: tuple[float, ...]) -> Policy:
        """The row policy of these thresholds."""
        settings = self.settings_of(exits, thresholds)
        return policy_of(settings, self.located, self._planned(settings))

    def exits(self, layers: tuple[int, ...]) -> tuple[Exit, ...]:
        """The exits with their heads on the model."""
        settings = self.settings_of(layers, (PROBE,) * len(layers))
        runner = build_runner(settings, self.model, self._planned(settings), cache=self._cache)
        self._cache = runner.cache
        return runner.exits

    def full(self, prompts: Sequence[Prompt]) -> Sample:
        """The unmodified model's own answers."""
        settings = replace(
            self.settings_of((), ()), exits=ExitSettings(), batching=replace(self.settings.batching, strategy="full")
        )
        return self._sample(settings, policy_of(settings, replace(self.located, heads=None), ()), [], prompts)

    def at(self, exits: tuple[int, ...], thresholds: tuple[float, ...], prompts: Sequence[Prompt]) -> Sample:
        """Answers with these exits and thresholds.

        Raises:
            EeinferError: a prompt fails, or its loss is not a number; what came before is remembered.
        """
        settings = self.settings_of(exits, thresholds)
        planned = self._planned(settings)
        return self._sample(settings, policy_of(settings, self.located, planned), planned, prompts)

    def _planned(self, settings: Settings) -> list[PlannedExit]:
        return plan_exits(settings, self.located, lambda _: None)

    def _sample(
        self, settings: Settings, policy: Policy, planned: list[PlannedExit], prompts: Sequence[Prompt]
    ) -> Sample:
        memory = _Memory(self.work / f"{policy.fingerprint.removeprefix('sha256:')[:16]}-tie-{self.tie:g}.jsonl")
        known = memory.read()
        missing = [prompt for prompt in prompts if prompt.key not in known]
        started = perf_counter()
        for judged in self._answers(settings, planned, missing) if missing else ():
            memory.add(judged, policy)
            known[judged.prompt] = judged
        return Sample(tuple(known[prompt.key] for prompt in prompts), perf_counter() - started if missing else 0.0)

    def _answers(self, settings: Settings, planned: list[PlannedExit], prompts: Sequence[Prompt]) -> Iterator[Judged]:
        """Judged answers as they come, in groups."""
        runner = build_runner(settings, self.model, planned, cache=self._cache)
        self._cache = runner.cache
        engine = build_engine(settings, self.model, runner)
        by_key = {prompt.key: prompt for prompt in prompts}
        for prompt in prompts:
            try:
                engine.add(Request(prompt.key, prompt_token_ids=prompt.tokens, sampling=GREEDY))
            except RequestError as error:
                raise EeinferError(f"prompt {prompt.id} cannot be answered: {error}") from None
        finished: list[RequestOutput] = []
        done = 0
        while engine.has_work:
            finished += engine.step().finished
            if len(finished) >= _GROUP or not engine.has_work:
                yield from self._judged(finished, by_key)
                done += len(finished)
                self.progress(f"{_name(planned)}: {done} of {len(prompts)} prompts")
                finished = []

    def _judged(self, outputs: Sequence[RequestOutput], by_key: dict[str, Prompt]) -> Iterator[Judged]:
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise EeinferError(f"prompt {by_key[output.id].id} failed: {output.error}")
        answers = [tuple(token.token_id for token in output.tokens) for output in outputs]
        pairs = [(by_key[output.id].tokens, answer) for output, answer in zip(outputs, answers, strict=True)]
        losses = token_losses(self.model.decoder, pairs, self.model.tokenizer.eos_token_ids, self.tie)
        for output, answer, loss in zip(outputs, answers, losses, strict=True):
            assert loss is not None, "an answer that did not fail has a token"
            if isnan(loss.loss):
                raise EeinferError(f"prompt {by_key[output.id].id}: its loss is not a number")
            depths = tuple(token.layers_executed for token in output.tokens)
            yield Judged(output.id, loss.loss, loss.strict_loss, answer, depths)


@dataclass(frozen=True, slots=True)
class _Memory:
    """The answers under one policy, one JSON object a line; the first line is the policy, for people."""

    path: Path

    def read(self) -> dict[str, Judged]:
        """What was remembered, by prompt. A last line that an interruption cut off is left out."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise EeinferError(f"{self.path}: cannot be read ({error}); remove it and run again") from None
        found = (_parsed(line) for line in lines[1:])
        return {judged.prompt: judged for judged in found if judged is not None}

    def add(self, judged: Judged, policy: Policy) -> None:
        """Remember one answer."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                if not file.seek(0, SEEK_END):
                    file.write(json.dumps({"policy": asdict(policy)}).encode() + b"\n")
                elif not _ends_a_line(file):
                    file.write(b"\n")  # an interruption cut off the line before
                file.write(json.dumps(asdict(judged), allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise EeinferError(f"{self.path}: cannot be written ({error.strerror}); name another --work") from None


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, SEEK_END)
    return file.read(1) == b"\n"


def _parsed(line: str) -> Judged | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        return Judged(**(fields | {"answer": tuple(fields["answer"]), "depths": tuple(fields["depths"])}))
    except (ValueError, TypeError, KeyError):
        return None


def _name(planned: Sequence[PlannedExit]) -> str:
    pairs = ", ".join(f"{exit_.spec.layers_executed}: {exit_.threshold:.6g}" for exit_ in planned)
    return f"thresholds {pairs}" if pairs else "full depth"
