"""k-means clustering of embeddings (Lloyd 1982), for groups of similar tokens."""

import torch

MAX_DISTANCES = 1 << 24  # most distances that are computed at once, which take 64 MB
_ITERATIONS = 25


def kmeans(
    points: torch.Tensor, count: int, *, seed: int = 0, iterations: int = _ITERATIONS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster points by their Euclidean distance.

    Args:
        points: [N, D] float, at least `count` of them.
        count: number of clusters.
        seed: chooses the first centers. A cluster that loses all its points starts again at a random point.
        iterations: rounds of assignment and averaging.

    Returns:
        The clusters [N] of the points and the centers [count, D]. A cluster may be empty if points are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    centers = points[torch.randperm(len(points), generator=generator)[:count].to(points.device)].clone()
    for _ in range(iterations):
        labels = nearest(points, centers)
        size = labels.bincount(minlength=count)
        total = torch.zeros_like(centers).index_add_(0, labels, points)
        again = torch.randint(len(points), (count,), generator=generator).to(points.device)
        centers = torch.where((size > 0)[:, None], total / size.clamp(min=1)[:, None], points[again])
    return nearest(points, centers), centers


def nearest(points: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Return [N], the index of the center [C, D] that is nearest to each point [N, D]."""
    rows = max(MAX_DISTANCES // len(centers), 1)
    starts = range(0, len(points), rows)
    return torch.cat([torch.cdist(points[start : start + rows], centers).argmin(1) for start in starts])
