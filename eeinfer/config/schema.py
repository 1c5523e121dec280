"""Every setting, declared once: frozen dataclasses, one per section of the TOML files.

The loader (`eeinfer.config.load`) validates values against these types and ranges; flags, environment variables
and files all end up here. Field metadata holds the help text that the command line prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from math import inf, isfinite
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from eeinfer.config.constraints import Ge, Gt, Le, MinLen, Predicate


def not_nan(value: float) -> bool:
    """Excludes NaN, with which every comparison is false."""
    return value == value  # noqa: PLR0124 - the definition of NaN


def finite(value: float) -> bool:
    """Excludes NaN and the infinities."""
    return isfinite(value)


def strictly_increasing(values: Sequence[int]) -> bool:
    """Whether each value is larger than the one before."""
    return all(a < b for a, b in pairwise(values))


# The names of the predicates above are what error messages say is allowed, underscores read as spaces.
Strategy = Literal["full", "all-exit", "split", "any", "majority", "mean"]
Measure = Literal["max-prob", "margin", "entropy", "similarity", "gate"]
Completion = Literal["propagate", "learned", "copy", "oracle"]
Kernels = Literal["auto", "native", "torch", "triton"]
Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]

Text = Annotated[str, MinLen(1)]
Positive = Annotated[int, Ge(1)]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
Threshold = Annotated[float, Predicate(not_nan)]  # inf never leaves, -inf always does
Penalty = Annotated[float, Ge(-2), Le(2), Predicate(finite)]
Layers = Annotated[tuple[Positive, ...], MinLen(1), Predicate(strictly_increasing)]
Thresholds = Annotated[tuple[Threshold, ...], MinLen(1)]

T = TypeVar("T")


def setting(default: T, help_text: str) -> T:
    """A dataclass field with a default and the one-line explanation shown to users."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class ModelSettings:
    name: Text = setting("smollm2-135m-instruct", "A name in the local store, a Hub id or a local folder.")
    heads: Text = setting(
        "auto", "Folder of exit heads; auto: beside the checkpoint, then packaged; none: the model's own head."
    )
    dtype: Dtype = setting("auto", "Number type of weights and cache; auto keeps the checkpoint's.")
    device: Text = setting("auto", "cpu, cuda, cuda:1, …; auto takes CUDA where there is one.")
    kernels: Kernels = setting(
        "auto", "What computes the layers: triton on CUDA, native on a CPU with AVX-512 BF16; auto takes what it can."
    )
    enforce_eager: bool = setting(False, "Decode without CUDA graphs; on a CPU there are none.")


@dataclass(frozen=True, slots=True)
class ExitSettings:
    layers: Literal["auto"] | Layers = setting("auto", "Exits as counts of layers run; auto: those of the heads.")
    measure: Measure = setting("max-prob", "How confidence is computed.")
    threshold: Threshold | Thresholds = setting(
        inf, "Leave at confidence >= this: one for all exits or one per exit; inf never, -inf always."
    )
    decay: Annotated[float, Ge(0), Predicate(finite)] = setting(
        0.0, "How fast thresholds fall along an answer, as in CALM: 0.9 threshold + 0.1 exp(-decay t / N); 0: constant."
    )
    completion: Completion = setting("propagate", "What becomes of the KV of the layers a token skipped.")


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    strategy: Strategy = setting("split", "Who leaves at an exit.")
    sticky: bool = setting(
        False,
        "A row that was ready at an earlier exit of the iteration counts as ready (all-exit, any, majority).",
    )
    max_num_seqs: Positive = setting(32, "Most sequences in flight.")
    max_num_batched_tokens: Positive = setting(
        2048, "Most prompt tokens in one prefill, so that longer prompts run in chunks, with decoding between them."
    )


@dataclass(frozen=True, slots=True)
class CacheSettings:
    block_size: Positive = setting(16, "Tokens in one KV block.")
    num_blocks: Literal["auto"] | Positive = setting("auto", "KV blocks; auto: as many as memory_fraction allows.")
    memory_fraction: Literal["auto"] | Annotated[float, Gt(0), Le(1)] = setting(
        "auto",
        "Share of the free memory for the KV cache, on CUDA of what the largest steps leave of it; auto: 0.5 on a CPU, "
        "0.9 on CUDA.",
    )
    prefix_cache: bool = setting(True, "Share the KV of equal beginnings between requests.")


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    max_tokens: Positive = setting(256, "Most new tokens for a request that does not say.")
    temperature: Annotated[float, Ge(0), Predicate(finite)] = setting(0.0, "0 is greedy.")
    top_p: Annotated[float, Gt(0), Le(1), Predicate(finite)] = setting(
        1.0, "Keep the likeliest tokens until their probabilities sum to this; 1 keeps all."
    )
    top_k: Annotated[int, Ge(0)] = setting(0, "Keep this many likeliest tokens; 0 keeps all.")
    min_p: Annotated[float, Ge(0), Le(1), Predicate(finite)] = setting(
        0.0, "Keep tokens at least this times as likely as the likeliest; 0 keeps all."
    )
    repetition_penalty: Annotated[float, Gt(0), Predicate(finite)] = setting(
        1.0, "Above 1, tokens of the prompt and of the answer so far become less likely; 1 does nothing."
    )
    presence_penalty: Penalty = setting(0.0, "Taken from the logits of the answer's tokens.")
    frequency_penalty: Penalty = setting(
        0.0, "Taken from the logits of the answer's tokens for each time they occur in it."
    )
    seed: Seed = setting(0, "Seed of the run; a request's own seed wins.")


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections. Immutable: a change is a new object from the loader."""

    model: ModelSettings = field(default_factory=ModelSettings)
    exits: ExitSettings = field(default_factory=ExitSettings)
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)


class Declared(NamedTuple):
    """What one dotted key declares: its type with its ranges, its default and its help text."""

    annotation: Any
    default: Any
    help: str


@cache
def declared() -> dict[str, Declared]:
    """Every dotted key (`section.key`) with its declaration, in the order of the classes above."""
    return {
        f"{section}.{f.name}": Declared(get_type_hints(cls, include_extras=True)[f.name], f.default, f.metadata["help"])
        for section, cls in get_type_hints(Settings).items()
        for f in fields(cls)
    }
