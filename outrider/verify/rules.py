"""Exact verification rules. They decide which draft tokens are accepted, and they sample the bonus token.

A rule is a pure function (draft, p, noise) -> Verdict. p [B, 1 + N, V] is the target distribution at the root and after
each node. The emitted tokens, accepted path and bonus token together, have the same distribution as sampling from p
token by token. `outrider.testing` proves that by enumeration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from outrider.core import tree
from outrider.core.bound import Bound
from outrider.core.noise import Noise
from outrider.core.types import Draft, DraftKind, Draw, Packed, Verdict
from outrider.verify.verdict import (
    accept_chain,
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
class TargetFacts:
    """The properties of the target from which a rule makes its table of tokens."""

    vocab: int  # V
    device: torch.device
    embedding: Callable[[], torch.Tensor]  # [at least V, H]; raises OutriderError if it cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """A verification rule and its properties."""

    name: str
    rule: VerifyFunction
    draw: Draw  # how draft tokens should be chosen so that this rule accepts most of them
    trees: bool  # supports trees, not only chains
    exact: bool = True
    packed: PackedVerifyFunction | None = None  # an implementation without padding, such as the native one
    bound: Bound | None = None  # what a lossy rule promises; None: nothing, or that it is exact
    bind: Callable[[TargetFacts], VerifyFunction] | None = None  # makes the rule for a target
    relaxes_greedy: bool = False  # whether it may differ from `walk` under a one-hot p
    # Whether the log-probabilities of a lossy rule are those of the distribution that it samples tokens from.
    records_distribution: bool = False

    def for_target(self, facts: TargetFacts) -> Verifier:
        """Return the verifier with the rule for a target.

        Raises:
            OutriderError: the tables of the rule do not fit the target.
        """
        return self if self.bind is None else replace(self, rule=self.bind(facts), bind=None)

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

    A draft token x = argmin E_v / q_v is accepted with probability at least (1 - TV) / (1 + TV).
    The text depends only on the seed and p.
    """
    return _verdict_of_samples(draft, p, noise.sample_race(p, tokens_before(draft)))


def rejection(draft: Draft, p: torch.Tensor, noise: Noise, *, lenience: float = 1.0) -> Verdict:
    """Accept token x_i with probability min(1, p(x_i) / q(x_i)). At the first rejection, sample from norm((p - q)+).

    Chains only (Leviathan et al. 2023, algorithm 1; Chen et al. 2023). A `lenience` below 1 accepts with probability
    min(1, p / (lenience q)), which is not exact (Leviathan et al. 2023, appendix A.5).
    """
    q = draft_probs(draft, p)

    def step(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        ratio = prob_of(p[:, i], draft.tokens[:, i]) / (lenience * prob_of(q[:, i], draft.tokens[:, i]))
        return ratio, normalize((p[:, i] - q[:, i]).clamp(min=0), p[:, i])

    return accept_chain(draft, p, noise, step)


def block(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Verify the chain as a block (Sun et al. 2024, algorithm 2).

    P_i = min(1, P_{i-1} p(x_i) / q(x_i)) and S_i = sum (P_i p - q)+. Prefix i is accepted with probability S_i / (S_i +
    1 - P_i), and the whole chain of length g with P_g. The longest accepted prefix counts. No exact rule for a single
    path accepts more tokens in expectation. Chains only.
    """
    q = draft_probs(draft, p)
    acceptable = acceptable_nodes(draft, p).cumprod(1).bool()
    length = acceptable.sum(1)
    token = draft.tokens.clamp(0, p.shape[-1] - 1)[..., None]
    if not draft.size:
        return accept_prefix(draft, p, length, p[:, 0], noise)
    ratio = (p[:, :-1].gather(-1, token) / q.gather(-1, token))[..., 0]
    share = _running_share(torch.where(acceptable, ratio.nan_to_num(nan=0.0), 0.0))
    excess = (share[:, :-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)
    partial = torch.cat([continue_prob(excess, share[:, :-1]), share[:, -1:]], 1)
    order = torch.arange(1, draft.size + 1, device=p.device)
    accept_prob = masked_prob(torch.where(order == length[:, None], share, partial), acceptable)
    accept = noise.bernoulli(accept_prob, (order - 1).expand_as(accept_prob)) & acceptable
    accepted = accept.long().mul(order).amax(1)
    seqs = torch.arange(len(accepted), device=p.device)
    last_share = torch.where(accepted > 0, share[seqs, accepted - 1], 1.0)
    residual = (last_share[:, None] * p[seqs, accepted] - q[seqs, accepted.clamp(max=draft.size - 1)]).clamp(min=0)
    probs = torch.where((accepted < length)[:, None], normalize(residual, p[seqs, accepted]), p[seqs, accepted])
    return accept_prefix(draft, p, accepted, probs, noise)


def _running_share(ratio: torch.Tensor) -> torch.Tensor:
    """Return P_i = min(1, P_{i-1} r_i), with P_0 = 1, for ratios r [B, N]. It is a sum of logarithms, capped at 0."""
    log_sum = ratio.log().cumsum(1)
    return (log_sum - log_sum.cummax(1).values.clamp(min=0)).exp()


def siblings(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Recursive rejection: from the root down, try each child against the residual of p.

    A rejected child subtracts its q from p. For children that were sampled without replacement, q is renormalized
    without the rejected siblings (Miao et al. 2024; Jeon et al. 2024; Chen et al. 2024, Sequoia).
    """
    q = draft_probs(draft, p)
    acceptable = acceptable_nodes(draft, p)
    at = torch.full_like(draft.count, -1)  # the deepest accepted node
    probs = p[:, 0]
    rejected = torch.zeros_like(p[:, 0], dtype=torch.bool)
    for j in range(draft.size):
        reached = acceptable[:, j] & (draft.parent[:, j] == at)
        child_q = without_rejected(q[:, j], rejected, draft.kind[:, j])
        ratio = prob_of(probs, draft.tokens[:, j]) / prob_of(child_q, draft.tokens[:, j])
        accept = noise.bernoulli(masked_prob(ratio, reached), torch.full_like(at, j)) & reached
        rejected_now = reached & ~accept
        probs = torch.where(rejected_now[:, None], normalize((probs - child_q).clamp(min=0), probs), probs)
        probs = torch.where(accept[:, None], p[:, j + 1], probs)
        rejected = (rejected | rejected_token_mask(draft, j, rejected_now, p)) & ~accept[:, None]
        at = torch.where(accept, j, at)
    return accept_path(draft, p, at, probs, noise)


def traversal(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """Traversal verification, from the leaves to the root (Weng et al. 2025, algorithm 1). Equals `block` on a chain.

    The traversal enters a node c with share a_c = min(1, a p(c) / q(c)), where a is the share of its parent. When the
    whole subtree of c is rejected, its parent has the residual r = (a p - q)+ with S = sum r: p becomes r / S, and a
    becomes S / (S + 1 - a). A node without more children is accepted with probability a. The root is always accepted.
    """
    traversal = _Traversal(draft, p, noise)
    for _ in range(2 * draft.size + 1):
        traversal.step()
    probs = traversal.probs[traversal.seqs, traversal.at + 1]
    return accept_path(draft, p, traversal.at, probs, noise)


class _Traversal:
    """Depth-first traversal of all trees of a batch. Each step enters or leaves one node of every tree."""

    def __init__(self, draft: Draft, p: torch.Tensor, noise: Noise) -> None:
        self.draft = draft
        self.noise = noise
        self.q = draft_probs(draft, p)
        self.unvisited = acceptable_nodes(draft, p)
        self.probs = p.clone()  # [B, 1 + N, V] the current residual at each node
        self.rejected = torch.zeros_like(p, dtype=torch.bool)  # tokens of rejected children, by node
        self.share = torch.ones_like(p[..., 0])
        self.seqs = torch.arange(len(p), device=p.device)
        self.at = torch.full_like(draft.count, -1)  # the current node
        self.done = torch.zeros_like(draft.count, dtype=torch.bool)

    def step(self) -> None:
        """Enter the first child that has not been visited, or leave the current node if there is none."""
        if not self.draft.size:
            return
        children = self.unvisited & (self.draft.parent == self.at[:, None]) & ~self.done[:, None]
        enters = children.any(1)
        child = children.to(torch.uint8).argmax(1)
        leaves = ~enters & ~self.done
        self._leave(leaves)
        self._enter(enters, child)

    def _child_q(self, node: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
        """Return the distribution that `node` was sampled from, without its rejected siblings."""
        return without_rejected(
            self.q[self.seqs, node], self.rejected[self.seqs, parent + 1], self.draft.kind[self.seqs, node]
        )

    def _enter(self, enters: torch.Tensor, child: torch.Tensor) -> None:
        """Move to `child` [B] in the trees where `enters` [B]."""
        parent = self.at
        token = self.draft.tokens[self.seqs, child]
        ratio = prob_of(self.probs[self.seqs, parent + 1], token) / prob_of(self._child_q(child, parent), token)
        share = masked_prob(self.share[self.seqs, parent + 1] * ratio, enters)
        self.share[self.seqs, child + 1] = torch.where(enters, share, self.share[self.seqs, child + 1])
        self.unvisited[self.seqs, child] &= ~enters
        self.at = torch.where(enters, child, self.at)

    def _leave(self, leaves: torch.Tensor) -> None:
        """Accept the current node, or reject it and move to its parent, in the trees where `leaves` [B]."""
        node = self.at.clamp(min=0)
        root = leaves & (self.at < 0)
        inner = leaves & ~root
        accept_prob = self.share[self.seqs, self.at + 1]
        accept = self.noise.bernoulli(masked_prob(accept_prob, inner), node) & inner
        rejected_now = inner & ~accept
        next_node = torch.where(rejected_now, self.draft.parent[self.seqs, node], self.at)
        share = self.share[self.seqs, next_node + 1]
        probs = self.probs[self.seqs, next_node + 1]
        residual = (share[:, None] * probs - self._child_q(node, next_node)).clamp(min=0)
        excess = residual.sum(-1)
        self.probs[self.seqs, next_node + 1] = torch.where(rejected_now[:, None], normalize(residual, probs), probs)
        self.share[self.seqs, next_node + 1] = torch.where(rejected_now, continue_prob(excess, share), share)
        without_replacement = self.draft.kind[self.seqs, node] == DraftKind.WITHOUT_REPLACEMENT
        token = self.draft.tokens[self.seqs, node].clamp(0, probs.shape[-1] - 1)
        self.rejected[self.seqs, next_node + 1, token] |= rejected_now & without_replacement
        self.at = next_node
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
    if not draft.size:
        rows = best.tolist() if isinstance(best, torch.Tensor) else best
        return [((), (token,) if token >= 0 else ()) for (token,) in rows]
    results: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for (sample, tokens, parents), width in zip(_host_rows(draft, best), draft.width, strict=True):
        path: list[int] = []
        emitted: list[int] = []
        at = -1
        for node in range(width):
            if (parents[node] if parents else node - 1) == at and tokens[node] == sample[at + 1]:
                at = node
                path.append(node)
                emitted.append(tokens[node])
        results.append((tuple(path), (*emitted, sample[at + 1])) if min(sample) >= 0 else ((), ()))
    return results


def _host_rows(
    draft: Draft, best: torch.Tensor | Sequence[Sequence[int]]
) -> Iterable[tuple[Sequence[int], Sequence[int], Sequence[int]]]:
    """Yield best tokens, draft tokens and parents ([] for a chain) by sequence, with one copy from the device."""
    if isinstance(best, torch.Tensor):
        parts = (best, draft.tokens) if draft.chain else (best, draft.tokens, draft.parent)
        end_best = draft.size + 1
        end_tokens = end_best + draft.size
        rows = torch.cat(parts, 1).tolist()
        return [(row[:end_best], row[end_best:end_tokens], row[end_tokens:]) for row in rows]
    parents = [[]] * len(best) if draft.chain else draft.parent.tolist()
    return zip(best, draft.host_tokens(), parents, strict=True)


def _verdict_of_samples(draft: Draft, p: torch.Tensor, sample: torch.Tensor) -> Verdict:
    path, accepted, bonus = _follow_samples(draft, sample)
    return verdict_of(draft, p, path, accepted, bonus)


def _follow_samples(draft: Draft, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the sampled tokens [B, 1 + N] down the tree. Returns the path, its length and the sample at its end."""
    valid = tree.valid_nodes(draft)
    if draft.chain:
        accepted = (valid & (draft.tokens == sample[:, :-1])).long().cumprod(1).sum(1)
        return prefix_of(draft, accepted), accepted, sample.gather(1, accepted[:, None])[:, 0]
    at = torch.full_like(draft.count, -1)
    for _ in range(draft.size):
        token = sample.gather(1, at[:, None] + 1)
        match = valid & (draft.parent == at[:, None]) & (draft.tokens == token)
        at = torch.where(match.any(1), match.to(torch.uint8).argmax(1), at)
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
