"""What stands between the products of a layer: rotary embedding, writes to the cache, and norms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    entry: torch.Tensor,
    block_table: torch.Tensor,
    entries_of_layer: torch.Tensor,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """Rotate queries and keys to their positions, and write keys and values into the cache.

    Args:
        qkv: [T, (Hq + 2 * Hkv) * D]: the heads of queries, keys and values of each token.
        cos: [positions, P]: the first P channels of a head rotate with the next P; the others do not.
        sin: as cos.
        position: [T] int32.
        entry: [T] int32: where to write, in entries of the sequence; -1 writes nothing.
        block_table: [R, M] int32; token t belongs to row t // (T / R).
        entries_of_layer: [blocks, Hkv, 2, BLOCK, D].
        query_norm: [D] weight of an RMSNorm of each query head, before the rotation.
        key_norm: as query_norm, for keys.

    Returns:
        The queries [T, Hq, D].
    """
    tokens = len(qkv)
    _, key_heads, _, block, dim = entries_of_layer.shape
    heads = qkv.shape[1] // dim - 2 * key_heads
    query = qkv.new_empty(tokens, heads, dim)
    _rotate_and_write[(tokens, heads + 2 * key_heads)](
        qkv,
        cos,
        sin,
        position,
        entry,
        block_table,
        entries_of_layer,
        query_norm,
        key_norm,
        query,
        epsilon,
        tokens // len(block_table),
        block_table.stride(0),
        HEADS=heads,
        KEY_HEADS=key_heads,
        D=dim,
        PADDED=triton.next_power_of_2(dim),
        PAIRS=cos.shape[1],
        BLOCK=block,
        BLOCK_STRIDE=entries_of_layer.stride(0),
        num_warps=1,
    )
    return query


@triton.jit
def _normed(channels, norm, channel, square, epsilon, D: tl.constexpr):
    """Return channels of a head in its RMSNorm, given the sum of the squares of all; as they are without a norm."""
    if norm is not None:
        weight = tl.load(norm + channel, mask=channel < D, other=0.0).to(tl.float32)
        channels = channels * tl.rsqrt(square / D + epsilon) * weight
    return channels


@triton.jit(
    do_not_specialize=["columns", "table_stride"],
    do_not_specialize_on_alignment=["position", "entry", "block_table"],
)
def _rotate_and_write(
    qkv,
    cos,
    sin,
    position,
    entry,
    block_table,
    entries,
    query_norm,
    key_norm,
    query,
    epsilon,
    columns,
    table_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """Rotate, write or copy one head of one token."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    channel = tl.arange(0, PADDED)
    exists = channel < D
    source = qkv + token.to(tl.int64) * (HEADS + 2 * KEY_HEADS) * D + head * D
    value = tl.load(source + channel, mask=exists, other=0.0)
    own = value.to(tl.float32)
    if head < HEADS + KEY_HEADS:
        partner = tl.where(channel < PAIRS, channel + PAIRS, tl.where(channel < 2 * PAIRS, channel - PAIRS, channel))
        other = tl.load(source + partner, mask=exists, other=0.0).to(tl.float32)
        square = tl.sum(own * own, 0)
        if head < HEADS:
            own = _normed(own, query_norm, channel, square, epsilon, D)
            other = _normed(other, query_norm, partner, square, epsilon, D)
        else:
            own = _normed(own, key_norm, channel, square, epsilon, D)
            other = _normed(other, key_norm, partner, square, epsilon, D)
        rotates = channel < 2 * PAIRS
        angle = tl.load(position + token).to(tl.int64) * PAIRS + tl.minimum(channel, partner)
        along = tl.load(cos + angle, mask=rotates, other=1.0).to(tl.float32)
        across = tl.load(sin + angle, mask=rotates, other=0.0).to(tl.float32)
        own = own * along + tl.where(channel < PAIRS, -other, other) * across
    result = own.to(value.dtype)
    if head < HEADS:
        tl.store(query + (token.to(tl.int64) * HEADS + head) * D + channel, result, mask=exists)
    else:
        to = tl.load(entry + token)
        if to >= 0:
            block = tl.load(block_table + token // columns * table_stride + to // BLOCK).to(tl.int64)
            slot = head - HEADS
            place = (slot % KEY_HEADS * 2 + slot // KEY_HEADS) * BLOCK + to % BLOCK
            tl.store(entries + block * BLOCK_STRIDE + place * D + channel, result, mask=exists)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the RMSNorm of x, [T, H]. The bits of a row do not depend on the number of rows."""
    out = torch.empty_like(x)
    width = x.shape[1]
    _rms_norm[(len(x),)](x, weight, out, epsilon, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=8)
    return out


@triton.jit
def _rms_norm(x, weight, out, epsilon, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Write the RMSNorm of one row."""
    channel = tl.arange(0, PADDED)
    exists = channel < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + channel
    row = tl.load(x + place, mask=exists, other=0.0)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    normed = wide * scale * tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + place, normed.to(row.dtype), mask=exists)
