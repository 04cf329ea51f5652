"""Exact verification rules. They decide which draft tokens are accepted and which token follows.

A rule is a pure function (draft, p, noise) -> Verdict. p [B, 1 + N, V] is the target distribution at the root and after
each node. The emitted tokens, accepted path and bonus token together, have the same distribution as sampling from p
token by token. `outrider.testing` proves that by enumeration.
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
    acceptable_nodes,
    continue_prob,
    draft_probs,
    masked_prob,
    normalize,
    path_to,
    prefix_of,
    prob_of,
    rejected_token_mask,
    tokens_before,
    verdict_of,
    without_rejected,
)

VerifyFunction = Callable[[Draft, torch.Tensor, Noise], Verdict]
PackedVerifyFunction = Callable[[Draft, Packed, Noise], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """A verification rule and its properties."""

    name: str
    rule: VerifyFunction
    draw: Draw  # how draft tokens should be chosen so that this rule accepts most of them
    trees: bool  # supports trees, not only chains
    exact: bool = True
    packed: PackedVerifyFunction | None = None  # an implementation without padding, such as the native one

    def verify(self, draft: Draft, p: Packed, noise: Noise) -> Verdict:
        """Verify a draft against packed probabilities."""
        return self.rule(draft, p.padded(), noise) if self.packed is None else self.packed(draft, p, noise)


def walk(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Sample a token from p at each node and descend while the token is a child of the node.

    Exact for any draft, and optimal for deterministic drafts. The text depends only on the seed, not on the proposer.
    """
    return _verdict_of_samples(draft, p, noise.sample(p, tokens_before(draft)))


def coupled(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Sample y = argmin E_v / p_v with the exponential noise E of the draft (Daliri et al. 2024, sec. 3).

    A draft token x = argmin E_v / q_v is accepted with probability at least (1 - TV) / (1 + TV). The text depends only
    on the seed and p.
    """
    return _verdict_of_samples(draft, p, noise.sample_race(p, tokens_before(draft)))


def rejection(draft: Draft, p: torch.Tensor, noise: Noise, *, lenience: float = 1.0) -> Verdict:
    """Accept token x_i with probability min(1, p(x_i) / q(x_i)). At the first rejection, sample from norm((p - q)+).

    Chains only (Leviathan et al. 2023, algorithm 1; Chen et al. 2023). A `lenience` below 1 accepts with probability
    min(1, p / (lenience q)), which is not exact (Leviathan et al. 2023, appendix A.5).
    """
    q, alive = draft_probs(draft, p), acceptable_nodes(draft, p)
    accepted = torch.zeros_like(draft.count)
    probs = p[:, 0]  # the bonus token is sampled from it
    going = torch.ones_like(draft.count, dtype=torch.bool)
    for i in range(draft.size):
        reached = going & alive[:, i]
        chance = prob_of(p[:, i], draft.tokens[:, i]) / (lenience * prob_of(q[:, i], draft.tokens[:, i]))
        accept = noise.bernoulli(masked_prob(chance, reached), torch.full_like(accepted, i)) & reached
        probs = torch.where(accept[:, None], p[:, i + 1], probs)
        probs = torch.where((reached & ~accept)[:, None], normalize((p[:, i] - q[:, i]).clamp(min=0), p[:, i]), probs)
        accepted, going = accepted + accept, accept
    return accept_prefix(draft, p, accepted, probs, noise)


def block(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Verify the chain as a block (Sun et al. 2024, algorithm 2).

    P_i = min(1, P_{i-1} p(x_i) / q(x_i)) and S_i = sum (P_i p - q)+. Prefix i is accepted with probability
    S_i / (S_i + 1 - P_i), and the whole chain of length g with P_g. The longest accepted prefix counts. No exact rule
    for a single path accepts more tokens in expectation. Chains only.
    """
    q, alive = draft_probs(draft, p), acceptable_nodes(draft, p).cumprod(1).bool()
    length, token = alive.sum(1), draft.tokens.clamp(0, p.shape[-1] - 1)[..., None]
    if not draft.size:
        return accept_prefix(draft, p, length, p[:, 0], noise)
    ratio = (p[:, :-1].gather(-1, token) / q.gather(-1, token))[..., 0]
    share = _running_share(torch.where(alive, ratio.nan_to_num(nan=0.0), 0.0))
    excess = (share[:, :-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)
    partial = torch.cat([continue_prob(excess, share[:, :-1]), share[:, -1:]], 1)
    order = torch.arange(1, draft.size + 1, device=p.device)
    chance = masked_prob(torch.where(order == length[:, None], share, partial), alive)
    accepted = (noise.bernoulli(chance, (order - 1).expand_as(chance)) & alive).long().mul(order).amax(1)
    each = torch.arange(len(accepted), device=p.device)
    stands = torch.where(accepted > 0, share[each, accepted - 1], 1.0)
    rest = (stands[:, None] * p[each, accepted] - q[each, accepted.clamp(max=draft.size - 1)]).clamp(min=0)
    probs = torch.where((accepted < length)[:, None], normalize(rest, p[each, accepted]), p[each, accepted])
    return accept_prefix(draft, p, accepted, probs, noise)


def _running_share(ratio: torch.Tensor) -> torch.Tensor:
    """Return P_i = min(1, P_{i-1} r_i), P_0 = 1, for ratios r [B, N]: a sum of logarithms that is capped at 0."""
    level = ratio.log().cumsum(1)
    return (level - level.cummax(1).values.clamp(min=0)).exp()


def siblings(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Recursive rejection: from the root down, try each child against the residual of p.

    A rejected child subtracts its q from p. For children that were sampled without replacement, q is renormalized
    without the rejected siblings (Miao et al. 2024; Jeon et al. 2024; Chen et al. 2024, Sequoia).
    """
    q, alive = draft_probs(draft, p), acceptable_nodes(draft, p)
    at = torch.full_like(draft.count, -1)
    probs = p[:, 0]
    rejected = torch.zeros_like(p[:, 0], dtype=torch.bool)
    for j in range(draft.size):
        reached = alive[:, j] & (draft.parent[:, j] == at)
        offer = without_rejected(q[:, j], rejected, draft.kind[:, j])
        chance = prob_of(probs, draft.tokens[:, j]) / prob_of(offer, draft.tokens[:, j])
        accept = noise.bernoulli(masked_prob(chance, reached), torch.full_like(at, j)) & reached
        rejected_now = reached & ~accept
        probs = torch.where(rejected_now[:, None], normalize((probs - offer).clamp(min=0), probs), probs)
        probs = torch.where(accept[:, None], p[:, j + 1], probs)
        rejected = (rejected | rejected_token_mask(draft, j, rejected_now, p)) & ~accept[:, None]
        at = torch.where(accept, j, at)
    return accept_path(draft, p, at, probs, noise)


def traversal(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Traversal verification, from the leaves to the root (Weng et al. 2025, algorithm 1). Equals `block` on a chain.

    A node c is entered with share a_c = min(1, a p(c) / q(c)), where a is the share of its parent. When its whole
    subtree is rejected, its parent has the residual r = (a p - q)+ with S = sum r: p becomes r / S and a becomes
    S / (S + 1 - a). A node without children left is accepted with probability a. The root is always accepted.
    """
    walker = _Traversal(draft, p, noise)
    for _ in range(2 * draft.size + 1):
        walker.step()
    probs = walker.probs[walker.each, walker.at + 1]
    return accept_path(draft, p, walker.at, probs, noise)


class _Traversal:
    """Depth-first traversal of all trees of a batch. Each step enters or leaves one node of every tree."""

    def __init__(self, draft: Draft, p: torch.Tensor, noise: Noise) -> None:
        self.draft = draft
        self.noise = noise
        self.q = draft_probs(draft, p)
        self.unvisited = acceptable_nodes(draft, p)
        self.probs = p.clone()
        self.rejected = torch.zeros_like(p, dtype=torch.bool)
        self.share = torch.ones_like(p[..., 0])
        self.each = torch.arange(len(p), device=p.device)
        self.at = torch.full_like(draft.count, -1)
        self.done = torch.zeros_like(draft.count, dtype=torch.bool)

    def step(self) -> None:
        if not self.draft.size:
            return
        children = self.unvisited & (self.draft.parent == self.at[:, None]) & ~self.done[:, None]
        enters = children.any(1)
        child = children.to(torch.uint8).argmax(1)
        leaves = ~enters & ~self.done
        self._leave(leaves)
        self._enter(enters, child)

    def _offer(self, node: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        return without_rejected(
            self.q[self.each, node], self.rejected[self.each, above + 1], self.draft.kind[self.each, node]
        )

    def _enter(self, enters: torch.Tensor, child: torch.Tensor) -> None:
        above, token = self.at, self.draft.tokens[self.each, child]
        ratio = prob_of(self.probs[self.each, above + 1], token) / prob_of(self._offer(child, above), token)
        share = masked_prob(self.share[self.each, above + 1] * ratio, enters)
        self.share[self.each, child + 1] = torch.where(enters, share, self.share[self.each, child + 1])
        self.unvisited[self.each, child] &= ~enters
        self.at = torch.where(enters, child, self.at)

    def _leave(self, leaves: torch.Tensor) -> None:
        node = self.at.clamp(min=0)
        root = leaves & (self.at < 0)
        inner = leaves & ~root
        chance = self.share[self.each, self.at + 1]
        accept = self.noise.bernoulli(masked_prob(chance, inner), node) & inner
        rejected_now = inner & ~accept
        above = torch.where(rejected_now, self.draft.parent[self.each, node], self.at)
        share, probs = self.share[self.each, above + 1], self.probs[self.each, above + 1]
        rest = (share[:, None] * probs - self._offer(node, above)).clamp(min=0)
        excess = rest.sum(-1)
        self.probs[self.each, above + 1] = torch.where(rejected_now[:, None], normalize(rest, probs), probs)
        self.share[self.each, above + 1] = torch.where(rejected_now, continue_prob(excess, share), share)
        drawn = rejected_now & (self.draft.kind[self.each, node] == DraftKind.WITHOUT_REPLACEMENT)
        token = self.draft.tokens[self.each, node].clamp(0, probs.shape[-1] - 1)
        self.rejected[self.each, above + 1, token] |= drawn
        self.at = above
        self.done = self.done | root | accept


def verify_greedy(
    draft: Draft, best: torch.Tensor | Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Verify greedy requests on the host. With a one-hot p every exact rule gives the result of `walk`.

    Args:
        draft: the draft of B sequences.
        best: [B, 1 + N] the likeliest token at each node; negative if the logits are not finite.

    Returns:
        For each sequence the accepted path and the emitted tokens; both empty if a node has no token.
    """
    out: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for (sample, tokens, parents), width in zip(_host_rows(draft, best), draft.width, strict=True):
        path: list[int] = []
        at = -1
        for node in range(width):
            if (parents[node] if parents else node - 1) == at and tokens[node] == sample[at + 1]:
                at = node
                path.append(node)
        emitted = (*(tokens[node] for node in path), sample[at + 1])
        out.append((tuple(path), emitted) if min(sample) >= 0 else ((), ()))
    return out


def _host_rows(
    draft: Draft, best: torch.Tensor | Sequence[Sequence[int]]
) -> Iterable[tuple[Sequence[int], Sequence[int], Sequence[int]]]:
    """Yield best tokens, draft tokens and parents ([] for a chain) by sequence, with one copy from the device."""
    if isinstance(best, torch.Tensor):
        parts = (best, draft.tokens) if draft.chain else (best, draft.tokens, draft.parent)
        ends = (draft.size + 1, 2 * draft.size + 1)
        return ((row[: ends[0]], row[ends[0] : ends[1]], row[ends[1] :]) for row in torch.cat(parts, 1).tolist())
    parents = [[]] * len(best) if draft.chain else draft.parent.tolist()
    return zip(best, draft.host_tokens(), parents, strict=True)


def _verdict_of_samples(draft: Draft, p: torch.Tensor, sample: torch.Tensor) -> Verdict:
    path, accepted, bonus = _follow_samples(draft, sample)
    return verdict_of(draft, p, path, accepted, bonus)


def _follow_samples(draft: Draft, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the sampled tokens [B, 1 + N] down the tree. Returns the path, its length and the sample at its end."""
    alive = tree.valid_nodes(draft)
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
