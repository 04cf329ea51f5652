"""Combinations of proposers: `first`, `switch` and `merge`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.types import Batch, Draft, DraftKind, Draw, Needs, Packed, Request, Round
from outrider.errors import OutriderError
from outrider.propose.acceptance import AcceptanceEstimator
from outrider.propose.base import Proposer, ProposerSetup
from outrider.propose.tree_builder import TreeBuilder, depths
from outrider.verify.verdict import normalize

_LEVELS = 8  # levels of the acceptance probability that a part states
_HOPE = 0.6  # prior acceptance if a part states none


def check_parts(count: int, *, switches: bool) -> None:
    """Check the number of parts, and that none of them is a switch."""
    if count < 2:
        raise OutriderError("one proposer alone cannot be combined; name two or more, as in merge(ngram,recycle)")
    if switches:
        raise OutriderError("the planner switches between whole proposers; make switch(...) the outermost one")


class Combination:
    """Base of combinations. All parts follow all requests."""

    def __init__(self, setup: ProposerSetup, parts: Sequence[Proposer]) -> None:
        """Combine `parts`. Earlier parts have precedence."""
        check_parts(len(parts), switches=any(part.needs.alternatives > 1 for part in parts))
        self.parts = tuple(parts)
        layers = sorted({layer for part in parts for layer in part.needs.layers})
        self.needs = Needs(layers=tuple(layers))
        self._setup = setup
        *self._places, self.voices = accumulate(
            map(noise_streams, self.parts), initial=0
        )  # first bit of each part; number of all bits

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
        """Return the bits in `Draft.source` for the draft tokens of a part."""
        place = self._places[part]
        if draft.source is None:
            return tuple((1 << place,) * width for width in draft.width)
        return tuple(tuple(bits << place for bits in row) for row in draft.source)


def noise_streams(proposer: Proposer) -> int:
    """Return the number of proposers. Each has a bit in `Draft.source`."""
    return int(getattr(proposer, "voices", 1))


class First(Combination):
    """Uses the draft of the first part that has one, for each sequence."""

    def propose(self, batch: Batch) -> Draft:
        left, drafts = batch, []
        for i, part in enumerate(self.parts):
            draft = part.propose(left)
            drafts.append(replace(draft, source=self._by(i, draft)))
            spent = zip(left.draft_budget, drafts[-1].width, strict=True)
            left = replace(left, draft_budget=tuple(0 if width else budget for budget, width in spent))
        return reduce(_beside, drafts)


class Switch(Combination):
    """Uses one part at a time. The planner chooses it, and a request can name another one."""

    def __init__(self, setup: ProposerSetup, parts: Sequence[Proposer]) -> None:
        super().__init__(setup, parts)
        self.needs = replace(self.needs, alternatives=len(parts))

    def propose(self, batch: Batch) -> Draft:
        arms = batch.alternatives
        drafts = [part.propose(_only(batch, arms, arm)) for arm, part in enumerate(self.parts)]
        told = [
            replace(draft, source=self._by(arm, draft))
            for arm, draft in enumerate(drafts)
            if arm in {*arms, batch.alternative}
        ]
        return reduce(_beside, told)


def _only(batch: Batch, arms: Sequence[int], arm: int) -> Batch:
    """Return the batch with draft budgets for the sequences of one alternative only."""
    budget = tuple(most if own == arm else 0 for most, own in zip(batch.draft_budget, arms, strict=True))
    return batch if budget == batch.draft_budget else replace(batch, draft_budget=budget)


class Merge(Combination):
    """Merges the drafts of all parts into one tree and keeps the likeliest nodes within the budget.

    Sampled draft tokens are all kept, because dropping one for its value would bias the output. The parts then share
    the budget equally, and sampled siblings come before one-hot ones, which may depend on them. Each part samples with
    its own noise stream, because verification of siblings assumes independent samples.
    """

    def __init__(self, setup: ProposerSetup, parts: Sequence[Proposer]) -> None:
        super().__init__(setup, parts)
        self._chances = AcceptanceEstimator()  # by the parts that drafted a token, and the probability that they stated
        self._open: list[tuple[int, TreeBuilder, list[Hashable]]] = []  # index in the batch, tree, kinds

    def propose(self, batch: Batch) -> Draft:
        self._open = []
        share = tuple(
            self._share(row.request, budget) for row, budget in zip(batch.seqs, batch.draft_budget, strict=True)
        )
        drafts = [
            part.propose(replace(batch, draft_budget=share, noise_stream=batch.noise_stream + place))
            for part, place in zip(self.parts, self._places, strict=True)
        ]
        read = [self._read(part, draft) for part, draft in enumerate(drafts)]
        unions = [
            self._union(b, [each[b] for each in read]).best(batch.draft_budget[b]) for b in range(len(batch.seqs))
        ]
        return _draft(unions, drafts, self._setup.device)

    def commit(self, round: Round) -> None:
        for b, sketch, kinds in self._open:
            self._chances.learn(sketch, kinds, round.emitted[b])
        super().commit(round)

    def _union(self, b: int, parts: Sequence[_Part]) -> _Union:
        """Return the merged tree of a sequence, with estimated acceptance."""
        union = _Union.of(parts)
        if any(union.law):
            return union
        said, kinds = union.sketch.accept_prob, list[Hashable]()
        chance: list[float] = []
        for node, above in enumerate(union.sketch.parent):
            alone = min(said[node] / said[above], 1.0) if above >= 0 and said[above] else said[node]
            kinds.append((union.voices[node], round(alone * _LEVELS)))
            chance.append((chance[above] if above >= 0 else 1.0) * self._chances.of(kinds[-1], alone))
        sketch = TreeBuilder(union.sketch.tokens, union.sketch.parent, chance)
        self._open.append((b, sketch, kinds))
        return _Union(sketch, union.law, union.source, union.voices)

    def _share(self, request: Request, budget: int) -> int:
        drawn = request.params.temperature > 0 and self._setup.draw is not Draw.ARGMAX
        return -(-budget // len(self.parts)) if drawn else budget

    def _read(self, part: int, draft: Draft) -> list[_Part]:
        """Copy a draft to the host: trees, kinds and sources by sequence."""
        out = list[_Part]()
        host = (draft.tokens.tolist(), draft.parent.tolist(), draft.kind.tolist(), self._by(part, draft))
        for b, (count, tokens, parent, law, by) in enumerate(zip(draft.count.tolist(), *host, strict=True)):
            tokens, parent = tokens[:count], parent[:count]
            if draft.accept_prob is not None:
                chance = list(draft.accept_prob[b][:count])
            else:
                kinds: list[Hashable] = [(part, depth) for depth in depths(parent)]
                chance = []
                for kind, above in zip(kinds, parent, strict=True):
                    chance.append(self._chances.of(kind, _HOPE) * (chance[above] if above >= 0 else 1.0))
                self._open.append((b, TreeBuilder(tokens, parent, chance), kinds))
            out.append((TreeBuilder(tokens, parent, chance), law, by))
        return out


_Part = tuple[TreeBuilder, list[int], Sequence[int]]  # tree, kinds and sources of one sequence


@dataclass(frozen=True, slots=True)
class _Union:
    """The merged tree of a sequence, with the origin of each node."""

    sketch: TreeBuilder
    law: list[int]
    source: list[tuple[int, int]]  # part, node
    voices: list[int]  # bits of `Draft.source`

    @classmethod
    def of(cls, parts: Sequence[_Part]) -> _Union:
        union = cls(TreeBuilder(), [], [], [])
        drawn_first = sorted(range(len(parts)), key=lambda part: not any(parts[part][1]))
        for part in drawn_first:
            union._add(part, *parts[part])
        return union

    def _add(self, part: int, sketch: TreeBuilder, law: list[int], by: Sequence[int]) -> None:
        home: list[int] = []  # nodes of the part in the merged tree
        known = {pair: node for node, pair in enumerate(zip(self.sketch.parent, self.sketch.tokens, strict=True))}
        for node, (token, parent, chance) in enumerate(
            zip(sketch.tokens, sketch.parent, sketch.accept_prob, strict=True)
        ):
            above = home[parent] if parent >= 0 else -1
            twin = None if law[node] else known.get((above, token))
            if twin is None:
                twin = known[above, token] = self.sketch.add(token, above, chance)
                self.law.append(law[node])
                self.source.append((part, node))
                self.voices.append(0)
            elif not self.law[twin]:  # the estimate for a sampled token must not depend on its value
                self.sketch.accept_prob[twin] = max(self.sketch.accept_prob[twin], chance)
            self.voices[twin] |= by[node]
            home.append(twin)

    def without_replacement(self) -> list[tuple[int, int]]:
        """Return the origins of nodes that were sampled in this way."""
        pairs = zip(self.source, self.law, strict=True)
        return [source for source, law in pairs if law == DraftKind.WITHOUT_REPLACEMENT]

    def drawn_before(self, at: int) -> list[int]:
        """Return the earlier siblings that the same part has sampled without replacement."""
        part, own = self.source[at]
        nodes = zip(self.source, self.law, self.sketch.parent, self.sketch.tokens, strict=True)
        return [
            token
            for (whose, node), law, parent, token in nodes
            if whose == part
            and node < own
            and law == DraftKind.WITHOUT_REPLACEMENT
            and parent == self.sketch.parent[at]
        ]

    def best(self, budget: int) -> _Union:
        """Return the sampled nodes and then the likeliest, parents before children."""
        old = self.sketch
        order = sorted(
            range(len(old.tokens)), key=lambda node: (self.law[node] == DraftKind.ONE_HOT, -old.accept_prob[node])
        )
        order = order[:budget]
        home = {-1: -1} | {node: at for at, node in enumerate(order)}
        chance, least = [], 1.0
        for node in order:
            least = min(least, old.accept_prob[node])
            chance.append(least)
        sketch = TreeBuilder([old.tokens[n] for n in order], [home[old.parent[n]] for n in order], chance)
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
        kind=padded(laws, DraftKind.ONE_HOT),
        q=q,
        width=width,
        depth=tuple(max(depths(union.sketch.parent), default=0) for union in unions),
        chain=False,
        accept_prob=None if drawn else tuple(tuple(union.sketch.accept_prob) for union in unions),
        source=tuple(tuple(union.voices) for union in unions),
    )


def _laws(unions: Sequence[_Union], drafts: Sequence[Draft], size: int) -> tuple[Packed, list[list[int]]]:
    """Return the distribution index [B, N] of each sampled node, and its `DraftKind`.

    WITHOUT_REPLACEMENT excludes all earlier siblings of that kind, of any part. If several parts sample without
    replacement, each node therefore gets the distribution that remained for its own part.
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
            if several and law == DraftKind.WITHOUT_REPLACEMENT:
                q = both[out[b][at]]
                rest = q.index_fill(0, tree.upload(union.drawn_before(at), q.device), 0.0)
                out[b][at], laws[b][at] = len(both) + len(left), DraftKind.SAMPLED
                left.append(normalize(rest, q))
    values = torch.cat([both, torch.stack(left)]) if left else both
    return Packed(values=values, at=tree.upload(out, both.device)), laws


def _together(drafts: Sequence[Draft]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Join the distributions of all drafts to [T, V], with the indices [B, N] of each draft."""
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
    """Return for each sequence the first draft, or the second one if the first is empty."""
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
    said, told = (
        one.accept_prob is not None and two.accept_prob is not None,
        one.source is not None and two.source is not None,
    )
    return Draft(
        tokens=torch.where(pick, a.tokens, b.tokens),
        parent=torch.where(pick, a.parent, b.parent),
        count=torch.where(first, a.count, b.count),
        kind=torch.where(pick, a.kind, b.kind),
        q=q,
        width=tuple(x or y for x, y in zip(one.width, two.width, strict=True)),
        depth=tuple(x or y for x, y in zip(one.depth, two.depth, strict=True)),
        chain=one.chain and two.chain,
        accept_prob=tuple(x or y for x, y in zip(one.accept_prob or (), two.accept_prob or (), strict=True))
        if said
        else None,
        source=tuple(x or y for x, y in zip(one.source or (), two.source or (), strict=True)) if told else None,
    )


def _widened(draft: Draft, size: int) -> Draft:
    """Pad a draft to `size` nodes. The padding of a chain continues the chain."""
    more = size - draft.size
    if not more:
        return draft

    def pad(values: torch.Tensor, filler: int = 0) -> torch.Tensor:
        return functional.pad(values, (0, more), value=filler)

    parent = torch.cat(
        [draft.parent, torch.arange(draft.size - 1, size - 1).to(draft.parent).expand(len(draft.parent), more)], 1
    )
    q = None if draft.q is None else replace(draft.q, at=pad(draft.q.at, -1))
    return replace(draft, tokens=pad(draft.tokens), parent=parent, kind=pad(draft.kind), q=q)
