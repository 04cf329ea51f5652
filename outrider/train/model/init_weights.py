"""Initializes a new draft head from the weights of its target."""

import torch

from outrider.core.types import SharedWeights
from outrider.models.heads.modules.centroids import init_centroids
from outrider.models.heads.store import HeadModule


@torch.no_grad()
def init_weights(module: HeadModule, tables: SharedWeights) -> None:
    """Initialize the weights of `module` that have a counterpart in the target.

    A draft as wide as the target starts with the target's final norm and LM head. Its fusion layer
    passes on the state of the deepest layer that the draft reads. For a narrower draft, tables and
    states are projected to the directions in which the target's tables vary most.
    """
    description = module.description
    if description.width == description.target_hidden:
        projection = _init_same_width(module, tables)
    else:
        projection = _init_narrow(module, tables)
    fuse = getattr(module, "fuse", None)
    if fuse is not None:
        # Mostly the deepest layer, which is the most informative, and a little of the others.
        fuse.weight.mul_(0.1)[:, -description.target_hidden :] += projection.T
    if description.centroids:
        init_centroids(module.centroid_head, module.output_table())


def _init_same_width(module: HeadModule, tables: SharedWeights) -> torch.Tensor:
    """Copy the target's LM head and final norm. Return the identity as the projection [H, H] of states."""
    norm = getattr(module, "norm", None)
    if module.description.own_lm_head:
        module.output_table().copy_(tables.head[module.ids])
    if norm is not None:
        norm.weight.copy_(tables.norm)
    return torch.eye(module.description.width, device=tables.head.device)


def _init_narrow(module: HeadModule, tables: SharedWeights) -> torch.Tensor:
    """Project the target's tables to the draft's width. Return the projection [target H, H] of states."""
    description = module.description
    norm = getattr(module, "norm", None)
    normed_head = tables.head.float() * tables.norm.float()
    # The mean row adds the same number to all logits, which does not change the distribution.
    projection = principal_directions(normed_head - normed_head.mean(0), description.width)
    module.output_table().copy_((normed_head @ projection)[module.ids])
    embedding = tables.embedding.float()
    module.get_parameter("embedding.weight").copy_(embedding @ principal_directions(embedding, description.width))
    if norm is not None:  # a projected state has fewer components, but nearly the same length
        norm.weight.fill_((description.target_hidden / description.width) ** 0.5)
    return projection


def principal_directions(table: torch.Tensor, count: int) -> torch.Tensor:
    """Return the orthonormal columns [H, count] along which the rows of `table` [V, H] vary most, in falling order."""
    eigenvectors: torch.Tensor = torch.linalg.eigh(table.T @ table).eigenvectors  # by ascending eigenvalue
    return eigenvectors[:, -count:].flip(1)
