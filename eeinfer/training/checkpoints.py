"""Where a run of training stands, on disk: a run that was killed goes on from its latest complete checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eeinfer.errors import EeinferError
from eeinfer.training.modules import TrainableHead

_BEST = "best.safetensors"


@dataclass(slots=True)
class Progress:
    """How far training came, and what was best.

    Attributes:
        step: steps done.
        losses: the lowest on dev, of each head.
        best: tensors of each head when it had it.
        stale: evaluations since, of each head.
        stopped: no head has got better for long.
    """

    step: int
    losses: list[float]
    best: list[dict[str, Tensor]]
    stale: list[int]
    stopped: bool = False

    @classmethod
    def start(cls, heads: Sequence[TrainableHead]) -> Progress:
        """Before the first evaluation."""
        return cls(0, [inf] * len(heads), [head.tensors() for head in heads], [0] * len(heads))

    def with_losses(self, losses: Sequence[float], heads: Sequence[TrainableHead], patience: int) -> Progress:
        """After an evaluation that found these losses."""
        better = [new < old for new, old in zip(losses, self.losses, strict=True)]
        stale = [0 if now else count + 1 for now, count in zip(better, self.stale, strict=True)]
        return replace(
            self,
            losses=[min(pair) for pair in zip(losses, self.losses, strict=True)],
            best=[head.tensors() if now else old for now, head, old in zip(better, heads, self.best, strict=True)],
            stale=stale,
            stopped=min(stale) >= patience,
        )


def save(accelerator: Accelerator, folder: Path, progress: Progress) -> None:
    """Write a checkpoint, whole or not at all, and remove older ones.

    Raises:
        EeinferError: the disk is full, or the folder cannot be written to.
    """
    partial, place = folder / "partial", folder / f"step-{progress.step:08}"
    try:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _write_best(partial / _BEST, progress)
            partial.rename(place)
            for old in _complete(folder)[:-1]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()
    except OSError as error:
        raise EeinferError(f"{folder}: {error.strerror or error}; name another folder with --work") from None


def resume(accelerator: Accelerator, folder: Path) -> Progress | None:
    """Load the latest checkpoint into what the accelerator prepared; None when there is none."""
    if not (found := _complete(folder)):
        return None
    accelerator.load_state(str(found[-1]))
    return _read_best(found[-1] / _BEST)


def _complete(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _write_best(path: Path, progress: Progress) -> None:
    tensors = {f"{i}.{name}": tensor for i, own in enumerate(progress.best) for name, tensor in own.items()}
    counts = {"step": progress.step, "stale": progress.stale, "stopped": progress.stopped, "losses": progress.losses}
    save_file(tensors, path, metadata={"progress": json.dumps(counts)})


def _read_best(path: Path) -> Progress:
    with safe_open(path, framework="pt") as file:
        counts = json.loads(file.metadata()["progress"])
        best: list[dict[str, Tensor]] = [{} for _ in counts["stale"]]
        for key in file.keys():  # noqa: SIM118 - not a mapping
            index, _, name = key.partition(".")
            best[int(index)][name] = file.get_tensor(key)
    return Progress(counts["step"], counts["losses"], best, counts["stale"], counts["stopped"])
