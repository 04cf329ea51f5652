"""Measure what passes of a model cost.

The tokens of a measured pass are random. In a mixture of experts each token reads the weights of
its own experts. A pass over one token many times reads only the experts of one token, so the
difference is the time of the other experts. The experts that a pass used are counted. The rounds
count those that texts use (see `ExpertUse`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from time import perf_counter
from typing import NamedTuple

import torch

from outrider.core import tree
from outrider.core.target import ExpertCounter, Target
from outrider.core.types import Batch, Draft, DraftBudget, SequenceState
from outrider.drafting.plan.pass_cost import PassCost, Sample
from outrider.drafting.propose.draft_model.window import find_window
from outrider.models.cache.shared import SharedCache
from outrider.models.heads.targets.base import HeadTarget
from outrider.runtime.ranks import seconds_of_first_rank

_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FIRST = (1, 8, 4, 2, 16, 12, 6, 24, 3, 32)  # tokens of the shapes that are measured first, if time is short
_MAX_PER_SEQUENCE = 16  # wider passes have more sequences
_PADDED = (1, 4, 12, 2, 8, 6, 3, 5, 16, 7, 10, 32)  # tokens per sequence of a padded target, the most important first
PASSES = 6  # passes of each shape that a whole measurement has
_CHECKS = 2  # passes that check a known time
_SHORT = 0.05  # seconds; a shorter pass has a warm-up before it, because another shape ran before
_SLOW = 0.4  # seconds; wider passes are not measured after a pass this long
_SEED = 0  # of the tokens; all measurements of a shape have the same tokens
_PREFILL = 256  # tokens of the measured prefill
_EQUAL = (4, 8, 16)  # equal tokens of the measurements that use the experts of one token
_DEEP = 1024  # cached tokens of the measurements with a filled cache
_DEEPEST = 8192  # the same for long contexts, whose keys and values exceed the caches of the processor


def measure_pass(target: Target) -> PassCost:
    """Measure the cost of passes of an idle model, up to its slots and context. Takes seconds or minutes.

    The contents of the cache are lost.
    """
    times = PassTimes(target)
    times.measure(inf)
    return times.cost()


class Shape(NamedTuple):
    """The input of a measured pass."""

    tokens: int
    seqs: int
    cached: int = 0  # cached tokens per sequence
    equal: bool = False  # equal tokens in place of random ones
    scored: bool = True  # logits of all tokens; False: a prefill, with logits of the last token only


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The shortest pass of a shape: disturbances only add time."""

    sample: Sample
    passes: int  # how many were measured

    @property
    def shape(self) -> Shape:
        each = self.sample
        return Shape(each.tokens, each.seqs, each.cached, each.equal, each.scored)


class PassTimes:
    """The measured passes of a model. Another process can continue a measurement later."""

    def __init__(self, target: Target, known: Iterable[Measured] = ()) -> None:
        """Continue from the `known` measurements of a target."""
        self._target = target
        self._shapes = list(_shapes_by_importance(target))
        self.known = {each.shape: each for each in known if each.shape in self._shapes}

    def cost(self) -> PassCost:
        """Return the cost of passes, from at least one measurement."""
        samples = [each.sample for each in self.known.values()]
        cost = PassCost.fit(samples, padded_slots=padded_slots(self._target))
        window = find_window(self._target)
        return replace(
            cost,
            window=None if window is None else window.mean_length,
            shares_cache=isinstance(self._target.cache, SharedCache),
        )

    @torch.inference_mode()
    def measure(self, seconds: float) -> None:
        """Measure passes for about this time. The contents of the cache are lost.

        The shape with the fewest passes comes first; of several, the most important one. The first two shapes are
        always measured. A shape that would take longer than the rest of the time is left out.
        """
        left = seconds
        while (shape := self._next(left)) is not None:
            left -= self._time(shape)

    @torch.inference_mode()
    def check(self, tokens: int) -> float:
        """Measure a pass over one sequence again, and return the ratio to its known time."""
        known = self.known[Shape(tokens, 1)].sample.seconds
        return min(run_pass(self._target, Shape(tokens, 1)) for _ in range(_CHECKS)) / known

    def check_seconds(self, tokens: int) -> float:
        """Return how long `check` takes."""
        return _CHECKS * self.known[Shape(tokens, 1)].sample.seconds

    def has(self, tokens: int) -> bool:
        """Return whether a pass over this many tokens of one sequence was measured."""
        return Shape(tokens, 1) in self.known

    def _next(self, left: float) -> Shape | None:
        """Return the shape to measure next in `left` seconds, or None."""
        for shape in self._shapes[:2]:
            if shape not in self.known:
                return shape
        cost = self.cost()

        def expected(shape: Shape) -> float:
            seconds = cost(shape.tokens, seqs=shape.seqs, cached=shape.cached)
            return seconds if seconds > _SHORT else 2 * seconds

        slow = min((s.tokens for s, each in self.known.items() if each.sample.seconds > _SLOW), default=inf)
        open_shapes = [
            shape
            for shape in self._shapes
            if self._passes(shape) < PASSES and shape.tokens <= slow and expected(shape) < left
        ]
        return min(open_shapes, key=self._passes, default=None)  # of several, the first one

    def _passes(self, shape: Shape) -> int:
        return self.known[shape].passes if shape in self.known else 0

    def _time(self, shape: Shape) -> float:
        """Measure a shape. Return the seconds that it took."""
        seconds = spent = run_pass(self._target, shape)
        if seconds < _SHORT:
            seconds = run_pass(self._target, shape)
            spent += seconds
        experts = _touched_experts(self._target)
        before = self.known.get(shape)
        best = min(seconds, before.sample.seconds) if before else seconds
        sample = Sample(**shape._asdict(), seconds=best, experts=experts if not shape.cached else 0.0)
        self.known[shape] = Measured(sample=sample, passes=self._passes(shape) + 1)
        return spent


def _shapes_by_importance(target: Target) -> Iterator[Shape]:
    """Yield all shapes of a target, the most important ones first."""
    empty = list(_padded_shapes(target) if padded_slots(target) > 1 else _packed_shapes(target))
    yield from empty[: len(_FIRST)]
    context = context_of(target)
    if isinstance(target, ExpertCounter) and target.touched_experts() is not None:
        for tokens in _EQUAL:
            if tokens < context:
                yield Shape(tokens, 1, equal=True)
    if target.cache.usage().token_bytes:  # otherwise passes do not depend on the cached tokens
        yield from _deep_shapes(target)
    # A draft head computes logits for the last token only. A draft that shares the target's cache has no prefill.
    if not isinstance(target, HeadTarget) and not isinstance(target.cache, SharedCache):
        yield Shape(min(_PREFILL, context - 1), 1, scored=False)
    yield from empty[len(_FIRST) :]


def _deep_shapes(target: Target) -> Iterator[Shape]:
    """Yield the shapes with a filled cache."""
    context = context_of(target)
    several = target.slots if padded_slots(target) > 1 else min(target.slots, 4)
    for tokens, seqs in sorted({(1, 1), (8, 1), (several, several)}):
        cached = min(_DEEP, context - 1 - tokens)
        if cached > 0:
            yield Shape(tokens, seqs, cached)
        if seqs == 1 and context > 2 * _DEEP:
            yield Shape(tokens, seqs, min(_DEEPEST, context - 1 - tokens))


def context_of(target: Target) -> int:
    """Return how many tokens of a sequence a pass can read."""
    window = find_window(target)
    return target.context if window is None else window.size


def padded_slots(target: Target) -> int:
    """Return how many sequences a padded target can hold; 1 for another target.

    A pass of a padded target takes as long as if all sequences had as many tokens as the longest.
    Its time depends on the number of sequences and on the tokens of each.
    """
    return target.slots if getattr(target, "padded", False) else 1


def _packed_shapes(target: Target) -> Iterator[Shape]:
    """Yield the shapes with an empty cache, the most important ones first.

    Few sequences share the tokens, as far as the context allows.
    """
    shapes = {}
    for tokens in _TOKENS:
        seqs = min(target.slots, -(-tokens // _MAX_PER_SEQUENCE) if tokens > _MAX_PER_SEQUENCE else 1)
        if tokens > seqs * (context_of(target) - 1) or tokens // seqs > 4 * _MAX_PER_SEQUENCE:
            break
        shapes[tokens] = Shape(tokens, seqs)
    yield from (shapes.pop(tokens) for tokens in _FIRST if tokens in shapes)
    yield from shapes.values()


def _padded_shapes(target: Target) -> Iterator[Shape]:
    """Yield the shapes of a padded target with an empty cache: passes over one sequence, and over all slots.

    Those over all slots come first. Until there are others, they also tell about fewer sequences.
    """
    counts = [each for each in _PADDED if each < context_of(target)]
    single = [Shape(each, 1) for each in counts]
    full = [Shape(each * target.slots, target.slots) for each in counts if each * target.slots <= _TOKENS[-1]]
    yield from (*single[:1], *full[:3], *single[1:3], *full[3:], *single[3:])


def _touched_experts(target: Target) -> float:
    """Return the distinct experts of a layer that the last pass used; 0: they are not counted."""
    return (isinstance(target, ExpertCounter) and target.touched_experts()) or 0.0


def run_pass(target: Target, shape: Shape) -> float:
    """Run a pass of an idle target, and return its seconds. The contents of the cache are lost."""
    tokens, seqs = shape.tokens, shape.seqs
    shares = [tokens // seqs + (b < tokens % seqs) for b in range(seqs)]
    if isinstance(target, HeadTarget):
        return _run_head(target, shares, shape.cached)
    ids = _random_ids(target, shares)
    if shape.equal:
        ids = tuple((row[0],) * len(row) for row in ids)
    num_fed = 1 if shape.scored else tokens  # the other tokens are draft tokens
    batch = Batch(
        seqs=tuple(map(partial(_sequence, target), range(seqs))),
        start=(shape.cached,) * seqs,
        feed=tuple(row[:num_fed] for row in ids),
        budget=DraftBudget(tuple(max(share - num_fed, 0) for share in shares)),
    )
    return _timed(target, batch, _draft([row[num_fed:] for row in ids], target.device))


def _run_head(target: HeadTarget, shares: list[int], cached: int) -> float:
    """Return the seconds of a pass of a draft head, which needs hidden states of the committed tokens."""
    batch = Batch(
        seqs=tuple(map(partial(_sequence, target), range(len(shares)))),
        start=(cached + 1,) * len(shares),  # the first token has no hidden state before it
        feed=_random_ids(target, shares),
        budget=DraftBudget((1,) * len(shares)),
    )
    for slot, share in enumerate(shares):
        target.hidden_states.set_zeros(slot, cached, share + 1)
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
    ids = (rng.randrange(target.vocab) for _ in range(sum(shares)))
    return tuple(tuple(islice(ids, share)) for share in shares)


def _draft(chains: list[tuple[int, ...]], device: torch.device) -> Draft:
    """Return these chains of draft tokens, one for each sequence."""
    widths = tuple(map(len, chains))
    if not max(widths):
        return tree.empty(len(chains), device)
    return tree.chain(tree.upload_rows(chains, max(widths), device), widths)


def _sequence(target: Target, slot: int) -> SequenceState:
    """Admit a sequence of one token."""
    target.cache.admit(slot, (0,))
    return SequenceState.of((0,), slot)
