"""From settings to an engine: finds the model and its heads, chooses device and number type, sizes the cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eeinfer.config.load import CALIBRATION_NAME
from eeinfer.config.schema import ExitSettings, Kernels, ModelSettings, Settings
from eeinfer.core.block_manager import BlockManager
from eeinfer.core.readiness import Readiness
from eeinfer.core.scheduler import Scheduler
from eeinfer.core.strategy import leave_rule
from eeinfer.engine.capturing import device_capture, prepare
from eeinfer.engine.engine import Engine
from eeinfer.errors import ConfigError, HeadsError, ModelError
from eeinfer.exits.check import Exit
from eeinfer.exits.files import CONFIG_NAME, Base, HeadsFile, has_heads, load_heads
from eeinfer.exits.heads import ExitHead, ExitSpec, build_head
from eeinfer.model import store
from eeinfer.model.decoder import Decoder
from eeinfer.model.families import ModelConfig, model_config
from eeinfer.model.fingerprint import fingerprint
from eeinfer.model.folder import CONFIG_FILE, read_json
from eeinfer.model.loader import load_weights
from eeinfer.model.native import NATIVE_FOLDER, native
from eeinfer.model.tokenizer import NoTokenizer, Tokenizer
from eeinfer.model.triton import triton
from eeinfer.model.weights import Weights
from eeinfer.ops.norm import at_least_float32
from eeinfer.ops.unavailable import Unavailable
from eeinfer.runner.capture import Capture
from eeinfer.runner.memory import check_weights
from eeinfer.runner.model_runner import ModelRunner
from eeinfer.runner.row_pool import CacheShape
from eeinfer.runner.sizing import cache_shape

Note = Callable[[str], None]
log = logging.getLogger(__name__)
PACKAGED_SETTINGS = "eeinfer.toml"


@dataclass(frozen=True, slots=True)
class Located:
    """A model folder with what identifies it, and the folder of its exit heads, if any.

    Random weights have no folder.
    """

    folder: Path | None
    config: ModelConfig
    base: Base
    heads: Path | None

    @property
    def packaged_settings(self) -> Path | None:
        """The settings that ship with the heads, their calibration if there is that alone, or None."""
        folder = self.heads or self.folder
        if folder is None:
            return None
        paths = (folder / PACKAGED_SETTINGS, folder / CALIBRATION_NAME)
        return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True, slots=True)
class Model:
    """A model in memory."""

    decoder: Decoder
    tokenizer: Tokenizer | NoTokenizer


def locate(settings: ModelSettings, note: Note) -> Located:
    """Find the model that the settings name, and its heads.

    Raises:
        ModelError: there is no such model, or it is not usable.
        HeadsError: the folder of heads that the settings name holds none.
    """
    folder = store.resolve(settings.name)
    config = model_config(folder)
    if read_json(folder / CONFIG_FILE).get("auto_map"):
        note(
            f"{folder / CONFIG_FILE} names code of its own (auto_map), which is never run; eeinfer's own model is used"
        )
    identity = fingerprint(folder)
    base = Base(settings.name, identity, config.hidden_size, config.vocab_size, config.num_layers)
    heads = _find_heads(settings.heads, folder, base, note)
    log.debug("model in %s, %s; exit heads in %s", folder, identity, heads)
    return Located(folder, config, base, heads)


def _find_heads(asked: str, folder: Path, base: Base, note: Note) -> Path | None:
    if asked == "none":
        return None
    if asked != "auto":
        if not has_heads(Path(asked)):
            raise HeadsError(
                f"model.heads = {asked!r}: there are no exit heads ({CONFIG_NAME}); name a folder of heads"
            )
        return Path(asked)
    if has_heads(folder):
        return folder
    for candidate in _packaged_heads():
        made_for = json.loads((candidate / CONFIG_NAME).read_text(encoding="utf-8"))
        if made_for["base_model"]["fingerprint"] == base.fingerprint:
            return candidate
        if all(made_for[key] == getattr(base, key) for key in ("hidden_size", "vocab_size", "num_layers")):
            theirs = made_for["base_model"]
            note(
                f"the packaged exit heads were made for another base, {theirs['name']} (fingerprint "
                f"{theirs['fingerprint'][:19]}…; this model's is {base.fingerprint[:19]}…), and are not used"
            )
    return None


def _packaged_heads() -> list[Path]:
    root = Path(str(resources.files("eeinfer"))) / "data" / "heads"
    return sorted(path.parent for path in root.glob(f"*/{CONFIG_NAME}"))


def load_model(settings: ModelSettings, located: Located, note: Note, *, keep_plain: bool = False) -> Model:
    """Read tokenizer and weights.

    Args:
        settings: of the model.
        located: the model.
        note: called with one-line notices.
        keep_plain: see `eeinfer.model.native.native`.

    Raises:
        ConfigError: the device or number type does not fit this machine, or the weights do not fit its memory.
        ModelError: files that cannot be used.
    """
    assert located.folder is not None, "random weights are not read"
    device = device_of(settings.device)
    dtype = dtype_of(settings.dtype, located.config.dtype)
    tokenizer = Tokenizer(located.folder, located.config.vocab_size)
    check_weights(located.base.name, located.config, dtype, device)
    weights = load_weights(located.folder, located.config, dtype, device)
    return Model(new_decoder(settings, located.config, weights, note, keep_plain=keep_plain), tokenizer)


def new_decoder(
    settings: ModelSettings, config: ModelConfig, weights: Weights, note: Note, *, keep_plain: bool = False
) -> Decoder:
    """A decoder with the kernels that the settings ask for.

    Raises:
        ConfigError: they ask for kernels that cannot be used for this model on this machine.
    """
    where, dtype = weights.embedding.device, weights.embedding.dtype
    kernels = kernels_for(settings.kernels, where)
    try:
        if kernels == "triton":
            return Decoder(config, weights, parts=triton(config, dtype, where))
        if kernels == "native":
            made = native(config, weights, store.home() / NATIVE_FOLDER, keep_plain=keep_plain)
            return Decoder(config, weights, made)
    except Unavailable as why:
        if settings.kernels != "auto":
            raise ConfigError(f"model.kernels = {kernels!r}: {why}; use auto or torch") from None
        if why.fixable:
            note(f"torch computes the layers, some two to four times slower than {kernels} kernels would: {why}")
        else:
            log.debug("torch computes the layers: %s", why)
    return Decoder(config, weights)


def kernels_for(asked: Kernels, device: torch.device) -> Kernels:
    """What `model.kernels` comes to on a device: `auto` is triton on CUDA and native on a CPU."""
    if asked != "auto":
        return asked
    return "triton" if device.type == "cuda" else "native"


def build_runner(
    settings: Settings,
    model: Model,
    planned: Sequence[PlannedExit],
    *,
    cache: Tensor | None = None,
    readiness: Readiness | None = None,
    runner_class: type[ModelRunner] = ModelRunner,
    capture: Capture | None = None,
    note: Note = log.debug,
) -> ModelRunner:
    """A runner with its exits and its KV cache.

    Args:
        settings: of the run.
        model: in memory.
        planned: the exits in use, from `plan_exits`.
        cache: of another runner with the same model and the same cache settings, which rests while this one works.
        readiness: decides who is ready in place of the measure.
        runner_class: ModelRunner, or one that also watches it.
        capture: captures the steps of decoding; None: the device's own way, if it has one and the settings allow it.
        note: called with one-line notices.

    Raises:
        ConfigError: the cache does not fit.
    """
    decoder = model.decoder
    measure, decay = settings.exits.measure, settings.exits.decay
    exits = [
        Exit(head_on(decoder, e.spec, e.tensors), measure, e.threshold, stats=decoder.logit_stats, decay=decay)
        for e in planned
    ]
    capture = capture or device_capture(settings.model, decoder)
    if cache is None:
        shape = cache_shape(settings, decoder, exits, captures=capture is not None)
    else:
        shape = CacheShape.of(cache, settings.batching.max_num_seqs)
    log.debug("%d KV blocks of %d tokens", shape.num_blocks, shape.block_size)
    runner = runner_class(
        *(decoder, exits, settings.exits.completion, shape), cache=cache, readiness=readiness, capture=capture
    )
    if runner.graphs is not None:
        prepare(runner.graphs, decoder.device, note)
    return runner


def build_engine(settings: Settings, model: Model, runner: ModelRunner) -> Engine:
    """An engine with nothing in it yet, ready to take requests."""
    scheduler = Scheduler(
        BlockManager(runner.shape.num_blocks, runner.shape.block_size, prefix_cache=settings.cache.prefix_cache),
        tuple(stage.stop for stage in runner.stages),
        leave_rule(settings.batching.strategy, sticky=settings.batching.sticky),
        approximate=settings.exits.completion != "oracle",
        max_num_seqs=runner.shape.max_num_seqs,
        max_num_batched_tokens=settings.batching.max_num_batched_tokens,
    )
    return Engine(scheduler, runner, model.tokenizer, settings.sampling, model.decoder.config.max_position)


class PlannedExit(NamedTuple):
    """An exit in use, before the model is loaded: its head's form and tensors, and its threshold."""

    spec: ExitSpec
    tensors: Mapping[str, Tensor]
    threshold: float


def plan_exits(
    settings: Settings, located: Located, note: Note, read: Callable[[Path, Base], HeadsFile] = load_heads
) -> list[PlannedExit]:
    """The exits in use: those whose threshold can be reached; none for the strategy `full`.

    What can be wrong with the settings of exits shows here, before the weights are read. `read` reads the heads.

    Raises:
        ConfigError: exits or thresholds that do not fit this model.
        HeadsError: files that cannot be used.
    """
    if settings.batching.strategy == "full":
        return []
    exits = settings.exits
    heads = _heads(exits, located, note, read)
    thresholds = _thresholds(exits, [spec.layers_executed for spec, _ in heads])
    planned = [PlannedExit(*head, threshold) for head, threshold in zip(heads, thresholds, strict=True)]
    reachable = [exit_ for exit_ in planned if exit_.threshold != inf]
    if not reachable:
        why = "no exit has a threshold below inf" if heads else "the model has no exit heads and no exits are named"
        fix = "--threshold 0.9" if heads else "--exits 15,20 --threshold 0.9"
        note(f"{why}, so nothing leaves early; pass for example {fix}")
    if exits.measure == "gate":
        _check_gates(reachable, located)
    if exits.completion == "learned":
        _check_learned_kv(reachable, located, note)
    return reachable


def _check_gates(planned: Sequence[PlannedExit], located: Located) -> None:
    if bare := [exit_.spec.layers_executed for exit_ in planned if exit_.spec.gate is None]:
        why = f"the heads in {located.heads} have no gate" if located.heads else "without exit heads there is no gate"
        raise ConfigError(
            f"exits.measure is 'gate', but {why} for the exit after {bare[0]} layers: pass `--measure max-prob`, or "
            f"tune gates (`eeinfer tune-heads`) and name their folder with --heads"
        )


def _check_learned_kv(planned: Sequence[PlannedExit], located: Located, note: Note) -> None:
    model = (located.config.num_kv_heads, located.config.head_dim)
    for spec in (exit_.spec for exit_ in planned):
        if (own := spec.completion) is not None and (own.kv_heads, own.head_dim) != model:
            raise HeadsError(
                f"{located.heads}: completion at the exit after {spec.layers_executed} layers is for {own.kv_heads} KV "
                f"heads of {own.head_dim}, and the model has {model[0]} of {model[1]}; make the heads again with "
                f"`eeinfer tune-heads`"
            )
    # Where one layer is left there is nothing to learn.
    skipping = [exit_.spec for exit_ in planned if exit_.spec.layers_executed < located.config.num_layers - 1]
    bare = [spec.layers_executed for spec in skipping if spec.completion is None]
    if bare and len(bare) == len(skipping):
        why = f"the heads in {located.heads} have" if located.heads else "without exit heads there is"
        raise ConfigError(
            f"exits.completion is 'learned', but {why} none for the exit after {bare[0]} layers: pass `--completion "
            f"propagate`, or make heads that have it (`eeinfer tune-heads --method distill`)"
        )
    if bare:
        note(f"no learned completion for exits {', '.join(map(str, bare))}: KV is propagated from there")


def _heads(
    exits: ExitSettings, located: Located, note: Note, read: Callable[[Path, Base], HeadsFile]
) -> list[tuple[ExitSpec, Mapping[str, Tensor]]]:
    tuned: dict[int, tuple[ExitSpec, Mapping[str, Tensor]]] = {}
    if located.heads is not None:
        file = read(located.heads, located.base)
        tuned = {spec.layers_executed: (spec, own) for spec, own in zip(file.specs, file.tensors, strict=True)}
    layers = tuple(tuned) if exits.layers == "auto" else exits.layers
    num_layers = located.config.num_layers
    if beyond := [n for n in layers if n >= num_layers]:
        raise ConfigError(
            f"exits.layers: an exit after {beyond[0]} layers is outside the model, which has {num_layers}; "
            f"exits lie in 1 … {num_layers - 1}"
        )
    if tuned and (bare := [n for n in layers if n not in tuned]):
        note(f"no tuned head for exits {', '.join(map(str, bare))}: the model's own norm and head are used there")
    return [tuned.get(n, (ExitSpec(n, "shared"), {})) for n in layers]


def head_on(decoder: Decoder, spec: ExitSpec, tensors: Mapping[str, Tensor]) -> ExitHead:
    """A head with its tensors (as read from a file) on the device and in the type of the model, a gate's in float32.

    A float64 model has its gates in float64 too.
    """
    wide = at_least_float32(decoder.dtype)
    types = {name: wide if name.startswith("gate.") else decoder.dtype for name in tensors}
    return build_head(
        spec,
        {name: tensor.to(decoder.device, types[name]) for name, tensor in tensors.items()},
        final_norm=decoder.final_norm,
        vocabulary=decoder.vocabulary,
        eps=decoder.config.norm_eps,
        product=decoder.product,
        gate=decoder.gate,
    )


def _thresholds(exits: ExitSettings, layers: list[int]) -> list[float]:
    if not isinstance(exits.threshold, tuple):
        return [exits.threshold] * len(layers)
    if len(exits.threshold) != len(layers):
        raise ConfigError(
            f"exits.threshold has {len(exits.threshold)} values for {len(layers)} exits "
            f"({', '.join(map(str, layers)) or 'none'}): give one for all, or one per exit"
        )
    return list(exits.threshold)


def device_of(name: str) -> torch.device:
    """The device of a `model.device` setting; ConfigError when this machine has none like it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device = {name!r} is not a device; use cpu, cuda or cuda:N") from None
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(f"model.device = {name!r} is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"model.device = {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def dtype_of(asked: str, checkpoint: str) -> torch.dtype:
    """The number type of a `model.dtype` setting; `auto` takes the checkpoint's, ModelError when that is unknown."""
    name = checkpoint.removeprefix("torch.") if asked == "auto" else asked
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"the checkpoint's number type {checkpoint!r} is not supported; pass --dtype")
    return dtype
