"""Whether this machine can serve: what is here, what will be used and why, and a test of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eeinfer.config.load import Loaded
from eeinfer.config.schema import Kernels
from eeinfer.engine.build import device_of, kernels_for
from eeinfer.engine.machine import compilers, cores, cpu_features, cpu_name, versions
from eeinfer.engine.self_test import TOLERANCE, kernel_test, self_test
from eeinfer.errors import EeinferError
from eeinfer.model import store
from eeinfer.model.native import NATIVE_FOLDER, check_cpu
from eeinfer.model.triton import check_machine
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
    """Everything that was looked at, each as soon as it is known; the self-tests are the last.

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
    backend, why = _backend(device, kernels_for(kernels, device))
    yield from _backends(device, kernels, backend, why)
    here = compilers()
    text = "; ".join(f"{name}: {line}" for name, line in here.items())
    yield Finding("compilers", text or "none found; native kernels need a C++ compiler", facts=dict(here))
    yield _store()
    if backend == "native":
        yield _kernel_test()
    yield _self_test(device_name, backend)


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


def _backends(device: torch.device, asked: Kernels, backend: str, why: str) -> Iterator[Finding]:
    """What computes attention and linear layers on `device`, with `model.kernels` as `asked`."""
    kernels = {
        "attention": "scaled_dot_product_attention on gathered KV blocks",
        "linear": "torch.nn.functional.linear",
    }
    problem = None
    if backend == "torch" and asked not in {"auto", "torch"}:
        problem = f"model.kernels is {asked}: {why}; use auto or torch"
    below = "CUDA libraries" if device.type == "cuda" else _cpu_libraries()
    for name, kernel in kernels.items():
        reference = f"torch ({kernel}; {below})"
        text = f"{backend} kernels, and {reference} for what they do not know"
        if backend == "torch" or (backend, name) == ("triton", "linear"):
            text = reference
        yield Finding(f"{name} backend", f"{text}: {why}", problem, {"backend": backend, "why": why})


def _backend(device: torch.device, kernels: Kernels) -> tuple[str, str]:
    """What computes most models on this device, with these kernels asked for, and why."""
    try:
        match kernels:
            case "triton":
                check_machine(device)
                return "triton", "a Triton kernel runs here"
            case "native":
                check_cpu(device)
                load(store.home() / NATIVE_FOLDER)
                return "native", "this CPU has AVX-512 BF16, and a compiler built them"
    except Unavailable as why:
        return "torch", str(why)
    return "torch", "model.kernels is torch"


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


def _kernel_test() -> Finding:
    outcome = kernel_test(store.home() / NATIVE_FOLDER)
    text = (
        f"native kernels in bfloat16 against torch in float32: off by {outcome.error:.1%} (at most {TOLERANCE} times "
        f"torch's own {outcome.torch_error:.1%}); a row's bits {'are' if outcome.invariant else 'are not'} its own"
    )
    problem = "native kernels compute wrong here: set model.kernels to torch, and report the line above"
    return Finding("kernel test", text, None if outcome.passed else problem, asdict(outcome))


def _self_test(device_name: str, backend: str) -> Finding:
    """It runs in float32, which native kernels do not compute."""
    try:
        outcome = self_test(device_name, "triton" if backend == "triton" else "torch")
    except (EeinferError, RuntimeError) as error:  # RuntimeError: what torch raises for a device that does not work
        return Finding("self-test", "failed", f"a tiny model does not run on this machine: {error}")
    depths = ", ".join(f"{count} tokens after {depth}" for depth, count in outcome.depths.items())
    text = f"early exit in batches against a reference in float64: {depths} of 6 layers"
    if outcome.passed:
        return Finding("self-test", f"{text}, all equal", facts={"depths": outcome.depths})
    wrong = outcome.difference or "no token left early"
    problem = f"this machine computes wrong answers ({wrong}): try another release of torch, or --device cpu"
    return Finding("self-test", text, problem, {"depths": outcome.depths})
