"""What the scheduler asks of the runner, and what it hears back. All immutable: allocate first, then plan.

    plan    = scheduler.next()            Prefill(spans) | Pass(stage, rows) | Complete(rows)
    outcome = runner.run(plan)
    scheduler.commit(plan, outcome)

`Complete` is a plan of its own because only the host knows, once it has seen the token, which sequences go on: a row
whose sequence has just finished is never completed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from eeinfer.core.request import TokenLogprob
    from eeinfer.core.strategy import LeaveRule


@dataclass(frozen=True, slots=True)
class Shaping:
    """What a sequence asks to be done to its rows' logits; meanings as in `eeinfer.core.request.SamplingParams`.

    Attributes:
        top_k: 0 keeps all tokens.
        logit_bias: token ids with what is added to their logits.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether it depends on the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Draw:
    """How to pick one token: `temperature` 0 takes the argmax; else the noise that `seed` gives picks one.

    The rest is for the few rows that ask for it, and free for the others.

    Attributes:
        shaping: of the logits; None: they stay as they are.
        prompt, generated: token ids of the sequence, where it has penalties; those of the prompt each once.
        banned: tokens that cannot be picked.
        logprobs: of how many likeliest tokens log-probabilities are told; -1: all; None: nothing is told.
    """

    temperature: float = 0.0
    seed: int = 0
    shaping: Shaping | None = None
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start … start + len(tokens)` of one sequence, run together.

    Attributes:
        slot: the sequence's place in the row pool.
        tokens: token ids.
        start: position of the first one; everything before it is in the cache already.
        block_table: blocks that hold at least the positions up to the last token.
        depths: layers to run for each token: full depth for prompts, the recorded depth when replaying after
            preemption.
        draw: how to pick the token that follows; `None` when the span does not end at the sequence's last token.
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    depths: tuple[int, ...]
    draw: Draw | None


@dataclass(frozen=True, slots=True)
class Row:
    """One decode token on its way through the stages: whose it is, the token to run, and where its KV goes.

    `number`: index of the generated token that comes out, 1 for a sequence's first row; `max_tokens`: the most there
    will be.
    """

    request_id: str
    slot: int
    token: int
    position: int
    block_table: tuple[int, ...]
    draw: Draw
    number: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run spans of prompt (or replayed) tokens, one a sequence.

    A span may attend to tokens that another one runs in the same plan, when both sequences begin alike: in each layer
    all K and V are written before any are read.

    Attributes:
        spans: what to run.
        copies: (block, copy) pairs: what the first holds goes into the second before anything runs.
    """

    spans: tuple[Span, ...]
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """Run one stage on these rows; at its end, `rule` says who leaves.

    `flagged[i]`: row i was ready at an earlier exit of this iteration, which matters to sticky rules.
    """

    stage: int
    rows: tuple[Row, ...]
    rule: LeaveRule
    flagged: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Fill the KV of the stages that these rows skipped; `stages[i]` is the last stage that row i ran."""

    rows: tuple[Row, ...]
    stages: tuple[int, ...]


Plan = Prefill | Pass | Complete


class Verdict(NamedTuple):
    """What became of one row or span. A tuple, since there is one for every row at every exit.

    Attributes:
        token: the token picked; `None` when the row goes on, or the span did not ask for one.
        confidence: at the exit that was checked; `None` where nothing is checked.
        ready: confidence >= the row's threshold.
        failed: the numbers were not finite; the sequence cannot go on.
        logprobs: of the token and of the likeliest ones, where the draw asked for them.
    """

    token: int | None = None
    confidence: float | None = None
    ready: bool = False
    failed: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def leaves(self) -> bool:
        """Whether the row took its token here."""
        return self.token is not None


Outcome = tuple[Verdict, ...]
