"""From settings to an engine: finds the model and its heads, chooses device and number type, sizes the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eeinfer.config.schema import ExitSettings, ModelSettings, Settings
from eeinfer.core.block_manager import BlockManager
from eeinfer.core.scheduler import Scheduler
from eeinfer.core.strategy import leave_rule
from eeinfer.engine.engine import Engine
from eeinfer.errors import ConfigError, HeadsError, ModelError
from eeinfer.exits.check import Exit
from eeinfer.exits.files import CONFIG_NAME, Base, has_heads, load_heads
from eeinfer.exits.heads import ExitHead, ExitSpec, build_head
from eeinfer.model import store
from eeinfer.model.decoder import Decoder
from eeinfer.model.families import ModelConfig, model_config
from eeinfer.model.fingerprint import fingerprint
from eeinfer.model.loader import load_weights
from eeinfer.model.tokenizer import Tokenizer
from eeinfer.runner.memory import num_blocks
from eeinfer.runner.model_runner import ModelRunner
from eeinfer.runner.row_pool import CacheShape

Note = Callable[[str], None]
PACKAGED_SETTINGS = "eeinfer.toml"


@dataclass(frozen=True, slots=True)
class Located:
    """A model folder with what identifies it, and the folder of its exit heads, if any."""

    folder: Path
    config: ModelConfig
    base: Base
    heads: Path | None

    @property
    def packaged_settings(self) -> Path | None:
        """The settings that ship with the heads, or None."""
        path = (self.heads or self.folder) / PACKAGED_SETTINGS
        return path if path.is_file() else None


def locate(settings: ModelSettings, note: Note) -> Located:
    """Find the model that the settings name, and its heads.

    Raises:
        ModelError: there is no such model, or it is not usable.
        HeadsError: the folder of heads that the settings name holds none.
    """
    folder = store.resolve(settings.name)
    config = model_config(folder)
    identity = fingerprint(folder)
    base = Base(settings.name, identity, config.hidden_size, config.vocab_size, config.num_layers)
    return Located(folder, config, base, _find_heads(settings.heads, folder, base, note))


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


def build_engine(settings: Settings, located: Located, note: Note) -> Engine:
    """An engine ready to take requests.

    Raises:
        ConfigError: settings that do not fit this model or machine.
        ModelError, HeadsError: files that cannot be used.
    """
    device = _device(settings.model.device)
    dtype = _dtype(settings.model.dtype, located.config.dtype)
    # What can be wrong with the settings is found before the weights are read.
    planned = [] if settings.batching.strategy == "full" else _plan_exits(settings.exits, located, note)
    tokenizer = Tokenizer(located.folder, located.config.vocab_size)
    decoder = Decoder(located.config, load_weights(located.folder, located.config, dtype, device))
    exits = [Exit(head_on(decoder, e.spec, e.tensors), settings.exits.measure, e.threshold) for e in planned]
    max_num_seqs = settings.batching.max_num_seqs
    blocks = num_blocks(settings.cache, located.config, dtype, device, max_num_seqs)
    max_num_seqs = min(max_num_seqs, blocks)  # each sequence in flight holds at least one block
    shape = CacheShape(blocks, settings.cache.block_size, max_num_seqs)
    runner = ModelRunner(decoder, exits, settings.exits.completion, shape)
    scheduler = Scheduler(
        BlockManager(blocks, settings.cache.block_size),
        tuple(stage.stop for stage in runner.stages),
        leave_rule(settings.batching.strategy, sticky=settings.batching.sticky),
        approximate=settings.exits.completion != "oracle",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=settings.batching.max_num_batched_tokens,
    )
    return Engine(scheduler, runner, tokenizer, settings.sampling, located.config.max_position)


class PlannedExit(NamedTuple):
    """An exit in use, before the model is loaded: its head's form and tensors, and its threshold."""

    spec: ExitSpec
    tensors: Mapping[str, Tensor]
    threshold: float


def _plan_exits(exits: ExitSettings, located: Located, note: Note) -> list[PlannedExit]:
    """The exits in use: those whose threshold can be reached."""
    heads = _heads(exits, located, note)
    thresholds = _thresholds(exits, [spec.layers_executed for spec, _ in heads])
    planned = [PlannedExit(*head, threshold) for head, threshold in zip(heads, thresholds, strict=True)]
    reachable = [exit_ for exit_ in planned if exit_.threshold != inf]
    if not reachable:
        why = "no exit has a threshold below inf" if heads else "the model has no exit heads and no exits are named"
        fix = "--threshold 0.9" if heads else "--exits 15,20 --threshold 0.9"
        note(f"{why}, so nothing leaves early; pass for example {fix}")
    return reachable


def _heads(exits: ExitSettings, located: Located, note: Note) -> list[tuple[ExitSpec, Mapping[str, Tensor]]]:
    tuned: dict[int, tuple[ExitSpec, Mapping[str, Tensor]]] = {}
    if located.heads is not None:
        file = load_heads(located.heads, located.base)
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
    """A head with its tensors (as read from a file) in the type and on the device of the model."""
    return build_head(
        spec,
        {name: tensor.to(decoder.device, decoder.dtype) for name, tensor in tensors.items()},
        final_norm=decoder.final_norm,
        vocabulary=decoder.vocabulary,
        eps=decoder.config.norm_eps,
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


def _device(name: str) -> torch.device:
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


def _dtype(asked: str, checkpoint: str) -> torch.dtype:
    name = checkpoint.removeprefix("torch.") if asked == "auto" else asked
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"the checkpoint's number type {checkpoint!r} is not supported; pass --dtype")
    return dtype
