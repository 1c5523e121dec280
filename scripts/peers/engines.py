"""The engines as the controller sees them: a worker process each, or llama.cpp's own benchmark program."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Protocol

import psutil

from eeinfer.errors import EeinferError

LLAMA_PROGRAM = "llama-batched-bench"
LAST_LINES = 12
SECONDS_TO_END = 15.0


class EngineError(EeinferError):
    """An engine did not start, died, or answered wrongly; the message has its last words. The others go on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One run of a batch: what was asked was answered in full.

    Attributes:
        seconds: from handing over the prompts to having all answers.
        decode_seconds: the part of it after every prompt had its first token; None where it cannot be told.
        token_ids: new tokens of each prompt; None where the engine's tokens are its own.
    """

    seconds: float
    decode_seconds: float | None
    token_ids: list[list[int]] | None


class Engine(Protocol):
    """What can be compared. `version` and `device` are known once it is loaded."""

    name: str
    version: str
    device: str

    def load(self) -> None:
        """Start it and load the model. Raises EngineError."""

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answer:
        """Answer all prompts at once with `output_len` tokens each. Raises EngineError."""

    def processor_seconds(self) -> float:
        """Processor time that its processes have taken so far."""

    def close(self) -> None:
        """End its processes."""


class WorkerEngine:
    """An engine in a worker process, which speaks as `worker_protocol` says.

    Args:
        name: shown to the user.
        option: of the command line that brought it, for messages.
        command: the interpreter of its environment, and its worker.
        environment: of the process.
        options: for the worker to load the engine with.
    """

    def __init__(
        self, name: str, option: str, command: Sequence[str], environment: Mapping[str, str], options: dict[str, Any]
    ) -> None:
        self.name, self.version, self.device = name, "unknown", "unknown"
        self._option, self._command, self._environment, self._options = option, command, environment, options
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def load(self) -> None:
        """Start the worker and wait until its engine is loaded."""
        self._errors = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own interpreter
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=dict(self._environment),
                start_new_session=True,  # so that close() finds the processes that the engine starts
            )
        except OSError as error:
            raise EngineError(f"{self._option}: {self._command[0]} cannot be run ({error.strerror})") from error
        ready = self._ask({"load": self._options})["ready"]
        self.version, self.device = ready["version"], ready["device"]

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answer:
        """Have all prompts answered at once; an answer of another length is a failure."""
        answer = Answer(**self._ask({"run": {"prompts": prompts, "output_len": output_len}}))
        lengths = [len(ids) for ids in answer.token_ids or ()]
        if lengths != [output_len] * len(prompts):
            raise EngineError(f"answered {len(lengths)} of {len(prompts)} prompts with {lengths} tokens")
        return answer

    def processor_seconds(self) -> float:
        """User and system time of the worker and of the processes that it has started."""
        if self._process is None:
            return 0.0
        total = 0.0
        with suppress(psutil.NoSuchProcess):
            worker = psutil.Process(self._process.pid)
            for process in (worker, *worker.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """Tell the worker to stop by the end of its input, and end what is left of its session after a while."""
        if self._process is not None:
            with suppress(OSError):  # a dead worker's pipe
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_END)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()
            self._process = None
        if self._errors is not None:
            self._errors.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # told below, with the worker's last words
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(self._death())
        try:
            return json.loads(line)
        except ValueError:
            raise EngineError(f"{self._option}: {self._command[0]} is no Python; it answered {line[:80]!r}") from None

    def _death(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        self._errors.seek(0)
        code, said = self._process.returncode, _last_lines(self._errors.read())
        return f"its worker ended with code {code}; check the environment that {self._option} names. It said:\n{said}"


class LlamaCpp:
    """llama.cpp through its `llama-batched-bench`: prompts and new tokens of its own, and no sampling.

    The program makes a token for each sequence and step after the prompts. Others have each answer's first token from
    its prompt, so it is asked for one step less: the same work.

    Args:
        folder: has the program and its libraries.
        gguf: the model's weights.
        threads: to compute with.
        environment: of the process.
    """

    name = "llama.cpp"
    device = "cpu"

    def __init__(self, folder: Path, gguf: Path, threads: int, environment: Mapping[str, str]) -> None:
        self.version = "unknown"
        self._program, self._gguf, self._threads = folder / LLAMA_PROGRAM, gguf, threads
        libraries = os.pathsep.join(filter(None, (str(folder), environment.get("LD_LIBRARY_PATH"))))
        self._environment = dict(environment) | {"LD_LIBRARY_PATH": libraries}

    def load(self) -> None:
        """Ask for the program's version; the model is loaded by each run, outside the times that it takes."""
        said = self._call("--version")
        if found := re.search(r"version: (.+)", said.stderr + said.stdout):
            self.version = found[1]

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answer:
        """Time a batch of the same shape."""
        rows, length, steps = len(prompts), len(prompts[0]), output_len - 1
        said = self._call(
            *("-m", str(self._gguf), "-npl", str(rows), "-npp", str(length), "-ntg", str(steps)),
            *("-c", str(rows * (length + steps)), "-t", str(self._threads), "--output-format", "jsonl"),
        )
        lines = [line for line in said.stdout.splitlines() if line.startswith("{")]
        if len(lines) != 1:
            raise EngineError(f"{LLAMA_PROGRAM} printed no figures. It said:\n{_last_lines(said.stderr)}")
        figures = json.loads(lines[0])
        return Answer(figures["t"], figures["t_tg"], None)

    def processor_seconds(self) -> float:
        """Nothing of it runs between its turns."""
        return 0.0

    def close(self) -> None:
        """Nothing of it runs between its turns."""

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._program), *arguments]
        try:
            said = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)  # noqa: S603
        except OSError as error:
            raise EngineError(f"--llama-cpp: {self._program} cannot be run ({error.strerror})") from error
        if said.returncode:
            raise EngineError(
                f"{LLAMA_PROGRAM} ended with code {said.returncode}; check the folder of --llama-cpp and the file of "
                f"--gguf. It said:\n{_last_lines(said.stderr)}"
            )
        return said


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-LAST_LINES:])
