"""Measure the cost of passes, once per model and machine, and cache it on disk.

The tokens of a measured pass are random. In a mixture of experts each token reads the weights of its own experts. A
pass over one token many times reads only the experts of one token, so the difference is the time of the other experts.
The experts that a pass used are counted. The rounds count those that texts use (see `ExpertUse`).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, SequenceState
from outrider.errors import OutriderError
from outrider.heads.targets.base import HeadTarget
from outrider.models.base import ExpertCounter, Target
from outrider.native.library import cache_folder
from outrider.parallel.ranks import is_first_rank, of_first_rank, seconds_of_first_rank
from outrider.plan.pass_cost import CostModel, PassCost, Sample
from outrider.propose.draft_model.window import find_window
from outrider.system.atomic_files import write_whole
from outrider.system.machine import hardware, versions

_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MAX_PER_SEQUENCE = 16  # wider passes have more sequences
_SWEEPS = 3  # times that all shapes are measured
_REPEATS = 3  # passes of a shape in a sweep; the first one is a warm-up
_SLOW = 0.4  # seconds; wider passes are not measured after a pass this long
_METHOD = 7  # version of the method; files of other versions are measured again
_CHECKED = (1, 8)  # token counts of the passes that check a file
_MAX_DRIFT = 1.4  # largest ratio between the deviations of these passes from the file
_SEED = 0  # of the tokens; all measurements of a shape have the same tokens
_FILES = 32  # maximum number of cached files
_PREFILL = 256  # tokens of the measured prefill
_EQUAL = (4, 8, 16)  # equal tokens of the measurements that use the experts of one token
_DEEP = 1024  # cached tokens of the measurements with a filled cache
_DEEPEST = 8192  # the same for long contexts, whose keys and values exceed the caches of the processor


def calibrate(target: Target, draft: Target | None) -> CostModel:
    """Measure passes of an idle target, and of its draft model if there is one. Takes seconds.

    The contents of the caches are lost.
    """
    return CostModel(target=measure_pass(target), draft=None if draft is None else measure_pass(draft))


def measure_pass(target: Target) -> PassCost:
    """Measure the cost of passes of one model, up to its slots and context."""
    cost = PassCost.fit(list(_samples(target)))
    window = find_window(target)
    return cost if window is None else replace(cost, window=window.mean_length)


class _Shape(NamedTuple):
    """What a measured pass runs over."""

    tokens: int
    seqs: int
    cached: int = 0  # cached tokens per sequence
    equal: bool = False  # equal tokens in place of random ones


@torch.inference_mode()
def _samples(target: Target) -> Iterator[Sample]:
    """Measure all shapes in several sweeps, so that a disturbance does not affect a single shape."""
    experts = _experts_by_shape(target)
    widest = max((shape.tokens for shape in experts), default=1)
    shapes = [*experts]
    if target.cache.usage().token_bytes:  # otherwise passes do not depend on the cached tokens
        shapes += _deep_shapes(target, widest)
    took: dict[_Shape, list[float]] = {shape: [] for shape in shapes}
    for _ in range(_SWEEPS):
        for shape in took:
            seconds = [_measure(target, shape.seqs, shape.tokens, shape.cached, shape.equal) for _ in range(_REPEATS)]
            took[shape] += seconds[1:]
    # Use the minimum: disturbances only add time.
    for shape, measured in took.items():
        yield Sample(**shape._asdict(), seconds=min(measured), experts=experts.get(shape, 0.0))
    if not isinstance(target, HeadTarget):  # a draft head always computes logits for the last token only
        tokens = min(widest, _PREFILL, _context(target) - 1)
        prefills = [_measure_prefill(target, tokens) for _ in range(_SWEEPS * _REPEATS)]
        yield Sample(tokens=tokens, seqs=1, cached=0, seconds=min(prefills[1:]), scored=False)


def _experts_by_shape(target: Target) -> dict[_Shape, float]:
    """Return the shapes with an empty cache, up to the first slow one, and the distinct experts that each pass used."""
    experts: dict[_Shape, float] = {}
    widest = 1
    for tokens, seqs in _shapes(target):
        widest = tokens
        slow = _measure(target, seqs, tokens, 0) > _SLOW
        experts[_Shape(tokens, seqs)] = _touched_experts(target)
        if slow:
            break
    if any(experts.values()):
        for tokens in _EQUAL:
            if tokens < min(widest, _context(target)):
                _measure(target, 1, tokens, 0, equal=True)
                experts[_Shape(tokens, 1, equal=True)] = _touched_experts(target)
    return experts


def _deep_shapes(target: Target, widest: int) -> Iterator[_Shape]:
    """Yield the shapes with a filled cache."""
    context = _context(target)
    for tokens, seqs in sorted({(1, 1), (min(widest, 8), 1), (min(target.slots, 4), min(target.slots, 4))}):
        cached = min(_DEEP, context - 1 - tokens)
        if cached > 0:
            yield _Shape(tokens, seqs, cached)
        if seqs == 1 and context > 2 * _DEEP:
            yield _Shape(tokens, seqs, min(_DEEPEST, context - 1 - tokens))


def _context(target: Target) -> int:
    """Return how many tokens of a sequence a pass can read."""
    window = find_window(target)
    return target.context if window is None else window.size


def _shapes(target: Target) -> Iterator[tuple[int, int]]:
    """Yield the shapes: number of tokens, and of sequences that share them."""
    for tokens in _TOKENS:
        seqs = min(target.slots, -(-tokens // _MAX_PER_SEQUENCE) if tokens > _MAX_PER_SEQUENCE else 1)
        if tokens > seqs * (_context(target) - 1) or tokens // seqs > 4 * _MAX_PER_SEQUENCE:
            return
        yield tokens, seqs


def _touched_experts(target: Target) -> float:
    """Return the distinct experts of a layer that the last pass used; 0: they are not counted."""
    return (isinstance(target, ExpertCounter) and target.touched_experts()) or 0.0


def _measure(target: Target, seqs: int, tokens: int, cached: int, equal: bool = False) -> float:
    """Return the seconds of a pass over `tokens` of `seqs` sequences with `cached` tokens each."""
    shares = [tokens // seqs + (b < tokens % seqs) for b in range(seqs)]
    if isinstance(target, HeadTarget):
        return _measure_head(target, shares, cached)
    ids = _random_ids(target, shares)
    if equal:
        ids = tuple((row[0],) * len(row) for row in ids)
    batch = Batch(
        seqs=tuple(_sequence(target, slot) for slot in range(seqs)),
        start=(cached,) * seqs,
        feed=tuple(row[:1] for row in ids),
        draft_budget=tuple(share - 1 for share in shares),
    )
    return _timed(target, batch, _draft([row[1:] for row in ids], target.device))


def _measure_prefill(target: Target, tokens: int) -> float:
    """Return the seconds of a prefill of `tokens`."""
    feed = _random_ids(target, [tokens])
    batch = Batch(seqs=(_sequence(target, 0),), start=(0,), feed=feed, draft_budget=(0,))
    return _timed(target, batch, tree.empty(1, target.device))


def _measure_head(target: HeadTarget, shares: list[int], cached: int) -> float:
    """Return the seconds of a pass of a draft head, which needs hidden states of the committed tokens."""
    batch = Batch(
        seqs=tuple(_sequence(target, slot) for slot in range(len(shares))),
        start=(cached + 1,) * len(shares),  # the first token has no hidden state before it
        feed=_random_ids(target, shares),
        draft_budget=(1,) * len(shares),
    )
    for slot, share in enumerate(shares):
        target.set_zero_states(slot, cached, share + 1)
    return _timed(target, batch, tree.empty(len(shares), target.device))


def _timed(target: Target, batch: Batch, draft: Draft) -> float:
    """Return the seconds of a pass, and release its sequences."""
    began = perf_counter()
    target.score(batch, draft)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    seconds = seconds_of_first_rank(perf_counter() - began)
    for seq in batch.seqs:
        target.cache.release(seq.slot)
    return seconds


def _random_ids(target: Target, shares: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return random token ids: `shares[b]` of sequence b. They are the same in each call."""
    rng = random.Random(_SEED)
    return tuple(tuple(rng.randrange(target.vocab) for _ in range(share)) for share in shares)


def _draft(chains: list[tuple[int, ...]], device: torch.device) -> Draft:
    """Return these chains of draft tokens, one for each sequence."""
    widths = tuple(map(len, chains))
    if not max(widths):
        return tree.empty(len(chains), device)
    tokens = [chain + (0,) * (max(widths) - len(chain)) for chain in chains]
    return tree.chain(torch.tensor(tokens, dtype=torch.int64, device=device), widths)


def _sequence(target: Target, slot: int) -> SequenceState:
    """Admit a sequence of one token."""
    target.cache.admit(slot, (0,))
    return SequenceState.of((0,), slot)


@torch.inference_mode()
def _is_accurate(costs: CostModel, target: Target, draft: Target | None) -> bool:
    """Return whether a file is still accurate: all passes deviate from it by about the same factor."""
    scales = []
    for model, cost in ((target, costs.target), (draft, costs.draft)):
        if model is not None and cost is not None:
            for tokens in _CHECKED if _context(model) > max(_CHECKED) else _CHECKED[:1]:
                took = min(_measure(model, 1, tokens, 0) for _ in range(_REPEATS))
                scales.append(took / cost(tokens, seqs=1, cached=0))
    return max(scales) <= min(scales) * _MAX_DRIFT


def cost_file(target: Target, draft: Target | None) -> Path:
    """Return the file for the costs of these models on this machine."""
    models = [
        (model.kernels, model.bytes(), model.vocab, model.slots, _context(model))
        for model in (target, draft)
        if model is not None
    ]
    key = json.dumps([_METHOD, models, hardware(str(target.device)), versions()], sort_keys=True, default=str)
    return cache_folder() / f"costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def known_costs(target: Target, draft: Target | None, *, fresh: bool = False) -> CostModel:
    """Return the costs from the file, or measure and write them. `fresh` always measures.

    A few passes check the file, because the machine may have been busy when it was written.
    """
    path = cost_file(target, draft)
    if not fresh:
        known = of_first_rank(_read(path))
        if known is not None and _is_accurate(known, target, draft):
            with suppress(OSError):
                path.touch()  # `_remove_old_files` uses it
            return known
    costs = calibrate(target, draft)
    if not is_first_rank():
        return costs
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, costs.dumps())
        _remove_old_files(path.parent)
    except (OSError, OutriderError):
        pass  # the cache folder is read-only; measure again next time
    return costs


def _read(path: Path) -> CostModel | None:
    """Return the costs of a file; None if there is no file yet, or another version has written it."""
    try:
        return CostModel.loads(path.read_text("utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remove_old_files(folder: Path) -> None:
    """Remove the least recently used files."""
    for old in sorted(folder.glob("costs-*.json"), key=lambda file: file.stat().st_mtime)[:-_FILES]:
        old.unlink(missing_ok=True)
