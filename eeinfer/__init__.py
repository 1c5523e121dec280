"""Early-exit language models, served in batches.

    from eeinfer import LLM, SamplingParams

Names load on first use, so that `import eeinfer` (and `eeinfer --help`) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eeinfer.core.request import Request, RequestOutput, SamplingParams
    from eeinfer.engine.llm import LLM
    from eeinfer.errors import EeinferError

    __version__: str

__all__ = ["LLM", "EeinferError", "Request", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "eeinfer.engine.llm",
    "EeinferError": "eeinfer.errors",
    "Request": "eeinfer.core.request",
    "RequestOutput": "eeinfer.core.request",
    "SamplingParams": "eeinfer.core.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        from eeinfer.version import own_version

        return own_version()
    raise AttributeError(f"module 'eeinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
