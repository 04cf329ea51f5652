"""Proof that a verifier is exact: every draft, every coin and every token of a small instance, enumerated in float64.

The law of what a round emits, path and bonus, is added up over all that chance can do and extended to a fixed length
with the target's own tokens. An exact rule gives the target's joint law to rounding; a biased one does not. Nothing is
sampled, so nothing depends on luck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from outrider.core.noise import Noise
from outrider.core.types import Draft, DraftKind, Packed, Verdict
from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A target and a proposer of known laws, over drafts of one shape.

    Tables are indexed by the tokens that precede the one in question, read as a number in base V.
    """

    vocab: int
    parent: tuple[int, ...]  # [N] of each guess; -1 = the last committed token
    laws: tuple[DraftKind, ...]  # [N]
    target: tuple[torch.Tensor, ...]  # by depth d, from 0 to the deepest guess's: [V**d, V]
    proposal: tuple[torch.Tensor, ...]  # by guess: [V**(depth - 1), V]; zeros stand for an id the target lacks
    ends: tuple[torch.Tensor, ...]  # by guess: [V**(depth - 1)] the chance that the draft ends just before it

    def __post_init__(self) -> None:
        if any(not -1 <= parent < node for node, parent in enumerate(self.parent)):
            raise OutriderError(f"parent is {self.parent}; each guess comes after its parent, and -1 is the root")
        if not len(self.parent) == len(self.laws) == len(self.proposal) == len(self.ends):
            raise OutriderError("parent, laws, proposal and ends differ in length; give each guess one entry")
        if len(self.target) != max(_depths(self.parent)) + 1:
            raise OutriderError("target holds too few or too many tables; give one per depth, from 0 to the deepest")

    @classmethod
    def random(
        cls,
        vocab: int,
        parent: tuple[int, ...],
        laws: tuple[DraftKind, ...],
        *,
        generator: torch.Generator,
        zeros: float = 0.0,
        same: bool = False,
        disjoint: bool = False,
        apart: bool = False,
        ending: float = 0.0,
        foreign: float = 0.0,
    ) -> Instance:
        """Random conditional laws.

        Args:
            vocab: V.
            parent: [N] the shape of the tree.
            laws: [N] how each guess is made. One-hot siblings are the likeliest tokens of q in order; what is sampled
                after them is sampled from the rest.
            generator: where the numbers come from.
            zeros: the share of tokens that have no probability.
            same: q is p.
            disjoint: p and q have no token in common.
            apart: each guess has a law of its own, as in a tree merged from several proposers.
            ending: the draft ends before a guess with a chance up to this, which depends on the path.
            foreign: the share of paths at which the guess is an id that the target lacks.
        """
        depths = _depths(parent)[1:]
        half = torch.arange(vocab) < vocab // 2 if disjoint else torch.ones(vocab, dtype=torch.bool)

        def table(depth: int, allowed: torch.Tensor) -> torch.Tensor:
            mass = -torch.rand(vocab**depth, vocab, generator=generator, dtype=torch.float64).log() * allowed
            spared = mass == mass.amax(-1, keepdim=True)
            gone = torch.rand(mass.shape, generator=generator) < zeros
            return _normalised(torch.where(gone & ~spared, 0.0, mass), mass)

        target = tuple(table(depth, half) for depth in range(max(depths, default=0) + 1))
        shared = target if same else tuple(table(depth, half ^ disjoint) for depth in range(len(target)))
        drawn = [table(depth - 1, half ^ disjoint) if apart else shared[depth - 1] for depth in depths]
        proposal = _share_out(parent, laws, drawn)
        rolls = [torch.rand(2, len(law), generator=generator, dtype=torch.float64) for law in drawn]
        return cls(
            vocab=vocab,
            parent=parent,
            laws=laws,
            target=target,
            proposal=tuple(law * (roll[0] >= foreign)[:, None] for law, roll in zip(proposal, rolls, strict=True)),
            ends=tuple(ending * roll[1] for roll in rolls),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the enumeration found."""

    error: float  # largest deviation of a sequence's probability from the target's
    logprob_error: float  # largest deviation of a reported log-probability from the target's
    accepted: float  # expected number of accepted guesses
    cases: int  # drafts times outcomes of chance


def prove(rule: Callable[[Draft, torch.Tensor, Noise], Verdict], instance: Instance) -> Proof:
    """Enumerate all that `rule` can do on `instance`.

    The rule is run on all drafts at once, as the rows of a batch. Wherever it asks chance, each row is split into one
    row per outcome and the rule is run again, until nothing is left to ask. Outcomes of no probability are left out;
    a draw at all nodes at once has V**(1 + N) others, so that instances must be small.

    Nodes of one depth get independent noise, although real noise repeats at a position: a rule may follow one path
    only. For `Noise.race`, the first SAMPLED guess at a node is taken to be the race's winner under its q, and other
    guesses to be independent of the race.
    """
    cases = _drafts(instance)
    draft, p = cases.batch()
    while True:
        try:
            verdict = rule(draft, p, _Tape(cases, draft))
        except _Asked as asked:
            cases = cases.split(asked.law)
            draft, p = cases.batch()
        else:
            return _conclude(cases, verdict, p)


def race_joint(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """P(x = i, y = j) [..., V, V] of x = argmin E_v / q_v and y = argmin E_v / p_v, with E_v independent Exp(1).

    With r_v = q_v / p_v and M(r) = sum_v max(q_v, r p_v): P(i, i) = q_i / M(r_i), and for i != j
    P(i, j) = q_i p_j times the integral of dr / M(r)^2 from r_j to r_i, or 0 where r_i <= r_j.
    Between neighbouring r_v, M is linear, and the integral is (r' - r) / (M(r) M(r')).
    """
    ratio = torch.where(q > 0, q / p, 0.0)
    order, rank = ratio.sort(-1)
    mass = torch.maximum(q[..., None, :], (order[..., :, None] * p[..., None, :]).nan_to_num(0.0, posinf=torch.inf))
    total = mass.sum(-1)  # M at each r, in order
    pieces = (order[..., 1:] - order[..., :-1]) / (total[..., 1:] * total[..., :-1])
    last = order[..., 1:].isinf() & order[..., :-1].isfinite()
    pieces = torch.where(last, 1 / (total[..., :-1] * p.sum(-1, keepdim=True)), pieces).nan_to_num(0.0)
    area = torch.cat([torch.zeros_like(order[..., :1]), pieces.cumsum(-1)], -1)
    area = torch.empty_like(area).scatter_(-1, rank, area)
    apart = q[..., :, None] * p[..., None, :] * (area[..., :, None] - area[..., None, :]).clamp(min=0)
    equal = q / torch.empty_like(total).scatter_(-1, rank, total)
    return apart + torch.diag_embed(torch.where(q > 0, equal, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cases:
    """All that can have happened so far: one row per draft and outcomes of the questions asked."""

    instance: Instance
    tokens: torch.Tensor  # [R, N]
    count: torch.Tensor  # [R]
    weight: torch.Tensor  # [R] probability
    answers: tuple[torch.Tensor, ...] = ()  # [R, ...] in the order of the questions

    def split(self, law: torch.Tensor) -> _Cases:
        """One row per row and outcome of a draw from `law` [R, K], or of draws at M nodes at once [R, M, K]."""
        rows, weight = torch.arange(len(law)), self.weight
        answer = torch.zeros(len(law), 0, dtype=torch.int64)
        for draw in law.view(len(law), -1, law.shape[-1]).unbind(1):
            chosen, outcome, weight = _fork(weight, draw[rows])
            rows, answer = rows[chosen], torch.cat([answer[chosen], outcome[:, None]], 1)
        answers = (*(old[rows] for old in self.answers), answer if law.dim() == 3 else answer[:, 0])
        return replace(self, tokens=self.tokens[rows], count=self.count[rows], weight=weight, answers=answers)

    def batch(self) -> tuple[Draft, torch.Tensor]:
        """The rows as a verifier gets them: their drafts, and p [R, 1 + N, V]."""
        of, (rows, size) = self.instance, self.tokens.shape
        paths = _paths(of, self.tokens)
        p = torch.stack([of.target[d][paths[:, j]] for j, d in enumerate(_depths(of.parent))], 1)
        q = torch.zeros_like(p[:, 1:])
        for node, parent in enumerate(of.parent):
            if of.laws[node] != DraftKind.ONE_HOT:
                q[:, node] = of.proposal[node][paths[:, parent + 1]]
        draft = Draft(
            tokens=self.tokens,
            parent=torch.tensor(of.parent, dtype=torch.int64).expand(rows, size),
            count=self.count,
            kind=torch.tensor(of.laws, dtype=torch.int64).expand(rows, size),
            q=Packed.of(q) if any(of.laws) else None,
            width=(size,) * rows,
            depth=(size,) * rows,
            chain=of.parent == tuple(range(-1, size - 1)),
        )
        return draft, p


class _Asked(Exception):
    """The rule asks a question that no row has an answer to yet."""

    def __init__(self, law: torch.Tensor) -> None:
        super().__init__("unanswered")
        self.law = law  # [R, K] or [R, M, K]


class _Tape:
    """Noise that gives the answers of `cases` in turn, and raises the first question beyond them."""

    def __init__(self, cases: _Cases, draft: Draft) -> None:
        self._instance, self._answers, self._draft = cases.instance, iter(cases.answers), draft
        self._tossed: list[torch.Tensor] = []

    def sample(self, law: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        return self._answer(law / law.sum(-1, keepdim=True))

    def sample_race(self, law: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """As `token`, given what the draft tells of its race."""
        if law.dim() != 3:
            raise OutriderError("race is asked of some nodes; ask it of all at once, with a law [B, 1 + N, V]")
        law, draft, each = law / law.sum(-1, keepdim=True), self._draft, torch.arange(len(law))
        raced = [node for node, made in enumerate(self._instance.laws) if made == DraftKind.SAMPLED]
        first = {self._instance.parent[child] + 1: child for child in reversed(raced)}
        for node, child in first.items():
            assert draft.q is not None
            token = draft.tokens[:, child]
            known = (child < draft.count) & (token >= 0) & (token < law.shape[-1])
            joint = race_joint(law[:, node], draft.q.padded()[:, child])[each, token.clamp(0, law.shape[-1] - 1)]
            law[:, node] = torch.where(known[:, None], _normalised(joint, law[:, node]), law[:, node])
        return self._answer(law)

    def bernoulli(self, chance: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if chance.dim() > 1:
            return torch.stack([self.bernoulli(chance[:, i], index[:, i]) for i in range(chance.shape[1])], 1)
        chance = chance.nan_to_num(nan=0.0, posinf=1.0).clamp(0.0, 1.0)
        coin = torch.where((chance > 0) & (chance < 1), index, -1 - len(self._tossed))
        if any(bool((coin == old).any()) for old in self._tossed):
            raise OutriderError("a coin is tossed twice in a round; give each toss an index of its own")
        self._tossed.append(coin)
        return self._answer(torch.stack([1 - chance, chance], -1)).bool()

    def _answer(self, law: torch.Tensor) -> torch.Tensor:
        answer = next(self._answers, None)
        if answer is None:
            raise _Asked(law)
        return answer


def _drafts(instance: Instance) -> _Cases:
    """Every draft that the proposer can make."""
    vocab = instance.vocab
    tokens, count = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    weight = torch.ones(1, dtype=torch.float64)
    for node, parent in enumerate(instance.parent):
        above = _paths(instance, tokens)[:, parent + 1]
        law = _offer(instance, node, tokens)
        end = torch.where(count == node, instance.ends[node][above], 1.0)[:, None]
        foreign = (law.sum(-1, keepdim=True) == 0).double()
        rows, choice, weight = _fork(weight, torch.cat([law * (1 - end), foreign * (1 - end), end], 1))
        names = torch.tensor([*range(vocab), -1 if node % 2 else vocab, 0])  # the last one is padding
        tokens = torch.cat([tokens[rows], names[choice][:, None]], 1)
        count = count[rows] + (choice <= vocab)
    return _Cases(instance=instance, tokens=tokens, count=count, weight=weight)


def _offer(instance: Instance, node: int, tokens: torch.Tensor) -> torch.Tensor:
    """[R, V]: what a guess is drawn from, given the tokens [R, node] of the guesses before it."""
    law = instance.proposal[node][_paths(instance, tokens)[:, instance.parent[node] + 1]]
    left = law.clone()
    for other in range(node):
        siblings = instance.parent[other] == instance.parent[node]
        if siblings and instance.laws[other] == instance.laws[node] == DraftKind.WITHOUT_REPLACEMENT:
            left[torch.arange(instance.vocab) == tokens[:, other, None]] = 0.0
    return _normalised(left, law)


def _conclude(cases: _Cases, verdict: Verdict, p: torch.Tensor) -> Proof:
    """Add up what the rows emit; a row whose verdict is not a path of its draft adds nothing, and so is an error."""
    of, (rows, size) = cases.instance, cases.tokens.shape
    at, index = torch.full((rows,), -1), torch.zeros(rows, dtype=torch.int64)
    legal = (verdict.bonus >= 0) & (verdict.bonus < of.vocab)
    parent, each = torch.tensor([*of.parent, -1]), torch.arange(rows)
    off = torch.zeros((), dtype=torch.float64)
    for i in range(size + 1):
        kept, done = i < verdict.accepted, i > verdict.accepted
        node = verdict.path[:, i] if i < size else torch.full_like(at, -1)
        guess = cases.tokens.gather(1, node.clamp(min=0)[:, None])[:, 0] if size else node
        legal &= torch.where(kept, (node >= 0) & (node < cases.count) & (parent[node] == at), node == -1)
        legal &= ~kept | ((guess >= 0) & (guess < of.vocab))
        token = torch.where(kept, guess, verdict.bonus).clamp(0, of.vocab - 1)
        truth, told = torch.where(done, 0.0, p[each, at + 1, token].log()), verdict.logprob[:, i]
        off = torch.maximum(off, torch.where(truth == told, 0.0, (truth - told).abs()).max())
        index = torch.where(done, index, index * of.vocab + token)
        at = torch.where(kept, node, at)
    law, wanted = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for depth, table in enumerate(of.target):
        here = torch.zeros(of.vocab ** (depth + 1), dtype=torch.float64)
        chosen = legal & (verdict.accepted == depth)
        here.index_add_(0, index[chosen], cases.weight[chosen])
        law, wanted = here + (law[:, None] * table).view(-1), (wanted[:, None] * table).view(-1)
    return Proof(
        error=float((law - wanted).abs().max()),
        logprob_error=float(off),
        accepted=float((cases.weight * verdict.accepted).sum()),
        cases=rows,
    )


def _paths(instance: Instance, tokens: torch.Tensor) -> torch.Tensor:
    """[R, 1 + n]: the tokens on the path to the root and to each of n guesses, as a number in base V."""
    out = [torch.zeros(len(tokens), dtype=torch.int64)]
    for node in range(tokens.shape[1]):
        token = tokens[:, node].clamp(0, instance.vocab - 1)
        out.append(out[instance.parent[node] + 1] * instance.vocab + token)
    return torch.stack(out, 1)


def _fork(weight: torch.Tensor, law: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, outcomes and weights of everything that can follow rows of `weight` [R] by `law` [R, K]."""
    mass = weight[:, None] * law
    rows, outcome = mass.nonzero(as_tuple=True)
    return rows, outcome, mass[rows, outcome]


def _share_out(parent: tuple[int, ...], laws: tuple[DraftKind, ...], drawn: list[torch.Tensor]) -> list[torch.Tensor]:
    """Siblings of one law: the likeliest tokens one-hot and in order, what is sampled after them from the rest."""
    out: list[torch.Tensor] = []
    for node, law in enumerate(drawn):
        rest = law
        for other in range(node):
            if parent[other] == parent[node] and laws[other] == DraftKind.ONE_HOT and drawn[other] is law:
                rest = rest * (1 - out[other])
        rest = _normalised(rest, law)
        best = torch.nn.functional.one_hot(rest.argmax(-1), law.shape[-1]).double()
        out.append(best if laws[node] == DraftKind.ONE_HOT else rest)
    return out


def _depths(parent: tuple[int, ...]) -> tuple[int, ...]:
    """[1 + N]: tokens that precede the one sampled at the root and after each guess."""
    out = [0]
    for above in parent:
        out.append(1 + out[above + 1])
    return tuple(out)


def _normalised(mass: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, fallback)
