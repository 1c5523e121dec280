"""Fixtures that several test files share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import PlainLlama
from reference_families import plain_model
from tiny import load_decoder, write_model

from eeinfer import LLM
from eeinfer.errors import ModelError
from eeinfer.model.decoder import Decoder
from eeinfer.model.store import DEFAULT_MODEL, resolve
from eeinfer.ops.native import build
from eeinfer.ops.native.build import Unavailable

# Tiny models gain nothing from threads, and lose much to each other's on a busy machine.
torch.set_num_threads(1)
# Read when triton is imported, which nothing has done yet. On a GPU the kernels are compiled and run there.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def plain_environment(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No setting and no model of the machine's reaches a test, but for the default model where a test asks for it."""
    for name in [name for name in os.environ if name.startswith("EEINFER_") and name != "EEINFER_HOME"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-settings"))
    if "default_model" not in request.fixturenames:
        monkeypatch.setenv("EEINFER_HOME", str(tmp_path_factory.getbasetemp() / "empty-store"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the real default model."""
    try:
        return resolve(DEFAULT_MODEL)
    except ModelError:
        pytest.skip("the default model is not in the store; run `eeinfer pull` (scripts/test.sh does)")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model, by the name of its variant."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda variant: write_model(root / variant, variant))


@pytest.fixture(scope="session")
def tiny_decoder(tiny_model: Callable[[str], Path]) -> Callable[..., Decoder]:
    """The decoder of a variant, float64 unless asked otherwise. Shared: tests that change weights load their own."""
    return cache(lambda variant, dtype=torch.float64: load_decoder(tiny_model(variant), dtype))


@pytest.fixture(scope="session")
def plain(tiny_model: Callable[[str], Path]) -> Callable[[str], PlainLlama]:
    """The plain reference of a variant."""
    return cache(lambda variant: plain_model(tiny_model(variant)))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library, built by this machine's compiler."""
    try:
        return build.load(tmp_path_factory.getbasetemp() / "native")
    except Unavailable as why:
        pytest.skip(f"no native kernels here: {why}")


@pytest.fixture
def make_llm(tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., LLM]]:
    """Builds an LLM on a tiny model (float64, CPU, small blocks); at the end none may have lost a block."""
    made = []

    def make(variant: str = "gqa", **settings: Any) -> LLM:
        defaults: dict[str, Any] = {
            "dtype": "float64",
            "device": "cpu",
            "block_size": 4,
            "num_blocks": 64,
            "max_num_seqs": 4,
        }
        made.append(LLM(str(tiny_model(variant)), **(defaults | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.engine.scheduler.check()
        blocks = llm.engine.scheduler.blocks
        assert blocks.num_free == blocks.num_blocks, "blocks leaked"
