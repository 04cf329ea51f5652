"""Kernels of the rules whose sums over the vocabulary do not wait for one another: walk, coupled, rejection, block.

`sum_masses` sums all blocks of the vocabulary at all nodes. One program per sequence then decides, and samples from one
block. Sums and decisions are in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.models.triton.noise import (
    accepts,
    clamp_prob,
    find_block,
    find_token,
    race_uniform,
    target_uniform,
)
from outrider.models.triton.verdicts import ONE_HOT, draft_mass, load_mass, residual_mass, write_verdict

WALK, COUPLED, REJECTION, BLOCK_RULE = (tl.constexpr(number) for number in range(4))


@triton.jit
def chain_ratios(
    b, tokens, kind, count, p, p_at, q, q_at, size, vocab, HAS_Q: tl.constexpr, NODES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the acceptable length of a chain and p(x) / q(x) at each draft token, [NODES] float64; NaN becomes 0."""
    node = tl.arange(0, NODES)
    inside = node < tl.load(count + b)
    token = tl.load(tokens + b * size + node, inside, other=-1)
    length = tl.min(tl.where((token >= 0) & (token < vocab), NODES, node), 0)
    inside = node < length
    at = tl.load(p_at + b * (1 + size) + node, inside, other=0)
    target = tl.load(p + at * vocab + token, inside, other=0).to(tl.float64)
    is_one_hot = tl.load(kind + b * size + node, inside, other=0) == ONE_HOT
    draft = tl.where(is_one_hot, 1.0, 0.0).to(tl.float64)
    if HAS_Q:
        q_row = tl.load(q_at + b * size + node, inside, other=-1)
        stored = tl.load(q + q_row * vocab + token, inside & (q_row >= 0), other=0).to(tl.float64)
        draft = tl.where(is_one_hot, draft, stored)
    ratio = target / draft
    return length, tl.where(inside & (ratio > 0), ratio, 0.0)


@triton.jit
def depth_of(parent, node) -> tl.tensor:
    """Return the number of draft tokens on the path to a node; 0 for -1, the root."""
    depth = 0
    while node >= 0:
        node = tl.load(parent + node).to(tl.int32)
        depth += 1
    return depth


@triton.jit
def running_shares(ratio, length) -> tl.tensor:
    """Return P_i = min(1, P_{i-1} r_i) at index i, with P_0 = 1 (Sun et al. 2024)."""
    order = tl.arange(0, ratio.shape[0])
    shares = tl.where(order == 0, 1.0, 0.0).to(tl.float64)
    i = 0
    while i < length:
        last = tl.sum(tl.where(order == i, shares * ratio, 0.0), 0)
        shares = tl.where(order == i + 1, clamp_prob(last), shares)
        i += 1
    return shares


@triton.jit(do_not_specialize=["size"])
def sum_masses(
    tokens, parent, kind, count, p, p_at, q, q_at, seed, first, sums, winners, size, vocab,
    RULE: tl.constexpr, HAS_Q: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Sum one block of the vocabulary at one node.

    Grid (blocks, 1 + N, B). Writes `sums` [B, 1 + N, 2, blocks] float64: the mass of p, and that of the residual
    (P_i p - q)+ that the bonus token is sampled from if the next draft token is the first rejected one. For `coupled`
    writes the earliest arrival of the race instead, and its id to `winners` [B, 1 + N, blocks].
    """
    block = tl.program_id(0)
    node = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(0)
    if node > tl.load(count + b):
        return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    mass = load_mass(p, tl.load(p_at + b * (1 + size) + node), ids, vocab)
    out = sums + (b * (1 + size) + node) * 2 * blocks + block
    if RULE == COUPLED:
        depth = depth_of(parent + b * size, node - 1)
        uniform = race_uniform(tl.load(seed + b), tl.load(first + b), depth, ids)
        # 1 - u has 48 bits, so it is exact.
        arrival = tl.where(mass > 0, -tl.log(1 - uniform) / mass.to(tl.float64), float("inf"))
        earliest, winner = tl.min(arrival, 0, return_indices=True)
        tl.store(out, earliest)
        tl.store(winners + (b * (1 + size) + node) * blocks + block, block * BLOCK + winner)
    else:
        tl.store(out, tl.sum(mass.to(tl.float64), 0))
    if RULE >= REJECTION:
        length, ratio = chain_ratios(b, tokens, kind, count, p, p_at, q, q_at, size, vocab, HAS_Q, NODES)
        if node < length:
            share = tl.full((), 1.0, tl.float64)
            if RULE == BLOCK_RULE:
                order = tl.arange(0, NODES)
                share = tl.sum(tl.where(order == node, running_shares(ratio, length), 0.0), 0)
            token = tl.load(tokens + b * size + node)
            q_row = tl.load(q_at + b * size + node) if HAS_Q else tl.full((), -1, tl.int64)
            draft = draft_mass(q, q_row, tl.load(kind + b * size + node), token, ids, vocab, HAS_Q)
            tl.store(out + blocks, tl.sum(residual_mass(share, mass, draft).to(tl.float64), 0))


@triton.jit(do_not_specialize=["size"])
def decide_chain(
    tokens, kind, count, p, p_at, q, q_at, seed, first, sums, out_path, out_accepted, out_bonus, out_logprob,
    size, vocab,
    RULE: tl.constexpr, HAS_Q: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Decide how much of a chain is accepted by `rejection` or `block`, and sample the bonus token. Grid (B,).

    `sums` is written by `sum_masses`. NODES is above N, and BLOCKS at least the number of blocks; powers of two.
    """
    b = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(vocab, BLOCK)
    seed_b = tl.load(seed + b)
    first_b = tl.load(first + b)
    order = tl.arange(0, NODES)
    block = tl.arange(0, BLOCKS)
    length, ratio = chain_ratios(b, tokens, kind, count, p, p_at, q, q_at, size, vocab, HAS_Q, NODES)
    if RULE == REJECTION:
        shares = tl.full((NODES,), 1.0, tl.float64)
        prob = tl.where(order < length, clamp_prob(ratio), 0.0)
        accepted = tl.min(tl.where(accepts(seed_b, first_b, order, prob), NODES, order), 0)
    else:
        shares = running_shares(ratio, length)
        pieces = sums + ((b * (1 + size) + order[:, None]) * 2 + 1) * blocks + block[None, :]
        inner = (order > 0) & (order < length)
        excess = tl.sum(tl.load(pieces, inner[:, None] & (block[None, :] < blocks), other=0.0), 1)
        remaining = excess + 1 - shares
        prob = tl.where(order == length, shares, tl.where(remaining > 0, excess / remaining, 1.0))
        prob = tl.where((order > 0) & (order <= length), clamp_prob(prob), 0.0)
        accepted = tl.max(tl.where(accepts(seed_b, first_b, order - 1, prob), order, 0), 0)
    out = sums + (b * (1 + size) + accepted) * 2 * blocks + block
    plain = tl.load(out, block < blocks, other=0.0)
    residual = tl.load(out + blocks, (block < blocks) & (accepted < length), other=0.0)
    is_residual = tl.sum(residual, 0) > 0
    totals = tl.where(is_residual, residual, plain)
    threshold = target_uniform(seed_b, first_b, accepted) * tl.sum(totals, 0)
    found, below = find_block(totals, threshold)
    ids = found * BLOCK + tl.arange(0, BLOCK)
    mass = load_mass(p, tl.load(p_at + b * (1 + size) + accepted), ids, vocab)
    is_draft = accepted < length
    token = tl.load(tokens + b * size + accepted, is_draft, other=0)
    q_row = tl.load(q_at + b * size + accepted, is_draft, other=-1) if HAS_Q else tl.full((), -1, tl.int64)
    draft = draft_mass(q, q_row, tl.load(kind + b * size + accepted, is_draft, other=0), token, ids, vocab, HAS_Q)
    share = tl.sum(tl.where(order == accepted, shares, 0.0), 0)
    mass = tl.where(is_residual, residual_mass(share, mass, draft), mass)
    bonus = find_token(mass.to(tl.float64), ids, below, threshold, vocab)
    write_verdict(
        b, order, order, accepted, bonus, tokens, p, p_at, out_path, out_accepted, out_bonus, out_logprob, size, vocab
    )


@triton.jit(do_not_specialize=["size"])
def follow_samples(
    tokens, parent, count, p, p_at, seed, first, sums, winners, out_path, out_accepted, out_bonus, out_logprob,
    size, vocab,
    RULE: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Sample a token at each node, for `walk` or `coupled`, and descend while it is a child of the node. Grid (B,)."""
    b = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(vocab, BLOCK)
    order = tl.arange(0, NODES)
    block = tl.arange(0, BLOCKS)
    inside = order < tl.load(count + b)
    token = tl.load(tokens + b * size + order, inside, other=-1)
    above = tl.load(parent + b * size + order, inside, other=-2).to(tl.int32)
    before = tl.zeros((NODES,), tl.int32)
    path = tl.zeros((NODES,), tl.int32)
    accepted = 0
    at = -1
    sample = 0
    descends = True
    while descends:
        out = sums + (b * (1 + size) + at + 1) * 2 * blocks + block
        if RULE == COUPLED:
            arrival = tl.load(out, block < blocks, other=float("inf"))
            _, winner = tl.min(arrival, 0, return_indices=True)
            sample = tl.load(winners + (b * (1 + size) + at + 1) * blocks + winner)
        else:
            totals = tl.load(out, block < blocks, other=0.0)
            threshold = target_uniform(tl.load(seed + b), tl.load(first + b), accepted) * tl.sum(totals, 0)
            found, below = find_block(totals, threshold)
            ids = found * BLOCK + tl.arange(0, BLOCK)
            mass = load_mass(p, tl.load(p_at + b * (1 + size) + at + 1), ids, vocab)
            sample = find_token(mass.to(tl.float64), ids, below, threshold, vocab)
        child = tl.min(tl.where((above == at) & (token == sample) & inside, order, NODES), 0)
        descends = child < NODES
        before = tl.where(order == accepted, at + 1, before)
        path = tl.where(order == accepted, child, path)
        accepted += tl.where(descends, 1, 0)
        at = child
    write_verdict(
        b, before, path, accepted, sample, tokens, p, p_at, out_path, out_accepted, out_bonus, out_logprob, size, vocab
    )
