"""The progress of a measurement."""

from __future__ import annotations

from outrider.runtime.progress import Stage


def count_run(runs: Stage, name: str, tokens_per_s: float) -> None:
    """Count a run of a stage, with what was measured."""
    line = f"{runs.done + 1:.0f} of {runs.total:.0f}: {runs.title}, {name}: {tokens_per_s:.0f} tokens/s"
    runs.advance(line=line)
