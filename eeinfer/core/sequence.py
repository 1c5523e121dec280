"""A Sequence: one request on its way through the engine. Host state only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from itertools import islice, takewhile

from eeinfer.core.plan import Draw, Shaping
from eeinfer.core.request import FinishReason, TokenLogprob


class Status(Enum):
    """Where a sequence stands: not yet (or no longer) in the cache, in flight, or done."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt, generated tokens and cache state of one request.

    Attributes:
        request_id: whose it is.
        prompt_tokens: number of prompt tokens; `tokens[:prompt_tokens]` is the prompt.
        tokens: prompt and generated token ids. The last generated one has not been run yet.
        max_tokens: most generated tokens.
        eos_token_ids: tokens that end the sequence.
        temperature: 0 is greedy.
        seed: of its draws.
        shaping: of its logits; None: they stay as they are.
        min_tokens: before this many generated tokens, none of `banned` can be picked.
        banned: see `min_tokens`.
        num_logprobs: as `logprobs` of `eeinfer.core.plan.Draw`.
        depths: layers run to produce each generated token.
        confidences: at the exit where each generated token left; `None` at full depth.
        logprobs: of each generated token; `None` where nobody asked.
        num_cached: tokens whose KV is in the cache, from the first on.
        block_table: where that KV lies.
        block_hashes: of the full blocks of `tokens`, as far as they were asked for; see `BlockManager.extend_hashes`.
        slot: place in the row pool while running.
    """

    request_id: str
    tokens: list[int]
    max_tokens: int
    eos_token_ids: frozenset[int]
    temperature: float = 0.0
    seed: int = 0
    shaping: Shaping | None = None
    min_tokens: int = 0
    banned: tuple[int, ...] = ()
    num_logprobs: int | None = None
    prompt_tokens: int = field(init=False)
    depths: list[int] = field(default_factory=list)
    confidences: list[float | None] = field(default_factory=list)
    logprobs: list[tuple[TokenLogprob, ...] | None] = field(default_factory=list)
    num_cached: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    slot: int = -1
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    _prompt: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self._prompt = tuple(sorted(set(self.tokens))) if self.shaping and self.shaping.penalises else ()

    @property
    def generated(self) -> list[int]:
        """Generated token ids."""
        return self.tokens[self.prompt_tokens :]

    @property
    def most_cached(self) -> int:
        """Most tokens that will ever be in the cache at once: the last generated one is never run."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def prefill_target(self) -> int:
        """Tokens to have in the cache before decoding: the prompt, or, when replaying, all but the last generated."""
        return self.prompt_tokens if not self.depths else len(self.tokens) - 1

    @property
    def decodes(self) -> bool:
        """Whether all but its last token is in the cache, so that it can take part in an iteration."""
        return self.num_cached == self.prefill_target

    def exact_tokens(self, full_depth: int) -> int:
        """Tokens, from the first on, that were run at full depth: the prompt and what follows it without an exit."""
        run = takewhile(lambda depth: depth == full_depth, islice(self.depths, 1, None))
        return self.prompt_tokens + sum(1 for _ in run)

    def depth_at(self, position: int, full_depth: int) -> int:
        """Layers to run for the token at `position` so that its KV is what it was.

        Prompt tokens run at full depth. The token at prompt_tokens + j was run to produce generated token j + 1, at
        depths[j + 1].
        """
        return full_depth if position < self.prompt_tokens else self.depths[position - self.prompt_tokens + 1]

    def draw(self) -> Draw:
        """How to pick the next token.

        It depends on this sequence's tokens and parameters only, never on its batch or order.
        """
        banned = self.banned if len(self.depths) < self.min_tokens else ()
        if self.temperature == 0 and self.shaping is None and self.num_logprobs is None and not banned:
            return Draw()
        return Draw(
            self.temperature,
            self._draw_seed() if self.temperature > 0 else 0,
            self.shaping,
            self._prompt,
            tuple(self.generated) if self.shaping and self.shaping.penalises else (),
            banned,
            self.num_logprobs,
        )

    def _draw_seed(self) -> int:
        digest = blake2b(f"{self.seed}:{len(self.tokens) - self.prompt_tokens}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1  # 63 bits: generators take signed seeds

    def append(
        self, token: int, depth: int, confidence: float | None, logprobs: tuple[TokenLogprob, ...] | None = None
    ) -> None:
        """Take a generated token; sets `finish_reason` when it is the last."""
        self.tokens.append(token)
        self.depths.append(depth)
        self.confidences.append(confidence)
        self.logprobs.append(logprobs)
        if token in self.eos_token_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.depths) >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
