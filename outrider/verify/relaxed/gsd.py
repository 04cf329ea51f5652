"""Acceptance by clusters of tokens (grouped speculative decoding, So et al. 2025, arXiv 2508.07747).

The paper accepts a draft token with min(1, p(C) / q(C)) for a cluster C of tokens around it that have a similar
probability and a similar embedding, and after a rejection it samples from norm((p - q)+). Its clusters depend on the
draft token, so no distribution of the emitted tokens is exact, and no distance is bounded. Here the clusters are a
partition that does not depend on the draft token, and after a rejection a cluster is sampled from norm((p(C) - q(C))+).
So each cluster has its probability under p. Dynamic clusters divide a static cluster, at each position, into tokens of
similar probability under p.
"""

import torch

from outrider.verify.relaxed.groups import Groups, Partition, group_rejection
from outrider.verify.rules import VerifyFunction


def gsd(labels: torch.Tensor, size: int | None = None) -> VerifyFunction:
    """Return the rule that accepts a draft token for its cluster. It verifies chains.

    Args:
        labels: [V] int64 the static cluster of each token.
        size: most tokens of a dynamic cluster; None: the clusters are static.
    """
    count = int(labels.max()) + 1
    if size is None:
        static = Partition(labels[None], count)
        return group_rejection(lambda _: static)
    # The dynamic clusters of static cluster c have the numbers first[c], first[c] + 1, ...
    sizes = labels.bincount(minlength=count)
    parts = (sizes + size - 1) // size
    first = parts.cumsum(0) - parts
    begin = sizes.cumsum(0) - sizes
    total = int(parts.sum())

    def groups_of(p: torch.Tensor) -> Groups:
        likely_first = p.argsort(dim=-1, descending=True, stable=True)
        by_cluster = labels[likely_first].argsort(dim=-1, stable=True)
        order = likely_first.gather(1, by_cluster)  # [B, V] tokens by cluster, and by probability within a cluster
        cluster = labels[order]
        rank = torch.arange(len(labels), device=p.device) - begin[cluster]
        return Partition(torch.empty_like(order).scatter_(1, order, first[cluster] + rank // size), total)

    return group_rejection(groups_of)
