"""What a captured step may do: the same operations on the same shapes each time, and none that waits for the device.

A CUDA graph records kernels and addresses. Whatever Python decides from values on the device would be decided once, at
the capture, and a copy to the host would fail there; on a CPU neither shows, so the operations themselves are watched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_graphs import EXITS, MixedDepths, gated, sequences
from tiny import VARIANTS, Loop, bare_exits
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eeinfer.config.schema import Completion
from eeinfer.model.decoder import Decoder
from eeinfer.runner.capture import DryCapture, Step

# They copy to the host, or have results whose shapes depend on values; `lift_fresh` is a tensor made of Python numbers.
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}

Trace = list[tuple[str, tuple[str, ...]]]


class Watch(TorchDispatchMode):
    """Writes down every operation with the shapes of its tensors and its other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: Trace = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = tree_leaves((args, kwargs))
        assert name not in WAITING, f"{name} waits for the device"
        masks = [a for a in given if isinstance(a, Tensor) and a.dtype in {torch.bool, torch.uint8}]
        assert not (name in {"index", "index_put", "index_put_"} and masks), f"{name} by a mask waits for the device"
        self.trace.append((name, tuple(str(a.shape) if isinstance(a, Tensor) else repr(a) for a in given)))
        return func(*args, **kwargs or {})


class NoList(TorchFunctionMode):
    """Refuses what on a CPU is no operation, but reads memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in {Tensor.tolist, Tensor.numpy, Tensor.cpu}, f"{func.__name__} waits for the device"
        return func(*args, **kwargs or {})


class StrictCapture(DryCapture):
    """A dry run that refuses what a device could not replay."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, step: Step) -> Step:
        traces: list[Trace] = []

        def watched() -> None:
            with NoList(), Watch() as watch:
                step()
            traces.append(watch.trace)
            assert watch.trace, "the operations are seen"
            assert watch.trace == traces[0], "a replay would do something else than what was captured"

        def replay() -> None:
            self.replays += 1
            watched()

        watched()
        return replay


def run(decoder: Decoder, capture: StrictCapture, **options: Any) -> None:
    loop = Loop(decoder, capture=capture, readiness=MixedDepths(), max_num_seqs=5, **options)
    assert loop.runner.graphs is not None
    loop.runner.graphs.prepare()
    loop.run(sequences(5), range(0, 18, 3))
    assert capture.replays > 10


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family(variant: str, tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder(variant)
    run(decoder, StrictCapture(), exits=bare_exits(decoder, EXITS, "max-prob", 0.5))


@pytest.mark.parametrize("completion", ["propagate", "copy", "oracle"])
@pytest.mark.parametrize("measure", ["max-prob", "margin", "entropy", "similarity", "gate"])
def test_every_measure_and_completion(
    measure: str, completion: Completion, tiny_decoder: Callable[..., Decoder]
) -> None:
    decoder = tiny_decoder("gqa", torch.bfloat16)
    exits = gated(decoder, measure, 0.5)
    run(decoder, StrictCapture(), exits=exits, completion=completion)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.index_add_(0, torch.tensor([1]), x[:1]),
        lambda x: x.masked_select(x > 0),
        lambda x: x * 2 if x.flatten()[0] > 0 else x,
    ],
)
def test_the_watch_sees_what_waits(step: Callable[[Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="waits for the device"):
        StrictCapture().capture(lambda: step(torch.ones(3)))  # type: ignore[arg-type, return-value]


def test_the_watch_sees_what_changes() -> None:
    counts = iter((1, 2))
    replay = StrictCapture().capture(lambda: torch.ones(3)[: next(counts)].add_(1))  # type: ignore[arg-type, return-value]
    with pytest.raises(AssertionError, match="something else"):
        replay()
