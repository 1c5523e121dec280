"""From options to engines: the environment and the command of each worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peers.engines import LLAMA_PROGRAM, Engine, LlamaCpp, WorkerEngine

from eeinfer.errors import ConfigError

WORKERS = Path(__file__).parent
NONE = "none"  # of --transformers
PREFILL_TOKENS = 2048  # prompt tokens at once, for the engines that have such a limit; eeinfer's default
# These are about the interpreter that runs this, and would mislead another.
OWN_PYTHON = frozenset({"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"})


@dataclass(frozen=True, slots=True)
class Shape:
    """What every engine is loaded for.

    Attributes:
        model: Hugging Face folder.
        batch: prompts of the largest batch.
        length: tokens of a prompt and its answer together.
        threads: to compute with on a CPU.
        device: of the engines that run on several.
    """

    model: Path
    batch: int
    length: int
    threads: int
    device: str

    def environment(self, program: Path) -> dict[str, str]:
        """Environment variables of an engine with this program. Nothing is fetched from a hub or told to anyone."""
        unwanted = frozenset() if program == Path(sys.executable) else OWN_PYTHON
        kept = {name: value for name, value in os.environ.items() if name not in unwanted}
        return kept | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": str(self.threads)}


@dataclass(frozen=True, slots=True)
class Given:
    """The options that bring peers. `transformers` is an interpreter, `none`, or None: this one if it has it."""

    vllm: Path | None
    openvino: Path | None
    openvino_model: Path | None
    llama_cpp: Path | None
    gguf: Path | None
    transformers: str | None


def chosen(shape: Shape, given: Given) -> tuple[list[Engine], dict[str, str]]:
    """The peers, and the options that would have brought the others, by name.

    Raises:
        ConfigError: an option is missing or names the wrong thing.
    """
    peers: dict[tuple[str, str], Engine | None] = {
        ("vLLM", "--vllm"): _vllm(shape, given),
        ("OpenVINO", "--openvino and --openvino-model"): _openvino(shape, given),
        ("llama.cpp", "--llama-cpp and --gguf"): _llama_cpp(shape, given),
        ("transformers", "--transformers"): _transformers(shape, given),
    }
    left_out = {name: option for (name, option), engine in peers.items() if engine is None}
    return [engine for engine in peers.values() if engine], left_out


def eeinfer(shape: Shape, strategy: str) -> WorkerEngine:
    """One strategy of eeinfer, by the interpreter that runs this."""
    # As the `eeinfer` command sets it; see eeinfer/cli/app.py
    own = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")}
    return _worker(shape, f"eeinfer {strategy}", "--strategy", Path(sys.executable), own, {"strategy": strategy})


def _vllm(shape: Shape, given: Given) -> Engine | None:
    if given.vllm is None:
        return None
    # Its CPU build would take half of the memory for the KV cache.
    own = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4")}  # GiB
    return _worker(shape, "vLLM", "--vllm", given.vllm, own, {})


def _openvino(shape: Shape, given: Given) -> Engine | None:
    if given.openvino is None:
        return None
    if given.openvino_model is None:
        raise ConfigError("--openvino needs --openvino-model: the folder that `optimum-cli export openvino` wrote")
    return _worker(shape, "OpenVINO", "--openvino", given.openvino, {}, {"exported": str(given.openvino_model)})


def _llama_cpp(shape: Shape, given: Given) -> Engine | None:
    if given.llama_cpp is None:
        return None
    if given.gguf is None:
        raise ConfigError("--llama-cpp needs --gguf: the model as a BF16 GGUF file, which llama-quantize makes")
    if not (given.llama_cpp / LLAMA_PROGRAM).is_file():
        raise ConfigError(
            f"--llama-cpp {given.llama_cpp} has no {LLAMA_PROGRAM}; name the folder of llama.cpp's programs"
        )
    return LlamaCpp(given.llama_cpp.absolute(), given.gguf, shape.threads, shape.environment(given.llama_cpp))


def _transformers(shape: Shape, given: Given) -> Engine | None:
    own = sys.executable if find_spec("transformers") else NONE
    python = Path(given.transformers or own)
    if str(python) == NONE:
        return None
    if not python.is_file():
        raise ConfigError(f"--transformers {python}: no such file; name the interpreter of an environment that has it")
    return _worker(shape, "transformers", "--transformers", python, {}, {})


def _worker(
    shape: Shape, name: str, option: str, python: Path, own: Mapping[str, str], options: Mapping[str, Any]
) -> WorkerEngine:
    file = WORKERS / f"{name.split(maxsplit=1)[0].lower()}_worker.py"
    # A link to an interpreter is not resolved: that of a virtual environment would no longer find its packages.
    command = (str(python.absolute()), str(file))
    load = asdict(shape) | {"model": str(shape.model), "prefill_tokens": PREFILL_TOKENS} | options
    return WorkerEngine(name, option, command, shape.environment(python) | own, load)
