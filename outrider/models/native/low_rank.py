"""Approximate the LM head of a draft model by a product of two small matrices, which choose its candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from outrider.models.native.arena import Arena
from outrider.models.native.pack import GROUP, PackedWeight, pack

_REDUCE_BITS = 16  # of the smaller factor
_BITS = 4  # of the larger factor: with twice the rank, it is better than one of 8 bits
_SAMPLED_ROWS = 1 << 15  # of the head, from which the factors are computed
_DAMPING = 0.05  # share of the mean variance that is added to that of each input


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankHead:
    """Factors whose product approximates an LM head: logits = rank (reduce h)."""

    reduce: PackedWeight  # [r, hidden]
    rank: PackedWeight  # [vocab, r], with 4 bits

    @property
    def nbytes(self) -> int:
        """Size in bytes, with padding."""
        return self.reduce.nbytes + self.rank.nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        rank = self.rank
        named = {"reduce": self.reduce.words, "rank": rank.words, "scale": rank.scale, "minimum": rank.minimum}
        named["bias"] = rank.bias
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], *, vocab: int, hidden: int) -> LowRankHead:
        """Return the factors of an LM head [vocab, hidden] of which these are the `tensors`."""
        arena = Arena()
        kept = {name: arena.keep(tensor) for name, tensor in tensors.items()}
        size = _rank(hidden)
        reduce = PackedWeight(
            words=kept["reduce"], scale=None, minimum=None, bias=None, shape=(size, hidden), bits=_REDUCE_BITS
        )
        rank = PackedWeight(
            words=kept["rank"],
            scale=kept["scale"],
            minimum=kept["minimum"],
            bias=kept.get("bias"),
            shape=(vocab, size),
            bits=_BITS,
        )
        return cls(reduce=reduce, rank=rank)


def factorize(head: Iterable[torch.Tensor], bias: torch.Tensor | None, inputs: torch.Tensor) -> LowRankHead:
    """Return the factors of a head with the smallest mean square error of logits.

    That is the singular value decomposition of the head times the square root of the covariance of
    its inputs.

    Args:
        head: parts [outputs, hidden] of the LM head, in order.
        bias: [vocab] of the head, or None.
        inputs: [N, hidden] typical inputs.
    """
    parts = [part.bfloat16() for part in head]
    root, inverse = _square_roots(inputs)
    step = -(-sum(map(len, parts)) // _SAMPLED_ROWS)
    rows = torch.cat([part[::step] for part in parts]).float()
    _, vectors = torch.linalg.eigh(root @ (rows.T @ rows) @ root)
    basis = vectors[:, -_rank(inputs.shape[1]) :]
    expand = root @ basis
    rank = torch.cat([part.float() @ expand for part in parts])
    return LowRankHead(reduce=pack(basis.T @ inverse, bits=_REDUCE_BITS), rank=pack(rank, bias, bits=_BITS))


def _rank(hidden: int) -> int:
    """Return the rank of the factors: half of the width, in whole groups."""
    return min(-(-hidden // 2 // GROUP) * GROUP, hidden)


def _square_roots(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the square root of the covariance of inputs around 0, and its inverse."""
    covariance = inputs.T @ inputs / len(inputs)
    covariance.diagonal().add_(_DAMPING * covariance.diagonal().mean())
    values, vectors = torch.linalg.eigh(covariance)
    deviations = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    return (vectors * deviations) @ vectors.T, (vectors / deviations) @ vectors.T
