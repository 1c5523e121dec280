"""What Triton 3.6's interpreter needs to run the kernels here."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache  # once
def mend_interpreter() -> None:
    """Let tensors bound loops, and bfloat16 be multiplied, in interpreted kernels; and let them start sooner.

    The interpreter keeps scalars as arrays of one element and makes integers of them with `int`, which NumPy refuses
    from 2.4 on (and warns about from 1.25 on). It keeps bfloat16 as 16 bits in an integer, which `dot` would multiply.
    For every function that a kernel calls it goes through all of the language to replace it by its own.
    """
    plain_patch = interpreter._patch_lang_tensor  # noqa: SLF001 - there is no public place for this
    builder = interpreter.InterpreterBuilder
    plain_dot = builder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain_dot(self, *wide, *rest)

    interpreter._patch_lang_tensor = patch  # noqa: SLF001
    interpreter._patch_builtin = _patch_builtin  # noqa: SLF001
    builder.create_dot = dot


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's, which looks at all members again each time."""
    for name in _builtins(package):
        if not tl.core.is_builtin(getattr(package, name)):
            return  # a function within a kernel: replaced already
        interpreter._patch_attr(package, name, getattr(package, name), builder, scope)  # noqa: SLF001


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
