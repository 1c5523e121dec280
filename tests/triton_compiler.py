"""Compiles every Triton kernel for an H200, which needs no GPU: run as a program, without TRITON_INTERPRET.

Wrappers are called with tensors of the CPU, and what they would launch is compiled instead. Prints kernel, number type
and bytes of shared memory, tab-separated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from eeinfer.ops.token_batch import TokenBatch
from eeinfer.ops.triton.parts import paged_attention, triton_parts

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
OPTIONS = {"num_warps", "num_stages"}


def compiled(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constants = {name: values[name] for name in kernel.arg_names[len(args) :]}
    signature = {name: "constexpr" if name in constants else kind(values[name]) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(args) if isinstance(arg, Tensor)}
    options = {name: value for name, value in kwargs.items() if name in OPTIONS}
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=TARGET, options=options)


def kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def report(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:  # noqa: ARG001 - a launch
    binary = compiled(kernel, args, kwargs)
    assert binary.asm["cubin"]
    print(kernel.__name__, args[0].dtype, binary.metadata.shared, sep="\t", flush=True)  # noqa: T201 - the result


def batches() -> Iterator[TokenBatch]:
    tables = torch.zeros(2, 64, dtype=torch.int64)
    yield TokenBatch.decode(torch.tensor([3, 900]), tables, 16)
    yield TokenBatch.decode(torch.tensor([3, 9]), tables[:, :4], 16)
    yield TokenBatch.ragged([range(5), range(3)], tables, 16)


def launch_all(dtype: torch.dtype, head_dim: int, window: int | None, softcap: float | None) -> None:
    cache = torch.zeros(2, 4, 16, 2, head_dim, dtype=dtype)
    for batch in batches():
        q = torch.zeros(len(batch.positions), 8, head_dim, dtype=dtype)
        paged_attention(q, cache, batch.within(window), 0.1, softcap, split=256)
    parts, projected = triton_parts(1024), torch.zeros(3, 12 * head_dim, dtype=dtype)
    slots, half = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1, head_dim // 4)
    gains = (torch.zeros(head_dim, dtype=dtype), torch.zeros(head_dim, dtype=dtype))
    parts.rotate_and_store(projected, cache, slots, (half, half), gains if window else None, 1e-5)
    heads = projected.view(1, 3, 12, head_dim)
    parts.store_layers(cache[None], heads[:, :, :2], heads[:, :, 2:4], slots)
    parts.add_rms_norm(projected, projected, torch.zeros(12 * head_dim), 1e-5)
    parts.rms_norm(projected, None, 1e-5)
    parts.gated(projected, "silu" if window is None else "gelu")
    parts.logit_stats(projected, second=window is None, mean=window is None)


if __name__ == "__main__":
    JITFunction.run = report
    launch_all(torch.bfloat16, 128, None, None)
    launch_all(torch.bfloat16, 256, 100, 2.0)
    launch_all(torch.float16, 80, 100, None)
    launch_all(torch.float32, 64, None, None)
