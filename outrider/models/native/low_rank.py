"""Approximate the LM head of a draft model by a product of two small matrices, which choose its candidates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from outrider.models.native.pack import GROUP, PackedWeight, pack

_BITS = 4  # of the larger factor: with twice the rank, it is better than one of 8 bits
_SAMPLED_ROWS = 1 << 15  # of the head, from which the factors are computed
_DAMPING = 0.05  # share of the mean variance that is added to that of each input


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankHead:
    """Factors whose product approximates an LM head: logits = rank (reduce h)."""

    reduce: PackedWeight  # [r, hidden]
    rank: PackedWeight  # [vocab, r], with 4 bits
    candidates: int  # panels of 32 tokens that get exact logits

    @property
    def nbytes(self) -> int:
        """Size in bytes, with padding."""
        return self.reduce.nbytes + self.rank.nbytes


def factorize(
    head: Iterable[torch.Tensor], bias: torch.Tensor | None, inputs: torch.Tensor, *, candidates: int
) -> LowRankHead:
    """Return the factors of a head with the smallest mean square error of logits.

    That is the singular value decomposition of the head times the square root of the covariance of
    its inputs.

    Args:
        head: parts [outputs, hidden] of the LM head, in order.
        bias: [vocab] of the head, or None.
        inputs: [N, hidden] typical inputs.
        candidates: as in `LowRankHead`.
    """
    parts = [part.bfloat16() for part in head]
    hidden = inputs.shape[1]
    size = min(-(-hidden // 2 // GROUP) * GROUP, hidden)
    root, inverse = _square_roots(inputs)
    step = -(-sum(map(len, parts)) // _SAMPLED_ROWS)
    rows = torch.cat([part[::step] for part in parts]).float() @ root
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    basis = vectors[:, -size:]
    expand = root @ basis
    rank = torch.cat([part.float() @ expand for part in parts])
    return LowRankHead(reduce=pack(basis.T @ inverse), rank=pack(rank, bias, bits=_BITS), candidates=candidates)


def _square_roots(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the square root of the covariance of inputs around 0, and its inverse."""
    covariance = inputs.T @ inputs / len(inputs)
    covariance.diagonal().add_(_DAMPING * covariance.diagonal().mean())
    values, vectors = torch.linalg.eigh(covariance)
    deviations = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    return (vectors * deviations) @ vectors.T, (vectors / deviations) @ vectors.T
