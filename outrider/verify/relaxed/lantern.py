"""Nearest-neighbor pooling of the target's probability, within a total variation distance (LANTERN).

LANTERN (Jang et al. 2024, arXiv 2410.03355) accepts a draft token x with the probability that the target gives to x and
its nearest neighbors, as far as this changes p by at most delta. The set of neighbors depends on x, so delta bounds the
change for one draft token. The distribution of the emitted tokens, over all draft tokens, can be much further from p.
Here the probability is pooled for all tokens at once, before x is known: what p has more than q at a token moves to
neighbors where q has more than p, the nearest first, until delta has moved. The result is a distribution within delta
of p, and an exact rule verifies the draft against it. So delta bounds the emitted tokens.
"""

from dataclasses import replace
from functools import partial

import torch

from outrider.core.noise import Noise
from outrider.core.types import Draft, Verdict
from outrider.verify.rules import VerifyFunction, block
from outrider.verify.verdict import acceptable_nodes, draft_probs, verdict_of


def lantern(neighbors: torch.Tensor, delta: float) -> VerifyFunction:
    """Return the rule. It verifies chains.

    Args:
        neighbors: [V, K] int64 tokens that are near a token, the nearest first; -1: no more.
        delta: largest total variation distance from p, between 0 and 1.
    """
    return partial(_verify, neighbors=neighbors, delta=delta)


def pool(p: torch.Tensor, q: torch.Tensor, neighbors: torch.Tensor, delta: float) -> torch.Tensor:
    """Return p [N, V] after moving at most `delta` of its mass between neighbors, toward q [N, V].

    The sum of min(p, q) over the tokens grows by what has moved. Tokens without probability under p get none.
    """
    missing = (q - p).clamp(min=0) * (p > 0)
    spare = (p - q).clamp(min=0)
    left = torch.full_like(p[:, :1], delta)
    for source in neighbors.unbind(1):
        asked = torch.where(source >= 0, missing, 0.0)
        at = source.clamp(min=0).expand_as(p)
        demand = torch.zeros_like(p).scatter_add_(1, at, asked)
        share = (spare / demand).nan_to_num(nan=0.0, posinf=1.0).clamp(max=1)
        moved = asked * share.gather(1, at)
        moved = moved * (left / moved.sum(1, keepdim=True)).nan_to_num(nan=0.0, posinf=1.0).clamp(max=1)
        taken = torch.zeros_like(p).scatter_add_(1, at, moved)
        p = (p + moved - taken).clamp(min=0)
        missing = missing - moved
        spare = (spare - taken).clamp(min=0)
        left = (left - moved.sum(1, keepdim=True)).clamp(min=0)
    return p


def _verify(draft: Draft, p: torch.Tensor, noise: Noise, *, neighbors: torch.Tensor, delta: float) -> Verdict:
    if not draft.size:
        return block(draft, p, noise)
    q = draft_probs(draft, p)
    pooled = pool(p[:, :-1].flatten(0, 1), q.flatten(0, 1), neighbors, delta).view_as(q)
    pooled = torch.where(acceptable_nodes(draft, p)[..., None], pooled, p[:, :-1])
    verdict = block(draft, torch.cat([pooled, p[:, -1:]], 1), noise)
    own = verdict_of(draft, p, verdict.path, verdict.accepted, verdict.bonus)
    return replace(verdict, logprob=own.logprob)  # under p, as for every other rule
