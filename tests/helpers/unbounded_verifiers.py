"""Relaxed rules that break their bound. Each test of a bound must reject them."""

import torch

from outrider.verify.relaxed.groups import OverlappingGroups, Partition
from outrider.verify.verdict import accept_prefix, draft_probs, normalize, prob_of


def lantern_by_draft_token(neighbors, delta):
    """LANTERN as published: the neighbors are pooled for the draft token that was sampled."""

    def rule(draft, p, noise):
        if not draft.size:
            return accept_prefix(draft, p, draft.count, p[:, 0], noise)
        q = draft_probs(draft, p)[:, 0]
        x = draft.tokens[:, 0].clamp(0, p.shape[-1] - 1)
        pooled = p[:, 0].clone()
        seqs = torch.arange(len(p))
        added = torch.zeros_like(pooled[:, 0])
        for source in neighbors.unbind(1):
            y = source[x].clamp(min=0)
            take = torch.where((source[x] >= 0) & (added + pooled[seqs, y] <= delta), pooled[seqs, y], 0.0)
            added = added + take
            pooled[seqs, y] -= take
        pooled[seqs, x] += added
        return _one_step(draft, p, noise, prob_of(pooled, x) / prob_of(q, x), (pooled - q).clamp(min=0))

    return rule


def gsd_with_token_residual(labels):
    """GSD as published, with static clusters: after a rejection the token is sampled from norm((p - q)+)."""
    groups = Partition(labels[None], int(labels.max()) + 1)

    def rule(draft, p, noise):
        if not draft.size:
            return accept_prefix(draft, p, draft.count, p[:, 0], noise)
        q = draft_probs(draft, p)[:, 0]
        ratio = groups.mean(groups.mass(p[:, 0]) / groups.mass(q))
        return _one_step(draft, p, noise, prob_of(ratio, draft.tokens[:, 0]), (p[:, 0] - q).clamp(min=0))

    return rule


def pcg_without_shares(lists, vocab):
    """Groups in which a token counts with its whole probability in each of its groups."""
    groups = OverlappingGroups.of(lists, vocab, torch.device("cpu"))

    def sums(probs):
        return torch.zeros(len(probs), groups.count, dtype=probs.dtype).index_add_(
            1, groups.group, probs[:, groups.token]
        )

    def rule(draft, p, noise):
        if not draft.size:
            return accept_prefix(draft, p, draft.count, p[:, 0], noise)
        q = draft_probs(draft, p)[:, 0]
        best = sums(p[:, 0]) / sums(q)
        first = torch.zeros_like(draft.tokens[:, 0])
        for token, group in zip(groups.token.tolist(), groups.group.tolist(), strict=True):
            first = torch.where(draft.tokens[:, 0] == token, group, first)
        residual = p[:, 0] * groups.mean((sums(p[:, 0]) - sums(q)).clamp(min=0))
        return _one_step(draft, p, noise, prob_of(best, first), residual)

    return rule


def _one_step(draft, p, noise, chance, residual):
    """Accept at most one draft token."""
    valid = (draft.count > 0) & (draft.tokens[:, 0] >= 0) & (draft.tokens[:, 0] < p.shape[-1])
    chance = torch.where(valid, chance.nan_to_num(nan=0.0, posinf=1.0).clamp(0, 1), 0.0)
    accept = noise.bernoulli(chance, torch.zeros_like(draft.count)) & valid
    probs = torch.where((valid & ~accept)[:, None], normalize(residual, p[:, 0]), p[:, 0])
    probs = torch.where(accept[:, None], p[:, 1], probs)
    return accept_prefix(draft, p, accept.long(), probs, noise)
