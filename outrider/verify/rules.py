"""Exact verification: which guesses to accept, and which token follows them, so that the text is the target's own.

Every rule is a pure function (draft, p, noise) -> Verdict. p [B, 1 + N, V] is the target's law at the root and after
each node; what is emitted, path and bonus together, has exactly the law that sampling p token by token has. That is
proven by enumeration in `outrider.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from outrider.core import tree
from outrider.core.noise import Noise
from outrider.core.types import Draft, DraftKind, Draw, Packed, Verdict
from outrider.verify.verdict import (
    accept_path,
    accept_prefix,
    ahead,
    alive_nodes,
    at_token,
    gate,
    normalised,
    path_to,
    prefix_of,
    proposals,
    share_of,
    taken,
    verdict_of,
    without,
)

VerifyFunction = Callable[[Draft, torch.Tensor, Noise], Verdict]
PackedVerifyFunction = Callable[[Draft, Packed, Noise], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """A rule by its name, with what the rest of the house must know of it."""

    name: str
    rule: VerifyFunction
    draw: Draw  # how guesses should be made for this rule to accept most
    trees: bool  # takes trees, not only chains
    exact: bool = True
    packed: PackedVerifyFunction | None = None  # the same rule, where it can do without padding

    def verify(self, draft: Draft, p: Packed, noise: Noise) -> Verdict:
        """What the rule says of a packed p."""
        return self.rule(draft, p.padded(), noise) if self.packed is None else self.packed(draft, p, noise)


def walk(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Sample the target at each node; while the sample is one of the node's children, descend.

    Exact whatever the guesses are, and optimal for deterministic ones. The text depends on the seed alone, not on
    the proposer.
    """
    return _descend(draft, p, noise.sample(p, ahead(draft)))


def coupled(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Walk along the exponential race that the draft ran too: y = argmin E_v / p_v (Daliri et al. 2024, sec. 3).

    A guess drawn by x = argmin E_v / q_v is accepted with probability at least (1 - TV) / (1 + TV); the text is a
    function of the seed and p alone.
    """
    return _descend(draft, p, noise.sample_race(p, ahead(draft)))


def rejection(draft: Draft, p: torch.Tensor, noise: Noise, *, lenience: float = 1.0) -> Verdict:
    """Keep guess x_i with probability min(1, p(x_i) / q(x_i)); at the first rejection draw from norm((p - q)+).

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023. Chains only. A `lenience` below 1 divides the bar by itself
    and is not exact (appendix A.5 of the former); `outrider.verify.lossy` names it.
    """
    q, alive = proposals(draft, p), alive_nodes(draft, p)
    accepted, law = torch.zeros_like(draft.count), p[:, 0]
    going = torch.ones_like(draft.count, dtype=torch.bool)
    for i in range(draft.size):
        met = going & alive[:, i]
        chance = at_token(p[:, i], draft.tokens[:, i]) / (lenience * at_token(q[:, i], draft.tokens[:, i]))
        accept = noise.bernoulli(gate(chance, met), torch.full_like(accepted, i)) & met
        law = torch.where(accept[:, None], p[:, i + 1], law)
        law = torch.where((met & ~accept)[:, None], normalised((p[:, i] - q[:, i]).clamp(min=0), p[:, i]), law)
        accepted, going = accepted + accept, accept
    return accept_prefix(draft, p, accepted, law, noise)


def block(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Judge the chain as a whole: Sun et al. 2024, algorithm 2.

    P_i = min(1, P_{i-1} p(x_i)/q(x_i)) is the share of the prefix that the target would have; S_i = sum (P_i p - q)+;
    prefix i is kept with probability S_i / (S_i + 1 - P_i), the whole chain with P_g; the longest one kept stands.
    Accepts at least as many tokens as any exact rule on one path. Chains only.
    """
    q, alive = proposals(draft, p), alive_nodes(draft, p).cumprod(1).bool()
    length, guess = alive.sum(1), draft.tokens.clamp(0, p.shape[-1] - 1)[..., None]
    if not draft.size:
        return accept_prefix(draft, p, length, p[:, 0], noise)
    ratio = (p[:, :-1].gather(-1, guess) / q.gather(-1, guess))[..., 0]
    share = _running_share(torch.where(alive, ratio.nan_to_num(nan=0.0), 0.0))
    excess = (share[:, :-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)
    partial = torch.cat([share_of(excess, share[:, :-1]), share[:, -1:]], 1)
    order = torch.arange(1, draft.size + 1, device=p.device)
    chance = gate(torch.where(order == length[:, None], share, partial), alive)
    accepted = (noise.bernoulli(chance, (order - 1).expand_as(chance)) & alive).long().mul(order).amax(1)
    each = torch.arange(len(accepted), device=p.device)
    stands = torch.where(accepted > 0, share[each, accepted - 1], 1.0)
    rest = (stands[:, None] * p[each, accepted] - q[each, accepted.clamp(max=draft.size - 1)]).clamp(min=0)
    law = torch.where((accepted < length)[:, None], normalised(rest, p[each, accepted]), p[each, accepted])
    return accept_prefix(draft, p, accepted, law, noise)


def _running_share(ratio: torch.Tensor) -> torch.Tensor:
    """P_i = min(1, P_{i-1} r_i), P_0 = 1, over ratios [B, N]; a walk that is held below 0, in logarithms."""
    level = ratio.log().cumsum(1)
    return (level - level.cummax(1).values.clamp(min=0)).exp()


def siblings(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Root to leaf, offer each child in turn to what is left of p: recursive rejection.

    A rejected child takes its q out of p; the next one's q is its own law, renormalised without the siblings already
    rejected where they were drawn without replacement (Miao et al. 2024; Jeon et al. 2024; Chen et al. 2024, Sequoia).
    """
    q, alive = proposals(draft, p), alive_nodes(draft, p)
    at = torch.full_like(draft.count, -1)
    law, gone = p[:, 0], torch.zeros_like(p[:, 0], dtype=torch.bool)
    for j in range(draft.size):
        met = alive[:, j] & (draft.parent[:, j] == at)
        offer = without(q[:, j], gone, draft.kind[:, j])
        chance = at_token(law, draft.tokens[:, j]) / at_token(offer, draft.tokens[:, j])
        accept = noise.bernoulli(gate(chance, met), torch.full_like(at, j)) & met
        lost = met & ~accept
        law = torch.where(lost[:, None], normalised((law - offer).clamp(min=0), law), law)
        law = torch.where(accept[:, None], p[:, j + 1], law)
        gone = (gone | taken(draft, j, lost, p)) & ~accept[:, None]
        at = torch.where(accept, j, at)
    return accept_path(draft, p, at, law, noise)


def traversal(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Leaf to root: Weng et al. 2025, algorithm 1. Equals `block` on a chain.

    A node c is entered with share a_c = min(1, a p(c)/q(c)) of its parent's share a. When its whole subtree is
    rejected, its parent keeps r = (a p - q)+, S = sum r: p becomes r / S and a becomes S / (S + 1 - a). A node without
    children left is accepted with probability a, and the root always.
    """
    walker = _Traversal(draft, p, noise)
    for _ in range(2 * draft.size + 1):
        walker.step()
    law = walker.law[walker.each, walker.at + 1]
    return accept_path(draft, p, walker.at, law, noise)


class _Traversal:
    """Depth-first visit of all rows' trees at once: each step enters one node or leaves one, row by row."""

    def __init__(self, draft: Draft, p: torch.Tensor, noise: Noise) -> None:
        self.draft, self.noise = draft, noise
        self.q, self.waiting = proposals(draft, p), alive_nodes(draft, p)
        self.law, self.gone = p.clone(), torch.zeros_like(p, dtype=torch.bool)
        self.share = torch.ones_like(p[..., 0])
        self.each = torch.arange(len(p), device=p.device)
        self.at = torch.full_like(draft.count, -1)
        self.done = torch.zeros_like(draft.count, dtype=torch.bool)

    def step(self) -> None:
        if not self.draft.size:
            return
        children = self.waiting & (self.draft.parent == self.at[:, None]) & ~self.done[:, None]
        enters = children.any(1)
        child = children.to(torch.uint8).argmax(1)
        leaves = ~enters & ~self.done
        self._leave(leaves)
        self._enter(enters, child)

    def _offer(self, node: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        return without(self.q[self.each, node], self.gone[self.each, above + 1], self.draft.kind[self.each, node])

    def _enter(self, enters: torch.Tensor, child: torch.Tensor) -> None:
        above, token = self.at, self.draft.tokens[self.each, child]
        ratio = at_token(self.law[self.each, above + 1], token) / at_token(self._offer(child, above), token)
        share = gate(self.share[self.each, above + 1] * ratio, enters)
        self.share[self.each, child + 1] = torch.where(enters, share, self.share[self.each, child + 1])
        self.waiting[self.each, child] &= ~enters
        self.at = torch.where(enters, child, self.at)

    def _leave(self, leaves: torch.Tensor) -> None:
        node = self.at.clamp(min=0)
        root = leaves & (self.at < 0)
        inner = leaves & ~root
        chance = self.share[self.each, self.at + 1]
        accept = self.noise.bernoulli(gate(chance, inner), node) & inner
        lost = inner & ~accept
        above = torch.where(lost, self.draft.parent[self.each, node], self.at)
        share, law = self.share[self.each, above + 1], self.law[self.each, above + 1]
        rest = (share[:, None] * law - self._offer(node, above)).clamp(min=0)
        excess = rest.sum(-1)
        self.law[self.each, above + 1] = torch.where(lost[:, None], normalised(rest, law), law)
        self.share[self.each, above + 1] = torch.where(lost, share_of(excess, share), share)
        drawn = lost & (self.draft.kind[self.each, node] == DraftKind.WITHOUT_REPLACEMENT)
        token = self.draft.tokens[self.each, node].clamp(0, law.shape[-1] - 1)  # of rows that leave nothing, too
        self.gone[self.each, above + 1, token] |= drawn
        self.at = above
        self.done = self.done | root | accept


def follow(draft: Draft, best: torch.Tensor | Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What every exact rule comes to where p is one-hot: `walk`, on the host, without writing p down.

    Args:
        draft: of B rows.
        best: [B, 1 + N] the only possible token at each node; below 0 where there is none.

    Returns:
        The path of each row and the tokens emitted; no tokens for a row that has a node without one.
    """
    out: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for (sample, tokens, parents), width in zip(_read(draft, best), draft.width, strict=True):
        path: list[int] = []
        at = -1
        for node in range(width):
            if (parents[node] if parents else node - 1) == at and tokens[node] == sample[at + 1]:
                at = node
                path.append(node)
        emitted = (*(tokens[node] for node in path), sample[at + 1])
        out.append((tuple(path), emitted) if min(sample) >= 0 else ((), ()))
    return out


def _read(
    draft: Draft, best: torch.Tensor | Sequence[Sequence[int]]
) -> Iterable[tuple[Sequence[int], Sequence[int], Sequence[int]]]:
    """By row: the samples, and the guesses and their parents; of a chain no parents. One copy from the device."""
    if isinstance(best, torch.Tensor):
        parts = (best, draft.tokens) if draft.chain else (best, draft.tokens, draft.parent)
        ends = (draft.size + 1, 2 * draft.size + 1)
        return ((row[: ends[0]], row[ends[0] : ends[1]], row[ends[1] :]) for row in torch.cat(parts, 1).tolist())
    parents = [[]] * len(best) if draft.chain else draft.parent.tolist()
    return zip(best, draft.host_tokens(), parents, strict=True)


def _descend(draft: Draft, p: torch.Tensor, sample: torch.Tensor) -> Verdict:
    path, accepted, bonus = _down(draft, sample)
    return verdict_of(draft, p, path, accepted, bonus)


def _down(draft: Draft, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the target's samples [B, 1 + N] down the tree: the path, its length, and the sample at its end."""
    # A sample is one of the target's own ids, so a guess that is not one of them cannot be met.
    alive = tree.live(draft)
    if draft.chain:
        accepted = (alive & (draft.tokens == sample[:, :-1])).long().cumprod(1).sum(1)
        return prefix_of(draft, accepted), accepted, sample.gather(1, accepted[:, None])[:, 0]
    at = torch.full_like(draft.count, -1)
    for _ in range(draft.size):
        wanted = sample.gather(1, at[:, None] + 1)
        hit = alive & (draft.parent == at[:, None]) & (draft.tokens == wanted)
        at = torch.where(hit.any(1), hit.to(torch.uint8).argmax(1), at)
    path, accepted = path_to(draft, at)
    return path, accepted, sample.gather(1, at[:, None] + 1)[:, 0]


EXACT: Mapping[str, Verifier] = MappingProxyType(
    {
        verifier.name: verifier
        for verifier in (
            Verifier(name="walk", rule=walk, draw=Draw.ARGMAX, trees=True),
            Verifier(name="coupled", rule=coupled, draw=Draw.RACE, trees=True),
            Verifier(name="rejection", rule=rejection, draw=Draw.SAMPLE, trees=False),
            Verifier(name="block", rule=block, draw=Draw.SAMPLE, trees=False),
            Verifier(name="siblings", rule=siblings, draw=Draw.SAMPLE, trees=True),
            Verifier(name="traversal", rule=traversal, draw=Draw.SAMPLE, trees=True),
        )
    }
)
