"""Measure what a pass costs here, once for each model and machine, and remember it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, SequenceState
from outrider.errors import OutriderError
from outrider.heads.targets.base import HeadTarget
from outrider.models.base import Target
from outrider.models.recurrent_target import RecurrentTarget
from outrider.native.library import cache_folder
from outrider.plan.pass_cost import CostModel, PassCost, Sample
from outrider.system.atomic_files import write_whole
from outrider.system.machine import hardware, versions

_COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_GUESSES = 16  # of a row at most; wider passes are made of more rows
_SWEEPS, _REPEATS = 3, 3  # the first repeat of each warms up
_SLOW = 0.4  # seconds: passes that take longer are not widened further
_METHOD = 4  # of measuring; what was measured otherwise is measured anew
_ASKED, _DRIFT = (1, 8), 1.4  # columns by which a file is checked, and how far apart it may be from them
_FILES = 32  # kept
_READ = 256  # columns of a text that is read
_DEEP = 1024  # cached tokens that the cost of reading them is measured at


def calibrate(target: Target, draft: Target | None) -> CostModel:
    """Time passes of an idle target, and of the draft model if there is one. Takes seconds.

    What is in the caches' slots is lost.
    """
    return CostModel(target=measure_pass(target), draft=None if draft is None else measure_pass(draft))


def measure_pass(target: Target) -> PassCost:
    """The cost of one model's pass; rows and columns go as far as its slots and context do."""
    return PassCost.fit(list(_samples(target)))


@torch.inference_mode()
def _samples(target: Target) -> Iterator[Sample]:
    """Sweep by sweep over all shapes, so that a disturbance does not fall on one of them alone."""
    shapes, widest = [], 1
    for columns, rows in _shapes(target):
        shapes.append((columns, rows, 0))
        widest = columns
        if _once(target, rows, columns, 0) > _SLOW:
            break
    if not isinstance(target, RecurrentTarget):  # whose state is as dear to read after a thousand tokens as after one
        deep = {(1, 1), (min(widest, 8), 1), (min(target.slots, 4), min(target.slots, 4))}
        long = ((columns, rows, min(_DEEP, target.context - 1 - columns)) for columns, rows in sorted(deep))
        shapes += [shape for shape in long if shape[2] > 0]
    took: dict[tuple[int, int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(_SWEEPS):
        for columns, rows, cached in took:
            took[columns, rows, cached] += [_once(target, rows, columns, cached) for _ in range(_REPEATS)][1:]
    # Disturbances only ever add time, and on a shared machine they can fall on most of a shape's passes.
    for (columns, rows, cached), seconds in took.items():
        yield Sample(tokens=columns, seqs=rows, cached=cached, seconds=min(seconds))
    if not isinstance(target, HeadTarget):  # which scores the last column of a row alone, in the passes above, too
        columns = min(widest, _READ, target.context - 1)
        read = [_read(target, columns) for _ in range(_SWEEPS * _REPEATS)][1:]
        yield Sample(tokens=columns, seqs=1, cached=0, seconds=min(read), scored=False)


def _shapes(target: Target) -> Iterator[tuple[int, int]]:
    """Columns, and the rows that share them."""
    for columns in _COLUMNS:
        rows = min(target.slots, -(-columns // _GUESSES) if columns > _GUESSES else 1)
        if columns > rows * (target.context - 1) or columns // rows > 4 * _GUESSES:
            return
        yield columns, rows


def _once(target: Target, rows: int, columns: int, cached: int) -> float:
    """Seconds of a pass over `columns`, shared out to rows that have `cached` tokens each."""
    shares = [columns // rows + (b < columns % rows) for b in range(rows)]
    if isinstance(target, HeadTarget):
        return _head_once(target, shares, cached)
    batch = Batch(
        seqs=tuple(_row(target, slot) for slot in range(rows)),
        start=(cached,) * rows,
        feed=((0,),) * rows,
        draft_budget=tuple(share - 1 for share in shares),
    )
    draft = _guesses(shares, target.device)
    return _timed(target, batch, draft)


def _read(target: Target, columns: int) -> float:
    """Seconds of a pass that reads so many columns of a text."""
    batch = Batch(seqs=(_row(target, 0),), start=(0,), feed=((0,) * columns,), draft_budget=(0,))
    return _timed(target, batch, tree.empty(1, target.device))


def _head_once(target: HeadTarget, shares: list[int], cached: int) -> float:
    """The same of a trained draft, which reads text with states and then guesses one after another."""
    batch = Batch(
        seqs=tuple(_row(target, slot) for slot in range(len(shares))),
        start=(cached + 1,) * len(shares),  # no state led to the first token
        feed=tuple((0,) * share for share in shares),
        draft_budget=(1,) * len(shares),
    )
    for slot, share in enumerate(shares):
        target.pretend(slot, cached, share + 1)
    return _timed(target, batch, tree.empty(len(shares), target.device))


def _timed(target: Target, batch: Batch, draft: Draft) -> float:
    began = perf_counter()
    target.score(batch, draft)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    took = perf_counter() - began
    for row in batch.seqs:
        target.cache.release(row.slot)
    return took


def _guesses(shares: list[int], device: torch.device) -> Draft:
    if max(shares) == 1:
        return tree.empty(len(shares), device)
    tokens = torch.zeros(len(shares), max(shares) - 1, dtype=torch.int64, device=device)
    return tree.chain(tokens, tuple(share - 1 for share in shares))


def _row(target: Target, slot: int) -> SequenceState:
    target.cache.admit(slot, (0,))
    return SequenceState.of((0,), slot)


@torch.inference_mode()
def _holds(costs: CostModel, target: Target, draft: Target | None) -> bool:
    """Whether narrow and wider passes of both still compare as they do on record; all may be slower or faster alike."""
    scales = []
    for model, cost in ((target, costs.target), (draft, costs.draft)):
        if model is not None and cost is not None:
            for columns in _ASKED if model.context > max(_ASKED) else _ASKED[:1]:
                took = min(_once(model, 1, columns, 0) for _ in range(_REPEATS))
                scales.append(took / cost(columns, rows=1, cached=0))
    return max(scales) <= min(scales) * _DRIFT


def cost_file(target: Target, draft: Target | None) -> Path:
    """Where the costs of these models on this machine are kept."""
    models = [
        (each.kernels, each.bytes(), each.vocab, each.slots, each.context)
        for each in (target, draft)
        if each is not None
    ]
    known = json.dumps([_METHOD, models, hardware(str(target.device)), versions()], sort_keys=True, default=str)
    return cache_folder() / f"costs-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"


def known_costs(target: Target, draft: Target | None, *, fresh: bool = False) -> CostModel:
    """Costs from the file, or measured now and written there; `fresh` measures in any case.

    What the file says is checked by a few passes. It was measured in one moment, in which the machine may have been
    busy; a planner that went by it would do too little for ever.
    """
    path = cost_file(target, draft)
    if not fresh:
        try:
            known = CostModel.loads(path.read_text("utf-8"))
        except (OSError, ValueError, TypeError, KeyError):
            pass  # never measured, or by another version: measuring again is the remedy
        else:
            if _holds(known, target, draft):
                with suppress(OSError):
                    path.touch()  # `_sweep` goes by it
                return known
    costs = calibrate(target, draft)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, costs.dumps())
        _sweep(path.parent)
    except (OSError, OutriderError):
        pass  # a read-only home costs the seconds again the next time, and nothing else
    return costs


def _sweep(folder: Path) -> None:
    """Remove the costs that were asked for longest ago: every model, width and version leaves a file of its own."""
    for old in sorted(folder.glob("costs-*.json"), key=lambda file: file.stat().st_mtime)[:-_FILES]:
        old.unlink(missing_ok=True)
