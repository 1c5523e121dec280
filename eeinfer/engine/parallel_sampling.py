"""Several answers to one request (`n`): a sequence each, and one output when all are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eeinfer.core.request import FinishReason, Request, RequestOutput


def sequences_of(request: Request) -> Iterator[Request]:
    """A request for each of the answers that `request` asks for; itself where that is one."""
    if request.sampling.n == 1:
        yield request
        return
    for index in range(request.sampling.n):
        yield replace(request, index=index)


class Gathered:
    """Holds the answers to requests with `n` > 1 until all of a request are there."""

    def __init__(self) -> None:
        self._wanted: dict[str, int] = {}
        self._there: dict[str, list[RequestOutput]] = {}

    def expect(self, request: Request) -> None:
        """More than one answer to `request` will come."""
        self._wanted[request.id] = request.sampling.n

    def take(self, output: RequestOutput) -> RequestOutput | None:
        """The whole output of its request, once `output` completes it."""
        wanted = self._wanted.get(output.id, 1)
        if wanted == 1:
            return output
        there = self._there.setdefault(output.id, [])
        there.append(output)
        if len(there) < wanted:
            return None
        outputs = tuple(sorted(self._there.pop(output.id), key=lambda one: one.index))
        shown = next((one for one in outputs if one.finish_reason is FinishReason.ERROR), outputs[0])
        return replace(shown, outputs=outputs)
