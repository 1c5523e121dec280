"""What a benchmark measures, from what its command line gave."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from eeinfer.bench.curve import CURVE_THRESHOLDS
from eeinfer.bench.readiness import parse_simulated
from eeinfer.bench.sweep import STRATEGIES, Sweep, counts, setting_values, strategies
from eeinfer.config.schema import Settings
from eeinfer.engine.prompt_file import PACKAGED_PROMPTS
from eeinfer.errors import ConfigError

OUTPUT_LEN = 32
INPUT_LEN = 64


@dataclass(frozen=True, slots=True)
class Options:
    """What a benchmark measures.

    Attributes:
        sweep: the axes.
        prompts: file of prompts, unless the sweep has input lengths.
        source: what a report calls the prompts.
        num_prompts: requests a run; None: as many as sequences in flight, at least 8.
        seed: of the draw of prompts, of synthetic ids, of random weights and of simulated exits.
        warmup: short rounds before the ones that count.
        repeats: rounds that count.
        ignore_eos: every answer has its full length.
        simulated: rates of readiness by layers executed, in place of confidence.
        trace: file of answers whose depths are replayed, in place of confidence.
        random_weights: name of a shape whose weights are made up.
        quality: judge the answers by the model at full depth.
        roofline: measure what the machine could give at best.
        curve: several thresholds of a strategy make a curve.
    """

    sweep: Sweep
    prompts: Path | BinaryIO
    source: str
    num_prompts: int | None
    seed: int
    warmup: int
    repeats: int
    ignore_eos: bool
    simulated: Mapping[int, float] | None
    trace: Path | None
    random_weights: str | None
    quality: bool
    roofline: bool
    curve: bool

    @property
    def decided(self) -> bool:
        """Whether something else than confidence decides who is ready."""
        return self.simulated is not None or self.trace is not None


@dataclass(frozen=True, slots=True)
class Given:
    """The command line as it came: lists hold one text each time an option was given."""

    batch: Sequence[str]
    strategy: Sequence[str]
    exits: Sequence[str]
    threshold: Sequence[str]
    input_len: Sequence[str]
    output_len: Sequence[str]
    prompts: str | None
    num_prompts: int | None
    warmup: int
    repeats: int
    ignore_eos: bool | None
    simulate_exits: str | None
    replay_trace: Path | None
    random_weights: str | None
    quality: bool
    roofline: bool
    curve: bool

    def options(self, settings: Settings) -> Options:
        """The options; what was not given comes from `settings`.

        Raises:
            ConfigError: a value is malformed, or two options exclude each other.
        """
        self._check()
        synthetic = bool(self.input_len) or self.random_weights is not None
        return Options(
            sweep=self._sweep(settings, synthetic=synthetic),
            prompts=self._prompts(),
            source="synthetic" if synthetic else self._source(),
            num_prompts=self.num_prompts,
            seed=settings.sampling.seed,
            warmup=self.warmup,
            repeats=self.repeats,
            ignore_eos=synthetic if self.ignore_eos is None else self.ignore_eos,
            simulated=None if self.simulate_exits is None else parse_simulated(self.simulate_exits),
            trace=self.replay_trace,
            random_weights=self.random_weights,
            quality=self.quality,
            roofline=self.roofline,
            curve=self.curve,
        )

    def _sweep(self, settings: Settings, *, synthetic: bool) -> Sweep:
        thresholds = setting_values(self.threshold, "exits.threshold", "--threshold")
        return Sweep(
            batches=counts(self.batch, "--batch") or (settings.batching.max_num_seqs,),
            input_lens=counts(self.input_len, "--input-len") or ((INPUT_LEN,) if synthetic else (None,)),
            output_lens=counts(self.output_len, "--output-len") or (OUTPUT_LEN,),
            strategies=strategies(self.strategy) or (("full", "split") if self.curve else STRATEGIES),
            exits=setting_values(self.exits, "exits.layers", "--exits"),
            thresholds=CURVE_THRESHOLDS if self.curve and not self.threshold else thresholds,
        )

    def _prompts(self) -> Path | BinaryIO:
        if self.prompts == "-":
            return sys.stdin.buffer
        return PACKAGED_PROMPTS if self.prompts is None else Path(self.prompts)

    def _source(self) -> str:
        if self.prompts is None:
            return "packaged prompts"
        return "standard input" if self.prompts == "-" else Path(self.prompts).name

    def _check(self) -> None:
        """Options that exclude each other, with the one to leave out."""
        simulated, traced = self.simulate_exits is not None, self.replay_trace is not None
        random = self.random_weights is not None
        clashes = (
            (self.prompts is not None and bool(self.input_len), "--prompts and --input-len", "give one of them"),
            (self.prompts is not None and random, "--prompts and --random-weights", "random weights have no tokenizer"),
            (simulated and traced, "--simulate-exits and --replay-trace", "give one of them"),
            (simulated and bool(self.exits), "--simulate-exits and --exits", "the rates name the exits"),
            ((simulated or traced) and bool(self.threshold), "--threshold and simulated exits", "nothing reads it"),
            ((simulated or traced) and self.curve, "--curve and simulated exits", "their answers mean nothing"),
            (random and self.curve, "--curve and --random-weights", "their answers mean nothing"),
            (not self.quality and self.curve, "--curve and --no-quality", "a curve shows quality"),
            (traced and (random or bool(self.input_len)), "--replay-trace and synthetic prompts", "use its --prompts"),
            (traced and bool(self.output_len), "--replay-trace and --output-len", "the trace has the lengths"),
        )
        for clash, what, why in clashes:
            if clash:
                raise ConfigError(f"{what} exclude each other: {why}")
