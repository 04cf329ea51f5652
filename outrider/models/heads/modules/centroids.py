"""An LM head that computes the logits of the likeliest token clusters only, as in Gemma 4's assistants.

The vocabulary is divided into clusters of equal size, each with a centroid. The dot products with the centroids choose
some clusters, and only the tokens in them get logits. So a pass reads the centroids and a share of the LM head.
"""

import torch
from torch import nn
from torch.nn import functional

from outrider.models.heads.description import Centroids

TOKEN_ORDER = "centroid_head.token_order"  # name of the buffer in a draft head


class CentroidHead(nn.Module):
    """The centroids, and which tokens each cluster has. The rows of the LM head are those of the draft head."""

    token_order: torch.Tensor  # [C, V / C] the tokens of each cluster

    def __init__(self, width: int, vocab: int, centroids: Centroids) -> None:
        super().__init__()
        self._top_k = centroids.top_k
        self.centroids = nn.Linear(width, centroids.count, bias=False)
        self.register_buffer("token_order", torch.arange(vocab).view(centroids.count, -1))

    def forward(self, out: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [*, V] for outputs [*, H] and an LM head [V, H]. Tokens of other clusters get -inf."""
        clusters = self.centroids(out).topk(self._top_k, -1).indices
        tokens = self.token_order[clusters].flatten(-2)  # [*, top_k * V / C]
        if tokens.numel() < len(table):
            chosen = (table[tokens] @ out[..., None])[..., 0]
        else:  # gathering the rows of so many columns takes longer than multiplying all rows
            chosen = functional.linear(out, table).gather(-1, tokens)
        logits = torch.full((*out.shape[:-1], len(table)), -torch.inf, device=out.device)
        return logits.scatter_(-1, tokens, chosen.float())

    def loss(self, out: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of the clusters' probabilities, summed over n outputs.

        Args:
            out: [n, H] outputs. They get no gradient, so the loss trains the centroids only.
            target_probs: [n, V] the target's probabilities.
        """
        cluster_probs = target_probs[:, self.token_order].sum(-1)
        log_probs = self.centroids(out.detach()).float().log_softmax(-1)
        return (cluster_probs * -log_probs).sum()  # type: ignore[no-any-return]


@torch.no_grad()
def init_centroids(head: CentroidHead, table: torch.Tensor) -> None:
    """Cluster the rows of the LM head [V, H] by similarity. The centroid of a cluster is the mean of its rows."""
    rows = table.float()
    clusters = _bisect(rows, torch.arange(len(rows), device=rows.device), len(head.token_order))
    head.token_order.copy_(torch.stack(clusters))
    head.centroids.weight.copy_(rows[head.token_order].mean(1))


def _bisect(rows: torch.Tensor, index: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Divide the rows [V, H] at `index` into `count` groups of equal size.

    Each division is a cut across the direction in which the rows vary most.
    """
    if count == 1:
        return [index]
    left = count // 2
    centered = rows[index] - rows[index].mean(0)
    direction = centered[centered.square().sum(-1).argmax()]
    for _ in range(16):  # power iterations
        direction = functional.normalize(centered.T @ (centered @ direction), dim=0)
    ranked = index[(centered @ direction).argsort(stable=True)]
    cut = len(index) // count * left
    return _bisect(rows, ranked[:cut], left) + _bisect(rows, ranked[cut:], count - left)
