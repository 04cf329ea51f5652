"""Proposers made of proposers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.types import Batch, Draft, Draw, Law, Needs, Packed, Request, Round
from outrider.errors import OutriderError
from outrider.propose.acceptance import Chances
from outrider.propose.base import Proposer, Setup
from outrider.propose.tree_builder import Sketch, depths
from outrider.verify.verdict import normalised

_LEVELS = 8  # of a chance that a part gives a guess
_HOPE = 0.6  # that a guess is kept of which its proposer says nothing


def check_parts(count: int, *, switches: bool) -> None:
    """See that so many parts can be combined, and that none `switches` between its own."""
    if count < 2:
        raise OutriderError("one proposer alone cannot be combined; name two or more, as in merge(ngram,recycle)")
    if switches:
        raise OutriderError("the planner switches between whole proposers; make switch(...) the outermost one")


class Combination:
    """What all combinations share: every part lives through everything."""

    def __init__(self, setup: Setup, parts: Sequence[Proposer]) -> None:
        """Combine `parts`, the first of which has precedence where it matters."""
        check_parts(len(parts), switches=any(part.needs.arms > 1 for part in parts))
        self.parts = tuple(parts)
        layers = sorted({layer for part in parts for layer in part.needs.layers})
        self.needs = Needs(layers=tuple(layers))
        self._setup = setup
        *self._places, self.voices = accumulate(map(voices, self.parts), initial=0)  # of each part's first one; of all

    def admit(self, slot: int, request: Request) -> None:
        for part in self.parts:
            part.admit(slot, request)

    def commit(self, round: Round) -> None:
        for part in self.parts:
            part.commit(round)

    def release(self, slot: int) -> None:
        for part in self.parts:
            part.release(slot)

    def _by(self, part: int, draft: Draft) -> tuple[tuple[int, ...], ...]:
        """Who made each guess of a part: its bits in a `Draft.by` of this combination."""
        place = self._places[part]
        if draft.by is None:
            return tuple((1 << place,) * width for width in draft.width)
        return tuple(tuple(bits << place for bits in row) for row in draft.by)


def voices(proposer: Proposer) -> int:
    """How many guess in it, each of whom has a bit in `Draft.by`; combinations and what stands around them say so."""
    return int(getattr(proposer, "voices", 1))


class First(Combination):
    """The guesses of the first part that has any, row by row."""

    def propose(self, batch: Batch) -> Draft:
        left, drafts = batch, []
        for i, part in enumerate(self.parts):
            draft = part.propose(left)
            drafts.append(replace(draft, by=self._by(i, draft)))
            spent = zip(left.budget, drafts[-1].width, strict=True)
            left = replace(left, budget=tuple(0 if width else budget for budget, width in spent))
        return reduce(_beside, drafts)


class Switch(Combination):
    """One part at a time, for all rows but those that asked for another one; the planner says which."""

    def __init__(self, setup: Setup, parts: Sequence[Proposer]) -> None:
        super().__init__(setup, parts)
        self.needs = replace(self.needs, arms=len(parts))

    def propose(self, batch: Batch) -> Draft:
        arms = batch.arms
        drafts = [part.propose(_only(batch, arms, arm)) for arm, part in enumerate(self.parts)]
        told = [
            replace(draft, by=self._by(arm, draft)) for arm, draft in enumerate(drafts) if arm in {*arms, batch.arm}
        ]
        return reduce(_beside, told)


def _only(batch: Batch, arms: Sequence[int], arm: int) -> Batch:
    """The batch with guesses for the rows of one arm alone."""
    budget = tuple(most if own == arm else 0 for most, own in zip(batch.budget, arms, strict=True))
    return batch if budget == batch.budget else replace(batch, budget=budget)


class Merge(Combination):
    """All parts' guesses in one tree, what they share once, the likeliest within the budget.

    Where guesses are drawn, every drawn one is kept: to leave one out because of what it is would bias the output. The
    parts then share the budget equally, and drawn siblings stand before picked ones, which may depend on them. Each
    part draws with noise of its own: rules for siblings take what one part drew to say nothing of what another did.
    """

    def __init__(self, setup: Setup, parts: Sequence[Proposer]) -> None:
        super().__init__(setup, parts)
        self._chances = Chances()  # of guesses by who made them, together or alone, and what they said
        self._open: list[tuple[int, Sketch, list[Hashable]]] = []  # row of the batch, guesses, kinds

    def propose(self, batch: Batch) -> Draft:
        self._open = []
        share = tuple(self._share(row.request, budget) for row, budget in zip(batch.rows, batch.budget, strict=True))
        drafts = [
            part.propose(replace(batch, budget=share, voice=batch.voice + place))
            for part, place in zip(self.parts, self._places, strict=True)
        ]
        read = [self._read(part, draft) for part, draft in enumerate(drafts)]
        unions = [self._union(b, [each[b] for each in read]).best(batch.budget[b]) for b in range(len(batch.rows))]
        return _draft(unions, drafts, self._setup.device)

    def commit(self, round: Round) -> None:
        for b, sketch, kinds in self._open:
            self._chances.learn(sketch, kinds, round.emitted[b])
        super().commit(round)

    def _union(self, b: int, parts: Sequence[_Part]) -> _Union:
        """One row's merged tree, with the chances that guesses of such company have had."""
        union = _Union.of(parts)
        if any(union.law):
            return union
        said, kinds = union.sketch.chance, list[Hashable]()
        chance: list[float] = []
        for node, above in enumerate(union.sketch.parent):
            alone = min(said[node] / said[above], 1.0) if above >= 0 and said[above] else said[node]
            kinds.append((union.voices[node], round(alone * _LEVELS)))
            chance.append((chance[above] if above >= 0 else 1.0) * self._chances.of(kinds[-1], alone))
        sketch = Sketch(union.sketch.tokens, union.sketch.parent, chance)
        self._open.append((b, sketch, kinds))
        return _Union(sketch, union.law, union.source, union.voices)

    def _share(self, request: Request, budget: int) -> int:
        drawn = request.params.temperature > 0 and self._setup.draw is not Draw.ARGMAX
        return -(-budget // len(self.parts)) if drawn else budget

    def _read(self, part: int, draft: Draft) -> list[_Part]:
        """The draft on the host: each row's guesses, their laws and who made them."""
        out = list[_Part]()
        host = (draft.tokens.tolist(), draft.parent.tolist(), draft.law.tolist(), self._by(part, draft))
        for b, (count, tokens, parent, law, by) in enumerate(zip(draft.count.tolist(), *host, strict=True)):
            tokens, parent = tokens[:count], parent[:count]
            if draft.chance is not None:
                chance = list(draft.chance[b][:count])
            else:
                kinds: list[Hashable] = [(part, depth) for depth in depths(parent)]
                chance = []
                for kind, above in zip(kinds, parent, strict=True):
                    chance.append(self._chances.of(kind, _HOPE) * (chance[above] if above >= 0 else 1.0))
                self._open.append((b, Sketch(tokens, parent, chance), kinds))
            out.append((Sketch(tokens, parent, chance), law, by))
        return out


_Part = tuple[Sketch, list[int], Sequence[int]]  # one row's guesses, their laws, who made them


@dataclass(frozen=True, slots=True)
class _Union:
    """One row's merged tree, and where each node came from."""

    sketch: Sketch
    law: list[int]
    source: list[tuple[int, int]]  # part, node
    voices: list[int]  # who made the guess, as in `Draft.by`

    @classmethod
    def of(cls, parts: Sequence[_Part]) -> _Union:
        union = cls(Sketch(), [], [], [])
        drawn_first = sorted(range(len(parts)), key=lambda part: not any(parts[part][1]))
        for part in drawn_first:
            union._add(part, *parts[part])
        return union

    def _add(self, part: int, sketch: Sketch, law: list[int], by: Sequence[int]) -> None:
        home: list[int] = []  # of the part's nodes in here
        known = {pair: node for node, pair in enumerate(zip(self.sketch.parent, self.sketch.tokens, strict=True))}
        for node, (token, parent, chance) in enumerate(zip(sketch.tokens, sketch.parent, sketch.chance, strict=True)):
            above = home[parent] if parent >= 0 else -1
            twin = None if law[node] else known.get((above, token))
            if twin is None:
                twin = known[above, token] = self.sketch.add(token, above, chance)
                self.law.append(law[node])
                self.source.append((part, node))
                self.voices.append(0)
            elif not self.law[twin]:  # of a drawn one, the chance may not depend on what it is
                self.sketch.chance[twin] = max(self.sketch.chance[twin], chance)
            self.voices[twin] |= by[node]
            home.append(twin)

    def without_replacement(self) -> list[tuple[int, int]]:
        """The sources of nodes that were drawn so."""
        pairs = zip(self.source, self.law, strict=True)
        return [source for source, law in pairs if law == Law.WITHOUT_REPLACEMENT]

    def drawn_before(self, at: int) -> list[int]:
        """Tokens that a node's own part had drawn without replacement from the same law before it."""
        part, own = self.source[at]
        nodes = zip(self.source, self.law, self.sketch.parent, self.sketch.tokens, strict=True)
        return [
            token
            for (whose, node), law, parent, token in nodes
            if whose == part and node < own and law == Law.WITHOUT_REPLACEMENT and parent == self.sketch.parent[at]
        ]

    def best(self, budget: int) -> _Union:
        """The drawn nodes and then the likeliest, parents before children."""
        old = self.sketch
        order = sorted(range(len(old.tokens)), key=lambda node: (self.law[node] == Law.ONE_HOT, -old.chance[node]))
        order = order[:budget]
        home = {-1: -1} | {node: at for at, node in enumerate(order)}
        chance, least = [], 1.0
        for node in order:
            least = min(least, old.chance[node])
            chance.append(least)
        sketch = Sketch([old.tokens[n] for n in order], [home[old.parent[n]] for n in order], chance)
        laws, source = [self.law[n] for n in order], [self.source[n] for n in order]
        return _Union(sketch, laws, source, [self.voices[n] for n in order])


def _draft(unions: Sequence[_Union], drafts: Sequence[Draft], device: torch.device) -> Draft:
    width = tuple(len(union.law) for union in unions)
    size = max(width)
    if not size:
        return tree.empty(len(unions), device)

    def padded(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
        return tree.upload([[*row, *[filler] * (size - len(row))] for row in rows], device)

    q, laws = None, [union.law for union in unions]
    drawn = any(map(any, laws))
    if drawn:
        q, laws = _laws(unions, drafts, size)
    return Draft(
        tokens=padded([union.sketch.tokens for union in unions], 0),
        parent=padded([union.sketch.parent for union in unions], -1),
        count=tree.upload(width, device),
        law=padded(laws, Law.ONE_HOT),
        q=q,
        width=width,
        depth=tuple(max(depths(union.sketch.parent), default=0) for union in unions),
        chain=False,
        chance=None if drawn else tuple(tuple(union.sketch.chance) for union in unions),
        by=tuple(tuple(union.voices) for union in unions),
    )


def _laws(unions: Sequence[_Union], drafts: Sequence[Draft], size: int) -> tuple[Packed, list[list[int]]]:
    """[B, N]: what each drawn node was drawn from, and by which `Law`.

    Without replacement means without any sibling that was drawn so before, whoever drew it. Where several parts draw
    so, each node is therefore given the law that was left when its own part drew it.
    """
    both, places = _together(drafts)
    known = [at.tolist() for at in places]
    out, laws = [[-1] * size for _ in unions], [list(union.law) for union in unions]
    left = list[torch.Tensor]()
    for b, union in enumerate(unions):
        several = len({part for part, _ in union.without_replacement()}) > 1
        for at, ((part, node), law) in enumerate(zip(union.source, union.law, strict=True)):
            if law:
                out[b][at] = known[part][b][node]
            if several and law == Law.WITHOUT_REPLACEMENT:
                q = both[out[b][at]]
                rest = q.index_fill(0, tree.upload(union.drawn_before(at), q.device), 0.0)
                out[b][at], laws[b][at] = len(both) + len(left), Law.SAMPLED
                left.append(normalised(rest, q))
    values = torch.cat([both, torch.stack(left)]) if left else both
    return Packed(values=values, at=tree.upload(out, both.device)), laws


def _together(drafts: Sequence[Draft]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What all guesses were drawn from, [T, V], and where in it that of each draft's guesses lies, [B, N]."""
    laws, places, count = [], [], 0
    for draft in drafts:
        at = torch.full_like(draft.tokens, -1)
        if draft.q is not None:
            at = torch.where(draft.q.at < 0, -1, draft.q.at + count)
            laws.append(draft.q.values)
            count += len(draft.q.values)
        places.append(at)
    return laws[0] if len(laws) == 1 else torch.cat(laws), places


def _beside(one: Draft, two: Draft) -> Draft:
    """Row by row the first draft's guesses, or where it has none the second's."""
    if not two.size:
        return one
    if not one.size:
        return two
    size, device = max(one.size, two.size), one.tokens.device
    a, b = _widened(one, size), _widened(two, size)
    first = tree.upload([bool(width) for width in one.width], device, torch.bool)
    pick = first[:, None]
    q = None
    if a.q is not None or b.q is not None:
        both, (ours, theirs) = _together((a, b))
        q = Packed(values=both, at=torch.where(pick, ours, theirs))
    said, told = one.chance is not None and two.chance is not None, one.by is not None and two.by is not None
    return Draft(
        tokens=torch.where(pick, a.tokens, b.tokens),
        parent=torch.where(pick, a.parent, b.parent),
        count=torch.where(first, a.count, b.count),
        law=torch.where(pick, a.law, b.law),
        q=q,
        width=tuple(x or y for x, y in zip(one.width, two.width, strict=True)),
        depth=tuple(x or y for x, y in zip(one.depth, two.depth, strict=True)),
        chain=one.chain and two.chain,
        chance=tuple(x or y for x, y in zip(one.chance or (), two.chance or (), strict=True)) if said else None,
        by=tuple(x or y for x, y in zip(one.by or (), two.by or (), strict=True)) if told else None,
    )


def _widened(draft: Draft, size: int) -> Draft:
    """Padded to `size` nodes; a chain's padding continues the chain."""
    more = size - draft.size
    if not more:
        return draft

    def pad(values: torch.Tensor, filler: int = 0) -> torch.Tensor:
        return functional.pad(values, (0, more), value=filler)

    parent = torch.cat(
        [draft.parent, torch.arange(draft.size - 1, size - 1).to(draft.parent).expand(len(draft.parent), more)], 1
    )
    q = None if draft.q is None else replace(draft.q, at=pad(draft.q.at, -1))
    return replace(draft, tokens=pad(draft.tokens), parent=parent, law=pad(draft.law), q=q)
