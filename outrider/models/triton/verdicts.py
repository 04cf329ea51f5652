"""What the kernels of all rules share: distributions of draft tokens, and the verdict at the end."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.core.types import DraftKind

ONE_HOT = tl.constexpr(int(DraftKind.ONE_HOT))
WITHOUT_REPLACEMENT = tl.constexpr(int(DraftKind.WITHOUT_REPLACEMENT))


@triton.jit
def load_mass(rows, at, ids, vocab) -> tl.tensor:
    """Return `rows` [T, V] at row `at` and token ids `ids` [BLOCK]. Ids beyond the vocabulary have mass 0."""
    return tl.load(rows + at * vocab + ids, ids < vocab, other=0)


@triton.jit
def draft_mass(q, at, kind, token, ids, vocab, HAS_Q: tl.constexpr) -> tl.tensor:
    """Return the distribution that a draft token was sampled from, at token ids `ids` [BLOCK].

    Args:
        q: [Q, V].
        at: its row; negative: the token has none, so its distribution is 0.
        kind: a value of `DraftKind`.
        token: the draft token.
    """
    one_hot = tl.where(ids == token, 1.0, 0.0)
    if HAS_Q:
        stored = tl.load(q + at * vocab + ids, (ids < vocab) & (at >= 0) & (kind != ONE_HOT), other=0)
        return tl.where(kind == ONE_HOT, one_hot, stored)
    return tl.where(kind == ONE_HOT, one_hot, 0.0)


@triton.jit
def element(vector, index) -> tl.tensor:
    """Return element `index` of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, vector.shape[0]) == index, vector, 0), 0)


@triton.jit
def residual_mass(share, mass, draft) -> tl.tensor:
    """Return (share mass - draft)+ in the type of `mass`."""
    return tl.maximum(share.to(mass.dtype) * mass - draft.to(mass.dtype), 0.0)


@triton.jit
def write_verdict(
    b, before, path, accepted, bonus, tokens, p, p_at, out_path, out_accepted, out_bonus, out_logprob, size, vocab
) -> None:
    """Write the verdict of sequence b.

    Args:
        before: [NODES] the row of `p_at` that each emitted token is scored by.
        path: [NODES] the accepted nodes.
        accepted: their number.
        bonus: the token after them.
    """
    order = tl.arange(0, path.shape[0])
    is_draft = order < accepted
    tl.store(out_path + b * size + order, tl.where(is_draft, path, -1).to(tl.int64), order < size)
    tl.store(out_accepted + b, accepted.to(tl.int64))
    tl.store(out_bonus + b, bonus.to(tl.int64))
    emitted = order <= accepted
    token = tl.load(tokens + b * size + path, is_draft, other=0)
    token = tl.where(is_draft, token, bonus.to(tl.int64))
    at = tl.load(p_at + b * (1 + size) + before, emitted, other=0)
    prob = tl.load(p + at * vocab + token, emitted, other=1.0)
    tl.store(out_logprob + b * (1 + size) + order, tl.where(emitted, tl.log(prob), 0.0), order <= size)
