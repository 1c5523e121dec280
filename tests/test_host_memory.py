"""Memory for weights: it behaves as torch's own, with and without huge pages."""

from __future__ import annotations

import mmap

import pytest
import torch

from eeinfer.model.host_memory import empty


@pytest.mark.parametrize("shape", [(3,), (2, 3, 2**20)])
@pytest.mark.parametrize("huge", [True, False])
def test_memory_is_as_torchs(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], huge: bool) -> None:
    if not huge:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 10**6, raising=False)  # nothing that a system knows
    found = empty(shape, torch.bfloat16, torch.device("cpu"))
    assert (tuple(found.shape), found.dtype, found.device.type) == (shape, torch.bfloat16, "cpu")
    assert found.is_contiguous()
    views = [part.fill_(i) for i, part in enumerate(found.unbind(0))]
    del found
    assert [view.float().mean().item() for view in views] == list(range(shape[0])), "views keep the memory"


def test_other_devices_have_their_own() -> None:
    assert empty((2, 2**22), torch.float32, torch.device("meta")).is_meta
