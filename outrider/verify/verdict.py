"""Helpers of the verification rules: draft distributions, acceptable nodes, and verdicts from accepted paths."""

from collections.abc import Callable, Mapping, Sequence

import torch

from outrider.core import tree
from outrider.core.noise import Noise
from outrider.core.types import Draft, DraftKind, Verdict


def accept_prefix(draft: Draft, p: torch.Tensor, accepted: torch.Tensor, probs: torch.Tensor, noise: Noise) -> Verdict:
    """Accept the first `accepted` [B] draft tokens of chains and sample the bonus token from `probs` [B, V]."""
    return verdict_of(draft, p, prefix_of(draft, accepted), accepted, noise.sample(probs, accepted))


def accept_chain(
    draft: Draft, p: torch.Tensor, noise: Noise, step: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> Verdict:
    """Accept the draft tokens of chains in order, up to the first rejection.

    `step(i)` returns the probability [B] to accept node i, and the distribution [B, V] of the bonus token if it is
    rejected.
    """
    acceptable = acceptable_nodes(draft, p)
    accepted = torch.zeros_like(draft.count)
    probs = p[:, 0]  # the bonus token is sampled from it
    parent_accepted = torch.ones_like(draft.count, dtype=torch.bool)
    for i in range(draft.size):
        reached = parent_accepted & acceptable[:, i]
        chance, residual = step(i)
        accept = noise.bernoulli(masked_prob(chance, reached), torch.full_like(accepted, i)) & reached
        probs = torch.where(accept[:, None], p[:, i + 1], probs)
        probs = torch.where((reached & ~accept)[:, None], residual, probs)
        accepted = accepted + accept
        parent_accepted = accept
    return accept_prefix(draft, p, accepted, probs, noise)


def accept_path(draft: Draft, p: torch.Tensor, at: torch.Tensor, probs: torch.Tensor, noise: Noise) -> Verdict:
    """Accept the path to node `at` [B] (-1: none) and sample the bonus token from `probs` [B, V]."""
    path, accepted = path_to(draft, at)
    return verdict_of(draft, p, path, accepted, noise.sample(probs, accepted))


def verdict_of(
    draft: Draft, p: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor
) -> Verdict:
    """Build the verdict of the first `accepted` [B] nodes of `path` [B, N] and the token `bonus` [B] after them.

    The log-probabilities of the emitted tokens are taken from p [B, 1 + N, V].
    """
    batch_size, size = path.shape
    at = torch.cat([torch.zeros_like(bonus)[:, None], path + 1], 1)  # the node that each emitted token follows
    tokens = torch.cat([draft.tokens.gather(1, path.clamp(min=0)), bonus[:, None]], 1)
    tokens = tokens.scatter(1, accepted[:, None], bonus[:, None])
    batch_index = torch.arange(batch_size, device=p.device)[:, None]
    emitted = torch.arange(size + 1, device=p.device) <= accepted[:, None]
    probs = p[batch_index, at, tokens.clamp(0, p.shape[-1] - 1)]
    return Verdict(path=path, accepted=accepted, bonus=bonus, logprob=torch.where(emitted, probs.log(), 0.0))


def select_by_name(verdicts: Mapping[str, Verdict], names: Sequence[str]) -> Verdict:
    """Select the verdict of rule `names[b]` for each sequence b. Every rule has verified all sequences."""
    if len(verdicts) == 1:
        return next(iter(verdicts.values()))
    selected = None
    for rule, verdict in verdicts.items():
        if selected is None:
            selected = verdict
            continue
        use = torch.tensor([name == rule for name in names], device=verdict.bonus.device)
        selected = Verdict(
            path=torch.where(use[:, None], verdict.path, selected.path),
            accepted=torch.where(use, verdict.accepted, selected.accepted),
            bonus=torch.where(use, verdict.bonus, selected.bonus),
            logprob=torch.where(use[:, None], verdict.logprob, selected.logprob),
        )
    assert selected is not None
    return selected


def prefix_of(draft: Draft, accepted: torch.Tensor) -> torch.Tensor:
    """Return the first `accepted` [B] nodes of chains as a path [B, N], padded with -1."""
    order = torch.arange(draft.size, device=accepted.device)
    return torch.where(order < accepted[:, None], order, -1)


def path_to(draft: Draft, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the path [B, N] from the root to node `at` [B] (-1: the root), padded with -1, and its length [B]."""
    if not draft.size:
        return draft.tokens, draft.count
    on_path = tree.ancestors(draft.parent)[torch.arange(len(at), device=at.device), at.clamp(min=0)]
    on_path = on_path & (at >= 0)[:, None]
    order = torch.where(on_path, torch.arange(draft.size, device=at.device), draft.size).sort(1).values
    return torch.where(order < draft.size, order, -1), on_path.sum(1)


def tokens_before(draft: Draft) -> torch.Tensor:
    """Return [B, 1 + N], the number of tokens of this round before the one sampled at each node."""
    return torch.cat([torch.zeros_like(draft.count)[:, None], tree.depths(draft)], 1)


def acceptable_nodes(draft: Draft, p: torch.Tensor) -> torch.Tensor:
    """Return [B, N] bool: nodes that may be accepted. Padding and ids outside the target's vocabulary may not."""
    return tree.valid_nodes(draft) & (draft.tokens >= 0) & (draft.tokens < p.shape[-1])


def draft_probs(draft: Draft, p: torch.Tensor) -> torch.Tensor:
    """Return q [B, N, V], the distribution that each node was sampled from; one-hot for DraftKind.ONE_HOT."""
    q = torch.zeros_like(p[:, 1:]) if draft.q is None else draft.q.padded().to(p.dtype)
    one_hot = (draft.kind == DraftKind.ONE_HOT)[..., None].to(q.dtype)
    return q.scatter_add_(-1, draft.tokens.clamp(0, p.shape[-1] - 1)[..., None], one_hot)


def without_rejected(q: torch.Tensor, rejected: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    """Return q [B, V] without rejected siblings, renormalized, for nodes that were sampled without replacement."""
    remaining = q.masked_fill(rejected, 0.0)
    return torch.where((kind == DraftKind.WITHOUT_REPLACEMENT)[:, None], normalize(remaining, q), q)


def rejected_token_mask(draft: Draft, node: int, rejected: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return [B, V] bool: the token of a rejected node that was sampled without replacement."""
    mask = torch.zeros_like(p[:, 0], dtype=torch.bool)
    without_replacement = rejected & (draft.kind[:, node] == DraftKind.WITHOUT_REPLACEMENT)
    token = draft.tokens[:, node].clamp(0, p.shape[-1] - 1)
    return mask.scatter_(-1, token[:, None], without_replacement[:, None])


def prob_of(probs: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return [B], the probability of token [B] under `probs` [B, V]. Ids are clamped to the vocabulary."""
    return probs.gather(-1, token.clamp(0, probs.shape[-1] - 1)[:, None])[:, 0]


def masked_prob(prob: torch.Tensor, reached: torch.Tensor) -> torch.Tensor:
    """Return the probability where `reached`, else 0. 0 / 0 (no mass in p and q) is 0."""
    return torch.where(reached, prob.nan_to_num(nan=0.0, posinf=1.0).clamp(0.0, 1.0), 0.0)


def normalize(mass: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """Normalize `mass` over V. Use `fallback` where the sum is 0 after rounding."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, fallback)


def continue_prob(excess: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return S / (S + 1 - a), or 1 if the denominator is 0 (Sun et al. 2024)."""
    total = excess + 1 - share
    return torch.where(total > 0, excess / total, 1.0)
