"""A small model of the same vocabulary guesses a tree, level by level.

Where guesses are drawn, siblings are drawn without replacement, as many as Sequoia's objective asks for (Chen et al.
2024): the tree that promises to keep most. It is planned anew at each level, from the draft's laws at hand, from how
guesses of their kind have fared, and from what lies below a node on average. Whether a node is drawn depends on what
was drawn before, never on its own token or on what comes after it, and so the output stays exact. Where guesses are
picked, the likeliest paths are taken (Li et al. 2024, EAGLE-2), and the same objective says which are read on.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.noise import inverse_cdf
from outrider.core.types import Batch, Draft, DraftKind, Draw, Packed, Round, SequenceState, StopRule
from outrider.models.base import Target
from outrider.propose.acceptance import AcceptanceEstimator
from outrider.propose.base import ProposerSetup
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.draft_model.tree_shapes import bar, best_first
from outrider.propose.tree_builder import TreeBuilder, picked
from outrider.verify.sampling import SamplingTensors, apply_sampling

_BREADTH = 8  # children of a node at most
_READ = 8  # nodes that the draft may read for each guess that is wanted, gaps included
_LEAST_MASS = 1e-4  # of a law's mass: what is drawn from less is drawn from rounding errors
_LEVELS = 5  # of odds above even, and as many below
_RANKS = 4  # told apart; from the last on they fare alike
_AHEAD = 32  # nodes below a node that are planned with
_USUAL = (0.55, 0.15, 0.06, 0.03)  # first estimates of how often a child is kept, by rank
_DEEP = 2  # from so many guesses above on they fare alike: what follows a kept guess is kept more often than the first
_TRUST, _MEMORY = 30.0, 0.998  # a plan takes the best of many estimates, and so must not believe in lucky ones
_HOPE = 0.8  # of what a first child's chance leaves, the share that a second one is thought to take
_ROOT, _GAP = -1, -2  # in place of nodes


class _AcceptanceByRank:
    """How often guesses of a kind are kept; each guess is of several kinds, some coarser than others."""

    def __init__(self) -> None:
        self._chances = AcceptanceEstimator(trust=_TRUST, memory=_MEMORY)
        self._ahead: dict[bool, tuple[float, ...]] = {}  # until more is learned

    def of(self, kind: Hashable, expected: float) -> float:
        """That a guess of this kind is kept if its parent is."""
        return self._chances.of(kind, expected)

    def usual(self, rank: int, *, drawn: bool) -> float:
        """The same of any guess of this rank that does not stand first."""
        return self.of((drawn, rank, _DEEP), _USUAL[rank])

    def at_law(self, rank: int, depth: int, peak: int) -> float:
        """The same of one drawn so deep from a law whose likeliest token is so likely."""
        if rank > 1:
            expected = self.at_law(rank - 1, depth, peak) / 2
        else:
            first = 0.4 + 0.6 / (1 + math.exp(-peak))
            expected = _HOPE * (1 - first) if rank else first
        return self.of(("law", rank, depth, peak // 2 if rank else peak), expected)

    def ahead(self, *, drawn: bool) -> tuple[float, ...]:
        """Chances of what lies below a node that is kept, on average, the likeliest first."""
        if drawn not in self._ahead:
            usual = sorted((self.usual(rank, drawn=drawn) for rank in range(_RANKS)), reverse=True)
            self._ahead[drawn] = best_first(lambda _: usual, _AHEAD).accept_prob
        return self._ahead[drawn]

    def learn(self, growth: _TreeGrowth, emitted: Sequence[int]) -> None:
        for kinds in zip(*growth.kinds, strict=True):
            self._chances.learn(growth.sketch, kinds, emitted)
        self._ahead = {}


@dataclass(slots=True, kw_only=True, eq=False)
class _TreeGrowth:
    """One row's tree while it grows."""

    row: SequenceState
    budget: int
    room: int  # guesses that the draft's cache can take
    drawn: bool
    sketch: TreeBuilder = field(
        default_factory=TreeBuilder
    )  # with the chances that nodes had before their tokens were known
    hope: list[float] = field(default_factory=list)  # [N] the chances that they have now
    kinds: list[tuple[Hashable, ...]] = field(default_factory=list)  # [N]
    read: list[int] = field(default_factory=list)  # nodes that the draft has read, and gaps where other rows had more
    place: dict[int, int] = field(default_factory=lambda: {_ROOT: -1})  # where in `read` a node stands
    level: list[int] = field(default_factory=lambda: [_ROOT])  # the nodes read last

    def add(self, token: int, parent: int, chances: tuple[float, float], kinds: tuple[Hashable, ...]) -> None:
        """Append a guess, with its chances before and after its token was known."""
        above = self.sketch.accept_prob[parent] if parent >= 0 else 1.0
        self.sketch.add(token, parent, min(chances[0], above))
        self.hope.append(chances[1])
        self.kinds.append(kinds)

    def hope_of(self, node: int) -> float:
        return self.hope[node] if node >= 0 else 1.0

    def depth_of(self, node: int) -> int:
        """Guesses on the path to a node, as far as they are counted."""
        depth = 0
        while node >= 0 and depth < _DEEP:
            node, depth = self.sketch.parent[node], depth + 1
        return depth

    def left(self) -> int:
        """Guesses that may still be drawn."""
        return self.budget - len(self.hope)

    def unread(self) -> list[int]:
        """Nodes that the draft could go on from, the likeliest first."""
        ends, tokens = self.row.request.end_ids, self.sketch.tokens
        nodes = [node for node, token in enumerate(tokens) if node not in self.place and token not in ends]
        return sorted(nodes, key=lambda node: -self.hope[node])

    def go_on(self, level: Sequence[int], place: int) -> None:
        """Let the draft read these nodes next, from this place on."""
        self.level = list(level)
        self.read += [*repeat(_GAP, place - len(self.read)), *level]
        self.place |= {node: place + i for i, node in enumerate(level)}

    def reading(self) -> TreeBuilder:
        """What the draft has read, and is to read now."""
        out = TreeBuilder()
        for node in self.read:
            gap = node == _GAP
            out.add(0 if gap else self.sketch.tokens[node], -1 if gap else self.place[self.sketch.parent[node]], 0.0)
        return out

    def best(self) -> tuple[TreeBuilder, list[int]]:
        """The likeliest guesses within the budget, and in whose places their parents were read."""
        chance, best, where = self.sketch.accept_prob, TreeBuilder(), {_ROOT: -1}
        nodes = sorted(range(len(chance)), key=lambda node: (-chance[node], node))[: self.budget]
        for node in nodes:
            where[node] = best.add(self.sketch.tokens[node], where[self.sketch.parent[node]], chance[node])
        return best, [self.place[self.sketch.parent[node]] for node in nodes]


class TreeProposer(DraftModelProposer):
    """Runs a draft model over its own cache, and lets it guess several ways to go on.

    Guesses are drawn from the draft's law under the request's own sampling parameters. Where they are picked it is by
    that law too, or for a greedy row by what it would be at temperature 1. Each level waits for the host.
    """

    def __init__(self, setup: ProposerSetup, model: Target, *, reach: int | None = None) -> None:
        """Guess with `model`, in no more than `reach` levels."""
        super().__init__(setup, model)
        self._reach = reach
        self._odds = _AcceptanceByRank()
        self._soft: SamplingTensors | None = None  # the same rows' parameters, none of them greedy
        self._growths: list[_TreeGrowth] = []  # of the rows that the draft runs
        self._read = tree.empty(1, setup.device)  # what it has read beyond their texts

    def commit(self, round: Round) -> None:
        if self._batch is None:
            return
        emitted = {row.slot: tokens for row, tokens in zip(round.batch.seqs, round.emitted, strict=True)}
        paths = []
        for growth in self._growths:
            tokens = emitted[growth.row.slot]
            path = growth.sketch.path(tokens[:-1])  # the last token is to be fed, even if it was read as a guess
            paths.append(tuple(growth.place[node] for node in path if node in growth.place))
            # Sampled tokens that were cut from the draft were not verified, so they show nothing.
            if round.draft.size or not growth.drawn:
                self._odds.learn(growth, tokens)
        self._model.cache.commit(replace(round, batch=self._batch, draft=self._read, path=tuple(paths)))

    def _guess(self, batch: Batch, where: Sequence[int], rows: int) -> Draft:
        self._growths = [
            _TreeGrowth(
                row=row,
                budget=budget,
                room=min(self._model.context - len(row.token_ids), self._reads(budget)),
                drawn=self._setup.draw is Draw.SAMPLE and row.request.params.temperature > 0,
            )
            for row, budget in zip(batch.seqs, batch.draft_budget, strict=True)
        ]
        return self._proposal(self._grow_trees(batch), where, rows)

    def _reads(self, budget: int) -> int:
        return _READ * budget

    def _grow_trees(self, batch: Batch) -> torch.Tensor:
        """Grow all rows' trees; the draft's laws [B, 1 + F, V] after the text and after what it has read."""
        knobs = self._knobs_of(batch)
        assert self._noise is not None
        never = torch.zeros_like(knobs.greedy)
        self._soft = replace(knobs, greedy=never, all_greedy=False, sampled=(True,) * len(batch.seqs))
        noise = self._noise.at(tree.upload([len(row.token_ids) for row in batch.seqs], self._setup.device))
        draws, until = (
            noise.uniforms(max(batch.draft_budget), batch.noise_stream),
            StopRule(weight=(), bias=(), min_draft_probs=batch.min_draft_probs),
        )
        self._read = tree.empty(len(batch.seqs), self._setup.device)
        laws = [self._laws(batch, -1)]
        growing = {b: growth for b, growth in enumerate(self._growths) if growth.budget}
        while growing:
            self._pick_children(
                {b: growth for b, growth in growing.items() if not growth.drawn}, laws[-1], batch.min_path_prob
            )
            self._draw_children(
                {b: growth for b, growth in growing.items() if growth.drawn}, laws[-1], draws, batch.min_path_prob
            )
            worth, first = until.until(len(growing)), self._read.size
            levels = {b: self._next(growth, batch.min_path_prob, worth) for b, growth in growing.items()}
            growing = {b: growth for b, growth in growing.items() if levels[b] and len(laws) != self._reach}
            for b, growth in growing.items():
                growth.go_on(levels[b], first)
            if growing:
                self._read = picked([growth.reading() for growth in self._growths], self._setup.device)
                laws.append(self._laws(batch, first))
        return torch.cat(laws, 1)

    def _laws(self, batch: Batch, first: int) -> torch.Tensor:
        """The draft's laws [B, M, V] after the nodes from `first` on; below 0, after the text."""
        assert self._soft is not None
        logits = self._model.score(batch, self._read, first).logits[..., : self._setup.vocab]
        missing = self._setup.vocab - logits.shape[-1]  # a family's members may pad their vocabularies differently
        logits = functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
        if first < 0 or not (self._soft.any_penalty or self._soft.any_minimum):
            return apply_sampling(logits, self._soft, self._read, last=True)
        # What penalties see depends on a node's path, so the nodes read before must stand before these.
        whole = torch.cat([logits.new_zeros(len(logits), 1 + first, logits.shape[-1]), logits], 1)
        return apply_sampling(whole, self._soft, self._read)[:, 1 + first :]

    def _pick_children(self, rows: dict[int, _TreeGrowth], laws: torch.Tensor, keep: float) -> None:
        """The likeliest children of the nodes read last."""
        if not rows:
            return
        best = laws[list(rows)].topk(min(_BREADTH, laws.shape[-1]))
        for growth, values, ids in zip(rows.values(), best.values.tolist(), best.indices.tolist(), strict=True):
            known = sorted(growth.sketch.accept_prob, reverse=True)
            least = max(keep, known[growth.budget - 1] if len(known) >= growth.budget else 0.0)
            for node, likely, tokens in zip(growth.level, values, ids, strict=False):
                self._pick_below(growth, node, zip(likely, tokens, strict=True), least)

    def _pick_below(self, growth: _TreeGrowth, node: int, likely: Iterable[tuple[float, int]], least: float) -> None:
        """Children of a node from (probability, token), as far as they are likelier than `least`."""
        base = most = growth.hope_of(node)
        for rank, (probability, token) in enumerate(likely):
            kinds = (False, min(rank, _RANKS - 1), _DEEP), ("picked", rank, _level(probability))
            most = min(base * self._odds.of(kinds[-1], probability), most) if probability > 0 else 0.0
            if most <= least:
                return
            growth.add(token, node, (most, most), kinds)

    def _draw_children(
        self, rows: dict[int, _TreeGrowth], laws: torch.Tensor, draws: torch.Tensor, keep: float
    ) -> None:
        """Children of the nodes read last, without replacement, as many as the plan has room for."""
        if not rows:
            return
        peaks = laws.amax(-1).tolist()
        plans = {b: _Plan(growth, self._odds, peaks[b], keep) for b, growth in rows.items()}
        left = laws.clone()
        for rank in range(_BREADTH):
            chosen = [(b, at, index) for b, plan in plans.items() for at, index in plan.next(rank)]
            if not chosen:
                return
            row, at, index = tree.upload(chosen, laws.device).unbind(1)
            law = left[row, at]
            tokens = inverse_cdf(law, draws[row, index])
            mass = law.gather(1, tokens[:, None])[:, 0]
            left[row, at, tokens] = 0.0
            for (b, place, _), token, share in zip(chosen, tokens.tolist(), mass.tolist(), strict=True):
                plans[b].drawn(rank, place, token, share)

    def _next(self, growth: _TreeGrowth, keep: float, worth: float) -> list[int]:
        """Which nodes a row's draft should read next; none where the tree is done."""
        unread, ahead = growth.unread(), self._odds.ahead(drawn=growth.drawn)
        hopes = [growth.hope[node] for node in unread]
        if growth.drawn:
            room, best = growth.left(), 1.0  # what is drawn is kept in the tree, however unlikely it turns out
            least = bar((), (hope * share for hope in hopes for share in ahead[:1]), ahead, room) if room > 0 else 2.0
        else:
            room, best = growth.budget, ahead[0]
            settled = (hope for node, hope in enumerate(growth.hope) if node not in set(unread))
            least = bar(settled, hopes, ahead, room)
        room = min(room, growth.room - len(growth.read))
        level = [node for node, hope in zip(unread, hopes, strict=True) if hope * best >= max(least, keep)]
        level = level[: max(room, 0)]
        return level if sum(growth.hope[node] for node in level) >= worth else []

    def _proposal(self, laws: torch.Tensor, where: Sequence[int], rows: int) -> Draft:
        """The draft of all rows; those that are not at `where` have no guesses."""
        found = {b: growth.best() for b, growth in zip(where, self._growths, strict=True)}
        draft = picked([found[b][0] if b in found else TreeBuilder() for b in range(rows)], self._setup.device)
        drawn = [
            (b, node, ours, place + 1)
            for ours, (growth, (b, (_, places))) in enumerate(zip(self._growths, found.items(), strict=True))
            for node, place in enumerate(places)
            if growth.drawn
        ]
        if not drawn:
            return draft
        row, node, ours, at = tree.upload(drawn, laws.device).unbind(1)
        places = torch.full_like(draft.tokens, -1).index_put((row, node), ours * laws.shape[1] + at)
        law = draft.kind.index_put((row, node), torch.tensor(int(DraftKind.WITHOUT_REPLACEMENT), device=laws.device))
        return replace(draft, kind=law, q=Packed(values=laws.flatten(0, 1), at=places))


class _Plan:
    """Sequoia's tree below the nodes that a row's draft has read last, while their children are drawn rank by rank."""

    def __init__(self, growth: _TreeGrowth, odds: _AcceptanceByRank, peaks: Sequence[float], keep: float) -> None:
        """Plan from the chance of the likeliest token after each node, `peaks`."""
        self._growth, self._odds = growth, odds
        self._peaks = [_level(peak) for _, peak in zip(growth.level, peaks, strict=False)]
        self._hopes = [growth.hope_of(node) for node in growth.level]
        self._depth = growth.depth_of(growth.level[0])
        self._mass = [1.0] * len(self._hopes)  # that was not drawn yet
        self._chance = list(self._hopes)  # of the child drawn last; 0 where no more are drawn
        promised = [
            hope * odds.at_law(rank, self._depth, peak)
            for hope, peak in zip(self._hopes, self._peaks, strict=True)
            for rank in range(_RANKS)
        ]
        self._least = max(keep, bar((), promised, odds.ahead(drawn=True), growth.left()))

    def next(self, rank: int) -> list[tuple[int, int]]:
        """Which places in the level get a child of this rank, and which guesses of the row these are."""
        for at, hope in enumerate(self._hopes):
            chance = min(hope * self._expected(rank, at), self._chance[at])
            self._chance[at] = chance if chance >= self._least and self._mass[at] > _LEAST_MASS else 0.0
        places = sorted(range(len(self._hopes)), key=lambda at: -self._chance[at])
        places = [at for at in places if self._chance[at] > 0]
        for at in places[self._growth.left() :]:
            self._chance[at] = 0.0
        begin = len(self._growth.hope)
        return [(at, begin + i) for i, at in enumerate(places[: self._growth.left()])]

    def drawn(self, rank: int, at: int, token: int, share: float) -> None:
        """The child of this rank is `token`, whose part of the law is `share`."""
        kinds = self._kinds(rank, at)
        kind = (
            "token",
            min(rank, _RANKS - 1),
            self._depth,
            _level(share / self._mass[at]),
            _level(self._mass[at]) // 2,
        )
        hope = self._hopes[at] * self._odds.of(kind, self._expected(rank, at))
        self._growth.add(token, self._growth.level[at], (self._chance[at], hope), (*kinds, kind))
        self._mass[at] -= share

    def _kinds(self, rank: int, at: int) -> tuple[Hashable, ...]:
        rank, peak = min(rank, _RANKS - 1), self._peaks[at]
        law = "law", rank, self._depth, peak // 2 if rank else peak
        left = "left", rank, self._depth, peak // 2, _level(self._mass[at]) // 2
        return (True, rank, self._depth), law, left

    def _expected(self, rank: int, at: int) -> float:
        """The chance of a child of this rank, now that its earlier siblings are known."""
        coarse = self._odds.at_law(min(rank, _RANKS - 1), self._depth, self._peaks[at])
        return self._odds.of(self._kinds(rank, at)[-1], coarse) if rank else coarse


def _level(probability: float) -> int:
    """Odds by their order of magnitude, to the base e."""
    odds = math.log(max(probability, 1e-6) / max(1 - probability, 1e-6))
    return round(min(max(odds, -_LEVELS), _LEVELS))
