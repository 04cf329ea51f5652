"""Compile the layers and record the passes of decoding as CUDA graphs before the first request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from outrider.core.planner import FixedPlanner
from outrider.core.proposer import Proposer
from outrider.core.target import Target
from outrider.drafting.propose.leaves import draft_models
from outrider.runtime.progress import stage

if TYPE_CHECKING:
    from outrider.engine.build import EngineParts

_LONGEST = 2048  # tokens of a sequence; longer passes are recorded when they are used
_DRAFT_LENGTHS = (2, 4, 8)  # those that the planner of k auto chooses most


def record_passes(parts: EngineParts, proposers: Iterable[Proposer] | None = None) -> float:
    """Record the passes of one sequence and of all slots. Return the seconds spent; 0: none can be recorded.

    The passes are those of the target and of the draft models of `proposers`. None: the proposer of `parts`.

    A recorded pass covers smaller ones. Without this call, each shape is recorded at its first use, while requests
    wait. Ranks of tensor parallelism must record together, so they record a pass at its first use.
    """
    if parts.loaded.checkpoint.ranks > 1:
        return 0.0
    lengths = (parts.planner.k,) if isinstance(parts.planner, FixedPlanner) else _DRAFT_LENGTHS
    seconds = _record(parts.target, columns=(1, 1 + max(lengths)))
    drafts = {id(model): model for each in proposers or [parts.proposer] for model in draft_models(each)}
    for draft in drafts.values():
        vocab = parts.vocab if parts.vocab < draft.vocab else 0
        seconds += _record(draft, columns=(2,), steps=lengths, vocab=vocab)
    return seconds


def _record(model: Target, *, columns: tuple[int, ...], steps: tuple[int, ...] = (), vocab: int = 0) -> float:
    graphs = getattr(model, "graphs", None)
    if graphs is None:
        return 0.0
    length = min(model.context, _LONGEST)
    steps = tuple(step for step in steps if step > 0)
    title = "compiling the layers and recording passes as CUDA graphs"
    with stage(title, announcement=title):
        seconds: float = sum(
            graphs.warm(rows=rows, length=length, columns=columns, steps=steps, vocab=vocab, exact=False)
            for rows in sorted({1, model.slots}, reverse=True)
        )
    return seconds
