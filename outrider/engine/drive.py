"""The loop around `Engine.step`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from outrider.core.types import SequenceState

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


def drive(engine: Engine, seqs: Sequence[SequenceState]) -> Generator[tuple[SequenceState, ...]]:
    """Run rounds until `seqs`, which the engine has queued, are done. Yield what `Engine.step` returns in each round.

    The loop may append sequences to `seqs`. Other requests of the engine take part in its rounds.
    Leaving the loop aborts the sequences that are not done.
    """
    first = 0  # all sequences before this one are done
    try:
        while True:
            while first < len(seqs) and seqs[first].finish_reason:
                first += 1
            if first == len(seqs):
                return
            yield engine.step()
    finally:
        for seq in seqs[first:]:
            if not seq.finish_reason:
                engine.abort(seq.request.id)
