"""What a calibration certified, and whether it holds for what runs now.

A certificate is bound to a *row policy*: everything that decides at which depth a row leaves and with which token. A
calibration file holds the settings in `[exits]`, and the certificate with the rest of the policy in `[calibration]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any

from eeinfer.config.load import Calibration
from eeinfer.config.schema import SamplingSettings, Settings
from eeinfer.core.request import Guarantee, Request, SamplingParams
from eeinfer.engine.build import Located, PlannedExit, dtype_of
from eeinfer.errors import ConfigError
from eeinfer.exits.files import heads_fingerprint

NO_HEADS = "none"
_GREEDY = {"temperature": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
PER_ROW = ("split",)  # strategies under which a row's token and depth do not depend on its batch


@dataclass(frozen=True, slots=True)
class Policy:
    """A row policy, for greedy decoding.

    Attributes:
        model, heads: fingerprints; heads is "none" without tuned heads.
        dtype: number type of weights and cache.
        exits: layers executed at the exits that can be reached; `thresholds` has one for each.
        measure, decay, completion: as in `eeinfer.config.schema.ExitSettings`.
        strategy: of batching; those in `PER_ROW` count as one.
        max_tokens: most new tokens of an answer.
    """

    model: str
    heads: str
    dtype: str
    exits: tuple[int, ...]
    measure: str
    thresholds: tuple[float, ...]
    decay: float
    completion: str
    strategy: str
    max_tokens: int

    @property
    def fingerprint(self) -> str:
        """Identifies the policy: "sha256:" and 64 hex digits."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return "sha256:" + sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def policy_of(settings: Settings, located: Located, planned: Sequence[PlannedExit]) -> Policy:
    """The row policy of settings; `planned` are the exits in use, from `plan_exits`."""
    exits = settings.exits
    return Policy(
        model=located.base.fingerprint,
        heads=NO_HEADS if located.heads is None else heads_fingerprint(located.heads),
        dtype=str(dtype_of(settings.model.dtype, located.config.dtype)).removeprefix("torch."),
        exits=tuple(exit_.spec.layers_executed for exit_ in planned),
        measure=exits.measure,
        thresholds=tuple(exit_.threshold for exit_ in planned),
        decay=exits.decay,
        completion=exits.completion,
        strategy=PER_ROW[0] if settings.batching.strategy in PER_ROW else settings.batching.strategy,
        max_tokens=settings.sampling.max_tokens,
    )


@dataclass(frozen=True, slots=True)
class Certificate:
    """The table `[calibration]`: what was certified for which policy, and how it came about.

    Attributes:
        certified: whether there is a guarantee; `reason` says why not.
        tolerance: with probability `confidence` over the choice of the prompts, the mean loss of a prompt is at most
            this. None where none was asked for.
        policy: fingerprint of the whole policy, so that a file changed by hand is noticed.
        model, heads, dtype, strategy, max_tokens: the parts of the policy that `[exits]` does not hold.
        delta: level of each test: 1 - confidence, shared among the exit sets that were tried.
        n: certifying prompts.
        mean_loss, strict_loss, p_value: of the chosen thresholds, over those prompts.
        full_loss: the model's own at full depth, which is rounding alone.
        mean_layers: per decode token.
        tie: gap in probability up to which a token does not count as different.
        data: fingerprint of the certifying prompts.
        seed: of the run.
        version: of eeinfer.
    """

    certified: bool
    reason: str
    policy: str
    model: str
    heads: str
    dtype: str
    strategy: str
    max_tokens: int
    n: int
    tie: float
    data: str
    seed: int
    version: str
    tolerance: float | None = None
    confidence: float | None = None
    delta: float | None = None
    mean_loss: float | None = None
    strict_loss: float | None = None
    full_loss: float | None = None
    p_value: float | None = None
    mean_layers: float | None = None


def read_certificate(calibration: Calibration) -> Certificate:
    """The certificate of a calibration file.

    Raises:
        ConfigError: a key is missing or of the wrong type.
    """
    from pydantic import TypeAdapter, ValidationError

    document = json.dumps(dict(calibration.table), default=str)  # in Python mode, strict takes a Certificate alone
    try:
        return TypeAdapter(Certificate).validate_json(document, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{calibration.origin}: calibration.{where}: {first['msg']}; make the file again with "
            f"`eeinfer calibrate-thresholds`"
        ) from None


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a calibration in use holds.

    Attributes:
        guarantee: what it promises, if it promises anything.
        origin: its file.
        difference: why it does not hold for any request; None when it does for some.
        max_tokens: most new tokens of the answers it holds for.
        defaults: of requests that do not say.
    """

    guarantee: Guarantee | None
    origin: str
    difference: str | None
    max_tokens: int
    defaults: SamplingSettings

    def of(self, request: Request) -> Guarantee | str:
        """The guarantee that the answer to `request` carries, or why it carries none."""
        if self.guarantee is None or self.difference is not None:
            return self.difference or "the calibration carries no guarantee"
        return next(self._departures(request.sampling), self.guarantee)

    def _departures(self, sampling: SamplingParams) -> Iterator[str]:
        """What of a request's parameters the policy does not cover, in words."""
        for name, neutral in _GREEDY.items():
            value = getattr(self.defaults, name) if (own := getattr(sampling, name)) is None else own
            if value != neutral:
                yield f"{name} is {value:g}, and only greedy decoding is certified"
        if sampling.logit_bias:
            yield "logit_bias changes the logits, and only greedy decoding is certified"
        if sampling.min_tokens:
            yield f"min_tokens is {sampling.min_tokens}, which keeps the answer from ending"
        max_tokens = self.defaults.max_tokens if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens != self.max_tokens:
            yield f"max_tokens is {max_tokens}, certified for {self.max_tokens}"
        if sampling.ignore_eos:
            yield "end-of-sequence tokens are ignored"
        if sampling.stop:
            yield "stop strings cut the answer"
        if sampling.stop_token_ids:
            yield "stop tokens cut the answer"

    @property
    def notice(self) -> str | None:
        """One line for the user when requests without settings of their own carry no guarantee."""
        found = self.of(Request("", prompt=""))
        return f"not certified: {found} ({self.origin})" if isinstance(found, str) else None


def standing(
    calibration: Calibration | None, settings: Settings, located: Located, planned: Sequence[PlannedExit]
) -> Standing | None:
    """How a calibration that was loaded with the settings stands to what runs; None when there is none.

    Also None when no exit is in use: what runs then is the unmodified model.

    Raises:
        ConfigError: the file's table `[calibration]` is malformed.
    """
    if calibration is None or not planned:
        return None
    certificate = read_certificate(calibration)
    promised = None
    if certificate.certified and certificate.tolerance is not None and certificate.confidence is not None:
        promised = Guarantee(certificate.tolerance, certificate.confidence)
    return Standing(
        guarantee=promised,
        origin=calibration.origin,
        difference=_difference(certificate, calibration, policy_of(settings, located, planned)),
        max_tokens=certificate.max_tokens,
        defaults=settings.sampling,
    )


def _difference(certificate: Certificate, calibration: Calibration, current: Policy) -> str | None:
    if not certificate.certified:
        return certificate.reason or "the calibration carries no guarantee"
    recorded = recorded_policy(certificate, calibration)
    if recorded.fingerprint != certificate.policy:
        return "the file was changed after it was made"
    return next(_differences(recorded, current), None)


def recorded_policy(certificate: Certificate, calibration: Calibration) -> Policy:
    """The policy of a calibration file, from both of its tables."""
    exits = calibration.settings
    layers, thresholds = exits.get("exits.layers", ()), exits.get("exits.threshold", ())
    pairs = [(n, t) for n, t in zip(_several(layers), _several(thresholds), strict=False) if t != float("inf")]
    return Policy(
        model=certificate.model,
        heads=certificate.heads,
        dtype=certificate.dtype,
        exits=tuple(n for n, _ in pairs),
        measure=exits.get("exits.measure", ""),
        thresholds=tuple(t for _, t in pairs),
        decay=exits.get("exits.decay", 0.0),
        completion=exits.get("exits.completion", ""),
        strategy=certificate.strategy,
        max_tokens=certificate.max_tokens,
    )


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def _differences(recorded: Policy, current: Policy) -> Iterator[str]:
    """What differs, in words; `max_tokens` is not among it, as requests have their own."""
    for field in fields(Policy):
        was, now = getattr(recorded, field.name), getattr(current, field.name)
        if was == now or field.name == "max_tokens":
            continue
        if field.name in {"model", "heads"}:
            yield f"{field.name}: another fingerprint ({now[:19]}…) than the certified one ({was[:19]}…)"
        else:
            yield f"{field.name}: {_shown(now)}, certified for {_shown(was)}"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
