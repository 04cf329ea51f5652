"""What a target says, and the states that it was in: texts written by the engine, and read off the same passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.engine import Engine
from outrider.propose.base import Proposer
from outrider.types import Batch, Draft, Finish, Request, Round


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A finished text."""

    tokens: tuple[int, ...]  # L + 1
    states: torch.Tensor  # [L, layers, H] bfloat16, outputs of the layers asked for, at all tokens but the last
    prompt: int  # how many of the tokens were given


class Recorder:
    """Another proposer's guesses, while states are written down."""

    def __init__(self, inner: Proposer, layers: Sequence[int]) -> None:
        self.inner, self._layers = inner, tuple(layers)
        self.needs = replace(inner.needs, layers=tuple(sorted({*inner.needs.layers, *layers})))
        self._open: dict[int, tuple[int, list[torch.Tensor]]] = {}  # by slot: the request, and what was seen of it
        self._done: dict[int, torch.Tensor] = {}

    def admit(self, slot: int, request: Request) -> None:
        self.inner.admit(slot, request)
        self._open[slot] = request.id, []

    def propose(self, batch: Batch) -> Draft:
        return self.inner.propose(batch)

    def commit(self, round: Round) -> None:
        scores = round.scores
        for b, (row, path) in enumerate(zip(round.batch.rows, round.path, strict=True)):
            nodes = [node + 1 for node in path]
            states = [torch.cat([scores.fed[at][b], scores.features[at][b, nodes]]) for at in self._layers]
            self._open[row.slot][1].append(torch.stack(states, 1).to(torch.bfloat16))
        self.inner.commit(round)

    def release(self, slot: int) -> None:
        self.inner.release(slot)
        id, seen = self._open.pop(slot)
        if seen:
            self._done[id] = torch.cat(seen)

    def take(self, id: int) -> torch.Tensor | None:
        """States of a finished request, once."""
        return self._done.pop(id, None)


def written(engine: Engine, recorder: Recorder, requests: Iterable[Request]) -> Iterator[Sample]:
    """Run requests to their ends, and hand each text over when it is done."""
    for request in requests:
        engine.add(request)
    while engine.busy():
        for row in engine.step():
            if row.finish is None:
                continue
            states = recorder.take(row.request.id)
            if states is None or row.finish is Finish.ERROR:
                continue
            length = min(len(states), len(row.text) - 1)
            yield Sample(
                tokens=tuple(row.text[: length + 1]),
                states=states[:length],
                prompt=len(row.request.prompt),
            )
