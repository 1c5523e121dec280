"""The engine loop: requests in, answers out, three calls a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import itemgetter
from time import perf_counter

from eeinfer.config.schema import SamplingSettings
from eeinfer.core.request import FinishReason, Request, RequestOutput, TokenLogprob, TokenRecord
from eeinfer.core.scheduler import Scheduler
from eeinfer.core.sequence import Sequence, Status
from eeinfer.core.step import Step, step_of
from eeinfer.engine.encode import encode
from eeinfer.engine.parallel_sampling import together
from eeinfer.engine.sampling import banned_tokens, effective, shaping_of
from eeinfer.errors import RequestError
from eeinfer.model.tokenizer import NoTokenizer, TextStream, Tokenizer
from eeinfer.runner.model_runner import ModelRunner


@dataclass(slots=True)
class Stats:
    """Counters of a run.

    Attributes:
        generated_tokens: tokens produced, end-of-sequence tokens included.
        layers_executed: layers run for them, summed.
        seconds: time spent in steps.
        prefill_seconds: the part of it spent on prompts (and on replay after preemption).
        finished, failed, aborted: answers that ended well, that did not, and that were cancelled; `n` a request.
        involuntary_exits, involuntary_stays: see `eeinfer.core.scheduler.SchedulerStats`.
        preemptions: times a sequence lost its blocks and had to be replayed.
        prefix_cache_queries: tokens that were looked for in the prefix cache, of prompts and of replays.
        prefix_cache_hits: those of them whose KV was there and was not computed again.
        evictions: times a cached KV block was given to another use.
        peak_blocks: most KV blocks held at once; cached ones that nobody holds do not count.
    """

    generated_tokens: int = 0
    layers_executed: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    involuntary_exits: int = 0
    involuntary_stays: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    evictions: int = 0
    peak_blocks: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time spent, prefill included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_layers(self) -> float | None:
        """Layers run per generated token, on average."""
        return self.layers_executed / self.generated_tokens if self.generated_tokens else None


@dataclass(slots=True)
class _Answer:
    """The text of one sequence so far, the answer to `request`."""

    stream: TextStream | NoTokenizer
    request: Request
    pieces: list[str] = field(default_factory=list)
    text: str = ""

    def push(self, token: int, *, ends: bool) -> bool:
        """Take a token; True when a stop string has appeared, which is then cut off with what follows.

        `ends`: it is one that ends the sequence, and is no text.
        """
        sampling = self.request.sampling
        keeps = sampling.include_stop_str_in_output
        piece = "" if ends and not keeps else self.stream.push(token)
        known = len(self.text)
        self.text += piece
        self.pieces.append(piece)
        if len(self.pieces) <= sampling.min_tokens:
            return False
        found = ((stop, self.text.find(stop, max(0, known - len(stop) + 1))) for stop in sampling.stop)
        hits = [(at + len(stop), at) for stop, at in found if at >= 0]
        if hits:
            end, at = min(hits, key=itemgetter(0))  # whichever is complete first, then the first in the list
            self._cut(end if keeps else at)
        return bool(hits)

    def _cut(self, end: int) -> None:
        self.text = self.text[:end]
        surplus = sum(map(len, self.pieces)) - end
        for i in range(len(self.pieces) - 1, -1, -1):
            cut = min(surplus, len(self.pieces[i]))
            self.pieces[i] = self.pieces[i][: len(self.pieces[i]) - cut]
            surplus -= cut


class Engine:
    """Drives scheduler and runner.

    Args:
        scheduler, runner, tokenizer: the parts.
        sampling: the run's defaults.
        max_position: longest context.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer | NoTokenizer,
        sampling: SamplingSettings,
        max_position: int,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.stats = Stats()
        self.tokenizer = tokenizer
        self._sampling = sampling
        self._max_position = max_position
        self._clock = clock
        self._answers: dict[Sequence, _Answer] = {}

    def add(self, request: Request) -> None:
        """Queue one sequence of a request, the one of its `index`.

        Raises:
            RequestError: it cannot be served; nothing was queued.
        """
        sequence = self._sequence(request)
        self.scheduler.add(sequence)
        self._answers[sequence] = _Answer(self.tokenizer.stream(), request)

    def step(self) -> Step:
        """Carry out one plan; call it while there `has_work`."""
        started = self._clock()
        plan = self.scheduler.next()
        assert plan is not None, "a scheduler that has work has a plan"
        outcome = self.runner.run(plan)
        touched = self.scheduler.commit(plan, outcome)
        produced = tuple(sequence.request_id for sequence in touched if self._take_in(sequence))
        finished = tuple(self._output(sequence) for sequence in touched if sequence.finish_reason is not None)
        ended = self._clock()
        step = step_of(plan, seconds=ended - started, ended=ended, produced=produced, finished=finished)
        self._count(step)
        return step

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    def drain(self) -> None:
        """Drop the requests that have not been started; those that have run on, with all their `n` sequences."""
        waiting = Counter(s.request_id for s in self._answers if s.status is Status.WAITING and not s.depths)
        for sequence, answer in list(self._answers.items()):
            if waiting[sequence.request_id] == answer.request.sampling.n:
                self.scheduler.finish(sequence, FinishReason.ABORT)
                del self._answers[sequence]

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request between two steps and free what it holds.

        Returns:
            What its sequences that still ran have got so far, with `finish_reason` ABORT; None if there are none.
        """
        live = [sequence for sequence in self._answers if sequence.request_id == request_id]
        for sequence in live:
            self.scheduler.finish(sequence, FinishReason.ABORT)
        self.stats.aborted += len(live)
        return together([self._output(sequence) for sequence in live]) if live else None

    def abort(self) -> None:
        """Drop every live request and free what it holds."""
        for sequence in self._answers:
            self.scheduler.finish(sequence, FinishReason.ABORT)
        self.stats.aborted += len(self._answers)
        self._answers.clear()

    def _take_in(self, sequence: Sequence) -> bool:
        """Add a token to its answer; False if the sequence has gained none, as it failed."""
        answer = self._answers[sequence]
        if len(answer.pieces) == len(sequence.depths):
            return False
        self.stats.generated_tokens += 1
        self.stats.layers_executed += sequence.depths[-1]
        if answer.push(sequence.tokens[-1], ends=sequence.finish_reason is FinishReason.STOP):
            self.scheduler.finish(sequence, FinishReason.STOP)
            sequence.finish_reason = FinishReason.STOP  # outranks a length reached with the same token
        return True

    def _output(self, sequence: Sequence) -> RequestOutput:
        answer = self._answers.pop(sequence)
        assert sequence.finish_reason is not None
        told = (None if own is None else tuple(map(self._named, own)) for own in sequence.logprobs)
        parts = zip(sequence.generated, answer.pieces, sequence.depths, sequence.confidences, told, strict=True)
        return RequestOutput(
            id=sequence.request_id,
            text=answer.text,
            finish_reason=sequence.finish_reason,
            prompt_tokens=sequence.prompt_tokens,
            tokens=tuple(TokenRecord(*part) for part in parts),
            error=sequence.error,
            index=answer.request.index,
        )

    def _named(self, logprob: TokenLogprob) -> TokenLogprob:
        return replace(logprob, text=self.tokenizer.token_text(logprob.token_id))

    def _count(self, step: Step) -> None:
        stats, counted = self.stats, self.scheduler.stats
        stats.seconds += step.seconds
        stats.prefill_seconds += step.seconds if step.kind == "prefill" else 0.0
        failed = sum(output.finish_reason is FinishReason.ERROR for output in step.finished)
        stats.failed += failed
        stats.finished += len(step.finished) - failed
        stats.involuntary_exits, stats.involuntary_stays = counted.involuntary_exits, counted.involuntary_stays
        stats.preemptions = counted.preemptions
        stats.prefix_cache_queries = counted.prefix_cache_queries
        stats.prefix_cache_hits = counted.prefix_cache_hits
        stats.evictions, stats.peak_blocks = self.scheduler.blocks.evictions, self.scheduler.blocks.peak_used

    # Requests

    def _sequence(self, request: Request) -> Sequence:
        vocab_size = self.runner.decoder.config.vocab_size
        tokens = encode(request, self.tokenizer, vocab_size)
        max_tokens = self._max_tokens(len(tokens), request.sampling.max_tokens)
        sampling = effective(request.sampling, self._sampling, max_tokens, vocab_size)
        eos_token_ids = self.tokenizer.eos_token_ids
        seed = self._own_seed(request.id) if sampling.seed is None else sampling.seed
        return Sequence(
            request_id=request.id,
            tokens=tokens,
            max_tokens=max_tokens,
            eos_token_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids),
            temperature=sampling.temperature or 0.0,
            seed=seed + request.index,
            shaping=shaping_of(sampling),
            min_tokens=sampling.min_tokens,
            banned=banned_tokens(sampling, eos_token_ids, vocab_size),
            num_logprobs=sampling.logprobs,
        )

    def _max_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        room = self._max_position - prompt_tokens
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, the model's context {self._max_position}: shorten the prompt"
            )
        if asked is not None and asked > room:
            raise RequestError(
                f"{prompt_tokens} prompt tokens and max_tokens {asked} exceed the model's context of "
                f"{self._max_position}: max_tokens can be at most {room}"
            )
        return min(self._sampling.max_tokens, room) if asked is None else asked

    def _own_seed(self, request_id: str) -> int:
        """A seed for a request that brings none: from the run's seed and the id, so that order does not matter."""
        digest = blake2b(f"{self._sampling.seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big")
