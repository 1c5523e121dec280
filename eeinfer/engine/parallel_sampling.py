"""Several answers to one request (`n`): a sequence each, and one output when all are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        return together(self._there.pop(output.id))


def together(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output of those of a request's sequences; itself where there is one."""
    ordered = tuple(sorted(outputs, key=lambda one: one.index))
    shown = next((one for one in ordered if one.finish_reason is FinishReason.ERROR), ordered[0])
    return replace(shown, outputs=ordered) if len(ordered) > 1 else shown
