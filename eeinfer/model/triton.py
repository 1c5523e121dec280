"""Which models and machines the Triton kernels can run."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from eeinfer.model.families import ModelConfig
from eeinfer.ops.parts import Parts
from eeinfer.ops.unavailable import Unavailable

LARGEST_HEAD = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CAPABILITY = (8, 0)  # Ampere: the first whose tensor cores know bfloat16


def triton(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Parts:
    """The parts of such a model as Triton kernels; what they do not know (layer norms, plain MLPs) stays with torch.

    Raises:
        Unavailable: this model or this machine cannot use them, and why.
    """
    if dtype not in _DTYPES:
        raise Unavailable(f"Triton kernels know bfloat16, float16 and float32, and the model is in {dtype}")
    if config.head_dim > LARGEST_HEAD:
        raise Unavailable(f"Triton kernels know heads up to {LARGEST_HEAD}, not of {config.head_dim}")
    check_machine(device)
    from eeinfer.ops.triton.parts import triton_parts  # needs triton, which is not everywhere

    return triton_parts(config.max_position)


def check_machine(device: torch.device) -> None:
    """Run a small kernel on `device`, which becomes this thread's current one.

    Raises:
        Unavailable: it does not run, and why.
    """
    if find_spec("triton") is None:
        raise Unavailable("triton is not installed; it comes with torch's builds for CUDA", fixable=True)
    from triton import knobs

    interpreted = knobs.runtime.interpret
    if device.type != "cuda" and not interpreted:
        raise Unavailable(f"Triton kernels are for CUDA, and the model is on {device} (TRITON_INTERPRET=1 tests them)")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        needed, has = (".".join(map(str, pair)) for pair in (_CAPABILITY, found))
        raise Unavailable(f"Triton kernels need compute capability {needed}, and {device} has {has}")
    if interpreted:
        from eeinfer.ops.triton.interpreted import mend_interpreter

        mend_interpreter()
    from eeinfer.ops.triton.norm import rms_norm

    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current one
    try:
        rms_norm(torch.ones(1, 16, device=device), None, 0.0)
    except Exception as error:  # compilers, drivers, headers: whatever it is, torch can do without
        told = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise Unavailable(f"a Triton kernel does not run on {device}: {told}", fixable=True) from error
