"""The loop around `Engine.step`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

from outrider.core.types import SequenceState

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


def drive(engine: Engine, seqs: Sequence[SequenceState]) -> Generator[tuple[SequenceState, ...]]:
    """Run rounds until `seqs`, which the engine has queued, are done. Yield what `Engine.step` returns in each round.

    The loop may append sequences to `seqs`. Other requests of the engine take part in its rounds.
    Leaving the loop aborts the sequences that are not done.
    """
    pending = _pending(seqs)
    try:
        while True:
            engine.turns.take(pending)
            try:
                if not pending():
                    return
                round = engine.step()
            finally:
                engine.turns.give()
            yield round
    finally:
        _abort(engine, seqs)


def finish(engine: Engine, seqs: Sequence[SequenceState]) -> None:
    """Wait until `seqs`, which the engine has queued, are done. This thread or another one runs the rounds."""
    pending = _pending(seqs)
    engine.turns.take(pending)
    try:
        while pending():
            engine.step()
            engine.turns.share(pending)
    finally:
        engine.turns.give()
        _abort(engine, seqs)


def _pending(seqs: Sequence[SequenceState]) -> Callable[[], bool]:
    """Return a function that says whether a sequence is not done."""
    first = 0  # all sequences before this one are done

    def pending() -> bool:
        nonlocal first
        while first < len(seqs) and seqs[first].finish_reason:
            first += 1
        return first < len(seqs)

    return pending


def _abort(engine: Engine, seqs: Sequence[SequenceState]) -> None:
    for seq in seqs:
        if not seq.finish_reason:
            engine.abort(seq.request.id)
