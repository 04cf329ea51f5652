"""Prove that a verifier is exact: enumerate every draft and every random outcome of a small instance in float64.

The enumeration adds up the joint distribution of the emitted tokens, and extends it to a fixed
length with the target distribution. An exact rule gives the joint distribution of the target, up to
rounding. A biased rule does not. Nothing is sampled, so the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from outrider.core.noise import Noise
from outrider.core.types import Draft, DraftKind, Packed, Verdict
from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The special properties of the distributions of a random instance."""

    zeros: float = 0.0  # share of tokens with probability 0
    same: bool = False  # q equals p
    disjoint: bool = False  # p and q have no token in common
    apart: bool = False  # each draft token has its own q, as in a tree that is merged from several proposers
    ending: float = 0.0  # largest probability that the draft ends before a draft token; it depends on the path
    foreign: float = 0.0  # share of paths at which the draft token is an id that the target does not have


CASES = (Case(), Case(zeros=0.4), Case(same=True), Case(disjoint=True), Case(ending=0.5), Case(foreign=0.3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A target and a proposer with known distributions, and a tree shape of N draft tokens.

    A row of a table is the distribution after a path. The index of the row is the path, as a number in base V.
    """

    vocab: int  # V
    parent: tuple[int, ...]  # [N] parent of each draft token; -1: the last committed token
    kinds: tuple[DraftKind, ...]  # [N]
    target: tuple[torch.Tensor, ...]  # by depth d, from 0 to the deepest draft token: [V**d, V]
    proposal: tuple[torch.Tensor, ...]  # by draft token: [V**(depth - 1), V]; a row of zeros: an id outside of V
    ends: tuple[torch.Tensor, ...]  # by draft token: [V**(depth - 1)] the probability that the draft ends before it

    def __post_init__(self) -> None:
        if any(not -1 <= parent < node for node, parent in enumerate(self.parent)):
            raise OutriderError(
                f"parent is {self.parent}; put each draft token after its parent, and use -1 for the root"
            )
        if not len(self.parent) == len(self.kinds) == len(self.proposal) == len(self.ends):
            raise OutriderError("parent, kinds, proposal and ends differ in length; give one entry per draft token")
        if len(self.target) != max(_depths(self.parent)) + 1:
            raise OutriderError(
                f"target has {len(self.target)} tables; give one per depth, from 0 to {max(_depths(self.parent))}"
            )

    @classmethod
    def random(
        cls,
        vocab: int,
        parent: tuple[int, ...],
        kinds: tuple[DraftKind, ...],
        *,
        generator: torch.Generator,
        case: Case = CASES[0],
    ) -> Instance:
        """Return an instance with random conditional distributions.

        Args:
            parent: [N] the shape of the tree.
            kinds: [N] how each draft token is chosen. One-hot siblings are the likeliest tokens of
                q in order. Sampled siblings after them are sampled from the other tokens.
            generator: the random number generator.
            case: what is special about the distributions.
        """
        depths = _depths(parent)[1:]
        p_tokens = torch.arange(vocab) < vocab // 2 if case.disjoint else torch.ones(vocab, dtype=torch.bool)
        q_tokens = p_tokens ^ case.disjoint

        def table(depth: int, allowed: torch.Tensor) -> torch.Tensor:
            mass = -torch.rand(vocab**depth, vocab, generator=generator, dtype=torch.float64).log() * allowed
            is_largest = mass == mass.amax(-1, keepdim=True)
            removed = torch.rand(mass.shape, generator=generator) < case.zeros
            return _normalize(torch.where(removed & ~is_largest, 0.0, mass), mass)

        target = tuple(table(depth, p_tokens) for depth in range(max(depths, default=0) + 1))
        by_depth = target if case.same else tuple(table(depth, q_tokens) for depth in range(len(target)))
        q = [table(depth - 1, q_tokens) if case.apart else by_depth[depth - 1] for depth in depths]
        proposal = _split_among_siblings(parent, kinds, q)
        uniforms = [torch.rand(2, len(probs), generator=generator, dtype=torch.float64) for probs in q]
        return cls(
            vocab=vocab,
            parent=parent,
            kinds=kinds,
            target=target,
            proposal=tuple(
                probs * (uniform[0] >= case.foreign)[:, None] for probs, uniform in zip(proposal, uniforms, strict=True)
            ),
            ends=tuple(case.ending * uniform[1] for uniform in uniforms),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of an enumeration."""

    error: float  # largest difference between the probability of a token sequence and that of the target
    logprob_error: float  # largest difference between a reported log-probability and that of the target
    accepted: float  # expected number of accepted draft tokens
    cases: int  # number of drafts times random outcomes


def prove(rule: Callable[[Draft, torch.Tensor, Noise], Verdict], instance: Instance) -> Proof:
    """Enumerate all drafts and all random outcomes of a rule on an instance.

    The rule runs on a batch with one sequence per draft. Whenever it uses noise, each sequence is split into one per
    outcome, and the rule runs again until it needs no more outcomes. Outcomes of probability 0 are left out. Sampling
    at all nodes at once has V**(1 + N) outcomes, so instances must be small.

    Nodes of equal depth get independent noise, although real noise depends only on the position. This is valid because
    a rule follows one path. For `Noise.sample_race`, the first SAMPLED child of a node is the winner of the race under
    its q, and other draft tokens are independent of the race.
    """
    return _compare(*_enumerate(rule, instance))


def round_distributions(
    rule: Callable[[Draft, torch.Tensor, Noise], Verdict], instance: Instance
) -> tuple[torch.Tensor, ...]:
    """Return the distributions of the tokens that a rule emits in a round, also of a rule that is not exact.

    Returns:
        For each depth d a table [V**d, V], as in `Instance.target`: the distribution of token d of the round, given the
        tokens before it and that the round emits it. A row of zeros: the round never emits a token there.

    Raises:
        OutriderError: the rule emits something other than a path of the draft and one more token.
    """
    cases, verdict, p = _enumerate(rule, instance)
    emitted = _emitted(cases, verdict, p)
    if not bool(emitted.legal.all()):
        raise OutriderError("the rule accepts nodes that are no path of the draft; fix its path, accepted and bonus")
    distributions = []
    for depth in range(len(instance.target)):
        reaches = verdict.accepted >= depth
        prefix = emitted.tokens[reaches, : depth + 1]
        mass = torch.zeros(instance.vocab ** (depth + 1), dtype=torch.float64)
        mass.index_add_(0, _number(prefix, instance.vocab), cases.weight[reaches])
        mass = mass.view(-1, instance.vocab)
        distributions.append(_normalize(mass, torch.zeros_like(mass)))
    return tuple(distributions)


def _enumerate(
    rule: Callable[[Draft, torch.Tensor, Noise], Verdict], instance: Instance
) -> tuple[_Cases, Verdict, torch.Tensor]:
    """Return all cases of an instance, their verdicts, and p [R, 1 + N, V]."""
    cases = _drafts(instance)
    draft, p = cases.batch()
    while True:
        try:
            verdict = rule(draft, p, _ReplayedNoise(cases, draft))
        except _OutcomeNeeded as needed:
            cases = cases.split(needed.probs)
            draft, p = cases.batch()
        else:
            return cases, verdict, p


def race_joint(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return P(x = i, y = j) [..., V, V] for x = argmin E_v / q_v and y = argmin E_v / p_v, E_v independent Exp(1).

    With r_v = q_v / p_v and M(r) = sum_v max(q_v, r p_v): P(i, i) = q_i / M(r_i), and for i != j
    P(i, j) = q_i p_j times the integral of dr / M(r)^2 from r_j to r_i, or 0 where r_i <= r_j.
    Between adjacent r_v, M is linear, and the integral is (r' - r) / (M(r) M(r')).
    """
    ratio = torch.where(q > 0, q / p, 0.0)
    ordered, index = ratio.sort(-1)
    mass = torch.maximum(q[..., None, :], (ordered[..., :, None] * p[..., None, :]).nan_to_num(0.0, posinf=torch.inf))
    total = mass.sum(-1)  # M at each r, in ascending order of r
    pieces = (ordered[..., 1:] - ordered[..., :-1]) / (total[..., 1:] * total[..., :-1])
    is_last = ordered[..., 1:].isinf() & ordered[..., :-1].isfinite()
    pieces = torch.where(is_last, 1 / (total[..., :-1] * p.sum(-1, keepdim=True)), pieces).nan_to_num(0.0)
    integral = torch.cat([torch.zeros_like(ordered[..., :1]), pieces.cumsum(-1)], -1)
    integral = torch.empty_like(integral).scatter_(-1, index, integral)
    different = q[..., :, None] * p[..., None, :] * (integral[..., :, None] - integral[..., None, :]).clamp(min=0)
    equal = q / torch.empty_like(total).scatter_(-1, index, total)
    return different + torch.diag_embed(torch.where(q > 0, equal, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cases:
    """All cases so far: one row for each draft and each combination of random outcomes."""

    instance: Instance
    tokens: torch.Tensor  # [R, N]
    count: torch.Tensor  # [R]
    weight: torch.Tensor  # [R] probability
    outcomes: tuple[torch.Tensor, ...] = ()  # [R, ...] in the order in which the rule uses them

    def split(self, probs: torch.Tensor) -> _Cases:
        """Split each row by the outcomes of a sample from `probs` [R, K], or of samples at M nodes [R, M, K]."""
        rows = torch.arange(len(probs))
        weight = self.weight
        outcome = torch.zeros(len(probs), 0, dtype=torch.int64)
        for node_probs in probs.view(len(probs), -1, probs.shape[-1]).unbind(1):
            sources, node_outcome, weight = _fork(weight, node_probs[rows])
            rows = rows[sources]
            outcome = torch.cat([outcome[sources], node_outcome[:, None]], 1)
        earlier = (values[rows] for values in self.outcomes)
        outcomes = (*earlier, outcome if probs.dim() == 3 else outcome[:, 0])
        return replace(self, tokens=self.tokens[rows], count=self.count[rows], weight=weight, outcomes=outcomes)

    def batch(self) -> tuple[Draft, torch.Tensor]:
        """Return the input of a verifier: the drafts, and p [R, 1 + N, V]."""
        instance = self.instance
        rows, size = self.tokens.shape
        paths = _paths(instance, self.tokens)
        p = torch.stack([instance.target[depth][paths[:, j]] for j, depth in enumerate(_depths(instance.parent))], 1)
        q = torch.zeros_like(p[:, 1:])
        for node, parent in enumerate(instance.parent):
            if instance.kinds[node] != DraftKind.ONE_HOT:
                q[:, node] = instance.proposal[node][paths[:, parent + 1]]
        draft = Draft(
            tokens=self.tokens,
            parent=torch.tensor(instance.parent, dtype=torch.int64).expand(rows, size),
            count=self.count,
            kind=torch.tensor(instance.kinds, dtype=torch.int64).expand(rows, size),
            q=Packed.of(q) if any(instance.kinds) else None,
            width=(size,) * rows,
            depth=(size,) * rows,
            chain=instance.parent == tuple(range(-1, size - 1)),
        )
        return draft, p


class _OutcomeNeeded(Exception):
    """The rule uses noise whose outcome the cases do not have yet."""

    def __init__(self, probs: torch.Tensor) -> None:
        super().__init__("an outcome is needed")
        self.probs = probs  # [R, K] or [R, M, K]


class _ReplayedNoise:
    """Noise that returns the outcomes of `cases` in order. After the last one it raises `_OutcomeNeeded`."""

    def __init__(self, cases: _Cases, draft: Draft) -> None:
        self._instance = cases.instance
        self._outcomes = iter(cases.outcomes)
        self._draft = draft
        self._used_indices: list[torch.Tensor] = []  # of `bernoulli`

    def sample(self, probs: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        return self._next_outcome(probs / probs.sum(-1, keepdim=True))

    def sample_race(self, probs: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Sample as `sample` does, conditioned on the draft tokens that come from the same race."""
        if probs.dim() != 3:
            raise OutriderError("sample_race was called for some nodes; call it once, with probs [B, 1 + N, V]")
        probs = probs / probs.sum(-1, keepdim=True)
        draft = self._draft
        rows = torch.arange(len(probs))
        sampled = [node for node, kind in enumerate(self._instance.kinds) if kind == DraftKind.SAMPLED]
        first_child = {self._instance.parent[child] + 1: child for child in reversed(sampled)}
        for node, child in first_child.items():
            assert draft.q is not None
            token = draft.tokens[:, child]
            valid = (child < draft.count) & (token >= 0) & (token < probs.shape[-1])
            joint = race_joint(probs[:, node], draft.q.padded()[:, child])[rows, token.clamp(0, probs.shape[-1] - 1)]
            probs[:, node] = torch.where(valid[:, None], _normalize(joint, probs[:, node]), probs[:, node])
        return self._next_outcome(probs)

    def bernoulli(self, prob: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if prob.dim() > 1:
            return torch.stack([self.bernoulli(prob[:, i], index[:, i]) for i in range(prob.shape[1])], 1)
        prob = prob.nan_to_num(nan=0.0, posinf=1.0).clamp(0.0, 1.0)
        # A certain outcome uses no noise. It gets an index that no other call has.
        used = torch.where((prob > 0) & (prob < 1), index, -1 - len(self._used_indices))
        if any(bool((used == earlier).any()) for earlier in self._used_indices):
            raise OutriderError("bernoulli was called twice with one index in a round; use each index once")
        self._used_indices.append(used)
        return self._next_outcome(torch.stack([1 - prob, prob], -1)).bool()

    def _next_outcome(self, probs: torch.Tensor) -> torch.Tensor:
        outcome = next(self._outcomes, None)
        if outcome is None:
            raise _OutcomeNeeded(probs)
        return outcome


def _drafts(instance: Instance) -> _Cases:
    """Return one case for each possible draft of the proposer."""
    vocab = instance.vocab
    tokens = torch.zeros(1, 0, dtype=torch.int64)
    count = torch.zeros(1, dtype=torch.int64)
    weight = torch.ones(1, dtype=torch.float64)
    for node, parent in enumerate(instance.parent):
        path = _paths(instance, tokens)[:, parent + 1]
        probs = _proposal_of(instance, node, tokens)
        end = torch.where(count == node, instance.ends[node][path], 1.0)[:, None]
        foreign = (probs.sum(-1, keepdim=True) == 0).double()
        rows, choice, weight = _fork(weight, torch.cat([probs * (1 - end), foreign * (1 - end), end], 1))
        foreign_id = -1 if node % 2 else vocab
        padding = 0
        ids = torch.tensor([*range(vocab), foreign_id, padding])
        tokens = torch.cat([tokens[rows], ids[choice][:, None]], 1)
        count = count[rows] + (choice <= vocab)
    return _Cases(instance=instance, tokens=tokens, count=count, weight=weight)


def _proposal_of(instance: Instance, node: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return [R, V], the distribution of a draft token after the tokens [R, node] of earlier draft tokens."""
    probs = instance.proposal[node][_paths(instance, tokens)[:, instance.parent[node] + 1]]
    remaining = probs.clone()
    for other in range(node):
        siblings = instance.parent[other] == instance.parent[node]
        if siblings and instance.kinds[other] == instance.kinds[node] == DraftKind.WITHOUT_REPLACEMENT:
            remaining[torch.arange(instance.vocab) == tokens[:, other, None]] = 0.0
    return _normalize(remaining, probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Emitted:
    """The tokens that the verdicts of all cases emit."""

    tokens: torch.Tensor  # [R, 1 + N] the accepted draft tokens, then the bonus token; 0 beyond
    legal: torch.Tensor  # [R] bool: the verdict is a path of the draft and a token of the vocabulary
    logprob_error: float


def _emitted(cases: _Cases, verdict: Verdict, p: torch.Tensor) -> _Emitted:
    instance = cases.instance
    rows, size = cases.tokens.shape
    last = torch.full((rows,), -1)
    emitted = []
    legal = (verdict.bonus >= 0) & (verdict.bonus < instance.vocab)
    parent = torch.tensor([*instance.parent, -1])
    all_rows = torch.arange(rows)
    logprob_error = torch.zeros((), dtype=torch.float64)
    for i in range(size + 1):
        is_draft = i < verdict.accepted
        done = i > verdict.accepted
        node = verdict.path[:, i] if i < size else torch.full_like(last, -1)
        draft_token = cases.tokens.gather(1, node.clamp(min=0)[:, None])[:, 0] if size else node
        legal &= torch.where(is_draft, (node >= 0) & (node < cases.count) & (parent[node] == last), node == -1)
        legal &= ~is_draft | ((draft_token >= 0) & (draft_token < instance.vocab))
        token = torch.where(is_draft, draft_token, verdict.bonus).clamp(0, instance.vocab - 1)
        expected = torch.where(done, 0.0, p[all_rows, last + 1, token].log())
        reported = verdict.logprob[:, i]
        errors = torch.where(expected == reported, 0.0, (expected - reported).abs())
        logprob_error = torch.maximum(logprob_error, errors.max())
        emitted.append(torch.where(done, 0, token))
        last = torch.where(is_draft, node, last)
    return _Emitted(tokens=torch.stack(emitted, 1), legal=legal, logprob_error=float(logprob_error))


def _compare(cases: _Cases, verdict: Verdict, p: torch.Tensor) -> Proof:
    """Compare the joint distribution of the emitted tokens with that of the target.

    A case whose verdict is not a path of its draft adds no probability, which shows as an error.
    """
    instance = cases.instance
    emitted = _emitted(cases, verdict, p)
    joint = torch.zeros(1, dtype=torch.float64)
    target_joint = torch.ones(1, dtype=torch.float64)
    for depth, table in enumerate(instance.target):
        ended = torch.zeros(instance.vocab ** (depth + 1), dtype=torch.float64)
        chosen = emitted.legal & (verdict.accepted == depth)
        ended.index_add_(0, _number(emitted.tokens[chosen, : depth + 1], instance.vocab), cases.weight[chosen])
        joint = ended + (joint[:, None] * table).view(-1)
        target_joint = (target_joint[:, None] * table).view(-1)
    return Proof(
        error=float((joint - target_joint).abs().max()),
        logprob_error=emitted.logprob_error,
        accepted=float((cases.weight * verdict.accepted).sum()),
        cases=len(cases.tokens),
    )


def _number(tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return [R], the tokens [R, n] as a number in base V."""
    number = torch.zeros(len(tokens), dtype=torch.int64)
    for token in tokens.unbind(1):
        number = number * vocab + token
    return number


def _paths(instance: Instance, tokens: torch.Tensor) -> torch.Tensor:
    """Return [R, 1 + n], the paths to the root and to n draft tokens, as numbers in base V."""
    paths = [torch.zeros(len(tokens), dtype=torch.int64)]
    for node in range(tokens.shape[1]):
        token = tokens[:, node].clamp(0, instance.vocab - 1)
        paths.append(paths[instance.parent[node] + 1] * instance.vocab + token)
    return torch.stack(paths, 1)


def _fork(weight: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split rows of `weight` [R] by outcomes of `probs` [R, K]. Returns source rows, outcomes and new weights."""
    mass = weight[:, None] * probs
    rows, outcome = mass.nonzero(as_tuple=True)
    return rows, outcome, mass[rows, outcome]


def _split_among_siblings(
    parent: tuple[int, ...], kinds: tuple[DraftKind, ...], q: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the distribution of each draft token, so that siblings of one q do not repeat its likeliest tokens.

    One-hot siblings get the likeliest tokens of q in order. Sampled siblings after them get the other tokens.
    """
    proposal: list[torch.Tensor] = []
    for node, probs in enumerate(q):
        remaining = probs
        for other in range(node):
            if parent[other] == parent[node] and kinds[other] == DraftKind.ONE_HOT and q[other] is probs:
                remaining = remaining * (1 - proposal[other])
        remaining = _normalize(remaining, probs)
        best = torch.nn.functional.one_hot(remaining.argmax(-1), probs.shape[-1]).double()
        proposal.append(best if kinds[node] == DraftKind.ONE_HOT else remaining)
    return proposal


def _depths(parent: tuple[int, ...]) -> tuple[int, ...]:
    """Return [1 + N], the number of draft tokens before the token that follows the root and each draft token."""
    depths = [0]
    for above in parent:
        depths.append(1 + depths[above + 1])
    return tuple(depths)


def _normalize(mass: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """Normalize `mass` over the last dimension. Use `fallback` where the sum is 0."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, fallback)
