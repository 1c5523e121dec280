"""What every part of a run of distillation needs: settings, processes, and what is kept in the work folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from os import environ
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from filelock import FileLock, Timeout
from torch import Tensor

from eeinfer.config.load import Loaded
from eeinfer.config.schema import Settings
from eeinfer.core.request import Request
from eeinfer.engine.build import Located, dtype_of
from eeinfer.engine.llm import LLM
from eeinfer.errors import EeinferError
from eeinfer.model.decoder import Decoder
from eeinfer.model.tokenizer import Tokenizer
from eeinfer.training.answers import cached_answers, digest, encoded, full_depth
from eeinfer.training.states import state_files
from eeinfer.training.traces import Answered


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One run, in one of its processes.

    Attributes:
        resolve: loads the settings (see `LLM.from_loaded`).
        settings: without those that ship with heads.
        located: the model.
        accelerator: of this process.
        work: folder of answers, states and checkpoints.
        note: called with one-line notices; silent in processes other than the first.
    """

    resolve: Callable[[Path | None], Loaded]
    settings: Settings
    located: Located
    accelerator: Accelerator
    work: Path
    note: Callable[[str], None]

    def answers(self, requests: Sequence[Request]) -> list[Answered]:
        """The model's answers: the first process makes those that are missing, the others find them on disk."""
        assert self.located.folder is not None, "a model that is named has a folder"
        vocab_size = self.located.config.vocab_size
        asked = encoded(requests, Tokenizer(self.located.folder, vocab_size), vocab_size, self.note)
        sampling = asdict(self.settings.sampling)
        made_by = {"model": self.located.base.fingerprint, "dtype": str(self._dtype), "sampling": sampling}
        with self.accelerator.main_process_first():
            return cached_answers(asked, self.work, made_by, self._llm, self.note)

    def states_folder(self, splits: dict[str, list[Answered]], exits: Sequence[int]) -> Path:
        """Where the states of these answers at these exits are; its name tells them from all others."""
        data = {name: [(a.tokens, a.first) for a in answers] for name, answers in splits.items()}
        return self.work / f"states-{digest([self.located.base.fingerprint, str(self._dtype), list(exits), data])}"

    def states(self, decoder: Decoder, splits: dict[str, list[Answered]], exits: Sequence[int]) -> dict[str, Tensor]:
        """Hidden states of the answers at each exit and at the end, [exits + 1, n, d] a split."""
        with self.accelerator.main_process_first():
            return self.states_here(decoder, splits, exits)

    def states_here(
        self, decoder: Decoder, splits: dict[str, list[Answered]], exits: Sequence[int]
    ) -> dict[str, Tensor]:
        """As `states`, for a process that asks alone."""
        ends = [*exits, decoder.num_layers]
        return state_files(decoder, splits, ends, self.states_folder(splits, exits), self.note)

    @property
    def _dtype(self) -> torch.dtype:
        return dtype_of(self.settings.model.dtype, self.located.config.dtype)

    def _llm(self) -> LLM:
        return LLM.from_loaded(lambda packaged: full_depth(self.resolve(packaged)), note=self.note)


def new_accelerator(settings: Settings, located: Located) -> Accelerator:
    """Of this process. Mixed precision is that of the launch, else bfloat16 for models in bfloat16."""
    dtype = dtype_of(settings.model.dtype, located.config.dtype)
    own = "bf16" if dtype is torch.bfloat16 else "no"
    return Accelerator(
        cpu=settings.model.device == "cpu",
        device_placement=False,
        mixed_precision=environ.get("ACCELERATE_MIXED_PRECISION", own),
        # The others wait while the first process lets the model answer.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=7))],
    )


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Hold the lock of a work folder, which is made if missing.

    Raises:
        EeinferError: another run holds it, or the folder cannot be made.
    """
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = FileLock(work / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise EeinferError(f"another run works in {work}; wait for it, or name another folder with --work") from None
    except OSError as error:
        raise EeinferError(f"{work}: {error.strerror}; name another folder with --work") from None
    try:
        yield
    finally:
        lock.release()
