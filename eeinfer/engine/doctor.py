"""Whether this machine can serve: what is here, what will be used and why, and a test of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eeinfer.config.load import Loaded
from eeinfer.engine.build import device_of
from eeinfer.engine.machine import compilers, cores, cpu_features, cpu_name, versions
from eeinfer.engine.self_test import self_test
from eeinfer.errors import EeinferError
from eeinfer.model import store
from eeinfer.model.native import NATIVE_FOLDER
from eeinfer.ops.native.build import load
from eeinfer.ops.unavailable import Unavailable
from eeinfer.runner.memory import free_memory

_LITTLE = 2**30  # bytes of memory or disk below which little can be done


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        text: what was found, in a line.
        problem: what is wrong and how to mend it; None when nothing is.
        facts: the same for programs.
    """

    name: str
    text: str
    problem: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def findings(resolve: Callable[[], Loaded]) -> Iterator[Finding]:
    """Everything that was looked at, each as soon as it is known; the self-test is the last.

    Args:
        resolve: loads the settings. When they are bad, that is a finding too, and the rest takes the default device.
    """
    try:
        model = resolve().settings.model
        device_name, kernels = model.device, model.kernels
        yield Finding("settings", "valid; `eeinfer config show --origin` shows them")
    except EeinferError as error:
        device_name = kernels = "auto"
        yield Finding("settings", "not valid", str(error))
    found = versions()
    yield Finding("versions", ", ".join(f"{name} {number or '-'}" for name, number in found.items()), facts=found)
    yield _processor()
    try:
        device = device_of(device_name)
    except EeinferError as error:
        yield Finding("device", device_name, str(error))
        return
    yield _device(device, device_name)
    yield _memory(device)
    yield from _backends(device, kernels)
    here = compilers()
    text = "; ".join(f"{name}: {line}" for name, line in here.items())
    yield Finding("compilers", text or "none found; native kernels need a C++ compiler", facts=dict(here))
    yield _store()
    yield _self_test(device_name)


def _processor() -> Finding:
    features, threads = cpu_features(), torch.get_num_threads()
    facts = {"name": cpu_name(), "cores": cores(), "threads": threads, "features": features}
    known = "features unknown" if features is None else " ".join(features) or "no vector extensions known here"
    return Finding("processor", f"{facts['name']}, {facts['cores']} cores, {threads} threads; {known}", facts=facts)


def _device(device: torch.device, asked: str) -> Finding:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts = {"device": str(device), "cuda_devices": names, "cuda": torch.version.cuda}
    if asked != "auto":
        why = f"model.device is {asked}"
    elif names:
        why = "auto takes CUDA where there is one"
    else:
        why = "no CUDA device" if torch.version.cuda else "this build of torch has no CUDA"
    seen = f"; CUDA {torch.version.cuda}: {', '.join(names)}" if names else ""
    return Finding("device", f"{device}, as {why}{seen}", facts=facts)


def _memory(device: torch.device) -> Finding:
    free = free_memory(device)
    problem = None if free >= _LITTLE else "little memory is free: end other programs, or take a small model"
    return Finding("memory", f"{free / 2**30:.1f} GiB free on {device}", problem, {"free_bytes": free})


def _backends(device: torch.device, asked: str) -> Iterator[Finding]:
    """What computes attention and linear layers on `device`, with `model.kernels` as `asked`."""
    kernels = {
        "attention": "scaled_dot_product_attention on gathered KV blocks",
        "linear": "torch.nn.functional.linear",
    }
    on_cuda = device.type == "cuda"
    backend, why = ("torch", "the only backend of this version on CUDA") if on_cuda else _cpu_backend(asked)
    problem = f"model.kernels is native: {why}; use auto or torch" if backend == "torch" and asked == "native" else None
    below = "CUDA libraries" if on_cuda else _cpu_libraries()
    for name, kernel in kernels.items():
        reference = f"torch ({kernel}; {below})"
        text = reference if backend == "torch" else f"native kernels, and {reference} for what they do not know"
        yield Finding(f"{name} backend", f"{text}: {why}", problem, {"backend": backend, "why": why})


def _cpu_backend(asked: str) -> tuple[str, str]:
    """What computes models in bfloat16 on this CPU, with `model.kernels` as `asked`, and why."""
    if asked == "torch":
        return "torch", "model.kernels is torch"
    try:
        load(store.home() / NATIVE_FOLDER)
    except Unavailable as why:
        return "torch", str(why)
    return "native", "this CPU has AVX-512 BF16, and a compiler built them"


def _cpu_libraries() -> str:
    if not torch.backends.mkldnn.is_available():
        return "without oneDNN"
    return f"oneDNN, vectorised for {torch.backends.cpu.get_cpu_capability()}"


def _store() -> Finding:
    home, models = store.home(), store.pulled()
    there = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    facts = {"folder": str(home), "models": models, "free_bytes": free}
    text = f"{home}, {free / 2**30:.1f} GiB free; models: {', '.join(models) or 'none yet, run `eeinfer pull`'}"
    return Finding("model store", text, _store_problem(home, there, free), facts)


def _store_problem(home: Path, there: Path, free: int) -> str | None:
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written: set EEINFER_HOME to a folder that can"
    return None if free >= _LITTLE else f"little disk is free for {home}: free some, or set EEINFER_HOME"


def _self_test(device_name: str) -> Finding:
    try:
        outcome = self_test(device_name)
    except (EeinferError, RuntimeError) as error:  # RuntimeError: what torch raises for a device that does not work
        return Finding("self-test", "failed", f"a tiny model does not run on this machine: {error}")
    depths = ", ".join(f"{count} tokens after {depth}" for depth, count in outcome.depths.items())
    text = f"early exit in batches against a reference in float64: {depths} of 6 layers"
    if outcome.passed:
        return Finding("self-test", f"{text}, all equal", facts={"depths": outcome.depths})
    wrong = outcome.difference or "no token left early"
    problem = f"this machine computes wrong answers ({wrong}): try another release of torch, or --device cpu"
    return Finding("self-test", text, problem, {"depths": outcome.depths})
