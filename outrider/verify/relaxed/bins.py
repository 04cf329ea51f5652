"""Acceptance of ordered bins within a distance (Spec-VLA, Wang et al. 2025, arXiv 2507.22424).

Action tokens of a robot are bins of a continuous value, so a token a few bins away is nearly the same action.
"""

from functools import partial

import torch

from outrider.core import tree
from outrider.core.noise import Noise
from outrider.core.types import Draft, DraftKind, Verdict
from outrider.verify.rules import VerifyFunction
from outrider.verify.verdict import path_to, prob_of, tokens_before, verdict_of


def bins(order: torch.Tensor, distance: int) -> VerifyFunction:
    """Return the rule that accepts a draft token within `distance` bins of the target's own token y, sampled from p.

    At each node, the rule accepts the child that is nearest to y, if it is within the distance.
    Otherwise it emits y. It verifies trees. A token outside the bins is accepted only if it is y. A
    draft token without probability under p is not accepted, with one exception: if p is one-hot, as
    in greedy decoding, a draft token that was chosen without randomness may be.

    Args:
        order: [V] int64 the bin of each token; -1: the token is not a bin.
        distance: largest number of bins between an accepted draft token and y.
    """
    return partial(_verify, order=order, distance=distance)


def _verify(draft: Draft, p: torch.Tensor, noise: Noise, *, order: torch.Tensor, distance: int) -> Verdict:
    sample = noise.sample_race(p, tokens_before(draft))  # [B, 1 + N]
    seqs = torch.arange(len(p), device=p.device)
    far = max(len(order), distance + 1)  # the gap of a token that may not be accepted
    valid = tree.valid_nodes(draft) & (draft.tokens >= 0) & (draft.tokens < p.shape[-1])
    token = draft.tokens.clamp(0, p.shape[-1] - 1)
    at = torch.full_like(draft.count, -1)
    for _ in range(draft.size):
        own = sample[seqs, at + 1]
        probs = p[seqs, at + 1]
        fixed = (prob_of(probs, own) == 1)[:, None] & (draft.kind == DraftKind.ONE_HOT)
        both = (order[token] >= 0) & (order[own] >= 0)[:, None] & ((probs.gather(1, token) > 0) | fixed)
        gap = torch.where(both, (order[token] - order[own][:, None]).abs(), far)
        gap = torch.where(token == own[:, None], 0, gap)
        gap = torch.where(valid & (draft.parent == at[:, None]), gap, far)
        best = gap.argmin(1)
        at = torch.where(gap[seqs, best] <= distance, best, at)
    path, accepted = path_to(draft, at)
    return verdict_of(draft, p, path, accepted, sample[seqs, at + 1])
