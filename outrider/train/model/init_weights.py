"""Where the weights of a fresh draft begin: with what the target knows already."""

from __future__ import annotations

import torch

from outrider.core.types import SharedWeights
from outrider.heads.store import HeadModule


@torch.no_grad()
def init_weights(module: HeadModule, tables: SharedWeights) -> None:
    """Let a fresh draft speak as its target does, as far as the two have tables and norms in common.

    A draft of the target's width begins with the target's last norm and output layer, and with a fusion that hands on
    the highest tap. A narrower one sees all of them through the directions in which the target's tables vary most.
    """
    it = module.description
    through = _narrowed(module, tables) if it.width != it.target_hidden else _alike(module, tables)
    fuse = getattr(module, "fuse", None)
    if fuse is not None:  # the highest tap, which says most, and a little of the others
        fuse.weight.mul_(0.1)[:, -it.target_hidden :] += through.T


def _alike(module: HeadModule, tables: SharedWeights) -> torch.Tensor:
    """Begin with the target's output layer and norm; returns how its states are seen [H, H]."""
    norm = getattr(module, "norm", None)
    if module.description.own_lm_head:
        module.output_table().copy_(tables.head[module.ids])
    if norm is not None:
        norm.weight.copy_(tables.norm)
    return torch.eye(module.description.width, device=tables.head.device)


def _narrowed(module: HeadModule, tables: SharedWeights) -> torch.Tensor:
    """Begin with what is left of the target's tables; returns how its states are seen [target H, H]."""
    it, norm = module.description, getattr(module, "norm", None)
    weighted = tables.head.float() * tables.norm.float()
    through = directions(weighted - weighted.mean(0), it.width)  # a law says nothing of what all logits share
    module.output_table().copy_((weighted @ through)[module.ids])
    table = tables.embedding.float()
    module.get_parameter("embedding.weight").copy_(table @ directions(table, it.width))
    if norm is not None:  # a state keeps nearly all of its length in fewer numbers
        norm.weight.fill_((it.target_hidden / it.width) ** 0.5)
    return through


def directions(table: torch.Tensor, count: int) -> torch.Tensor:
    """Orthonormal columns [H, count] in which the rows of a table [V, H] vary most, the first one most of all."""
    rising: torch.Tensor = torch.linalg.eigh(table.T @ table).eigenvectors
    return rising[:, -count:].flip(1)
