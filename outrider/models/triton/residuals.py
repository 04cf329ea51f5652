"""Kernels of the rules that subtract one draft token after another from the target distribution: siblings, traversal.

Each sum over the vocabulary waits for the one before, so one launch does all. SPLIT programs share a sequence: each
takes every SPLIT-th block of the vocabulary, and all take the same decisions. The sums of blocks meet in memory behind
a barrier and are added in order, so a verdict does not depend on SPLIT.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.models.triton.noise import accept_uniform, clamp_prob, find_block, find_token, target_uniform
from outrider.models.triton.verdicts import (
    ONE_HOT,
    WITHOUT_REPLACEMENT,
    draft_mass,
    element,
    load_mass,
    residual_mass,
    write_verdict,
)


@triton.jit
def wait_for_all(arrived, step, SPLIT: tl.constexpr) -> None:
    """Wait until all programs of a sequence have written what they had to write before barrier `step`, from 1 on."""
    tl.debug_barrier()
    if SPLIT > 1:
        seen = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") + 1
        while seen < step * SPLIT:
            seen = tl.atomic_add(arrived, 0, sem="acq_rel", scope="gpu")
        tl.debug_barrier()


@triton.jit
def all_sums(sums, arrived, step, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr) -> tl.tensor:
    """Return the sums of all blocks, [BLOCKS], that the programs of a sequence have written before barrier `step`.

    Odd and even steps have their own sums: a program may write those of the next step while another reads these.
    """
    wait_for_all(arrived, step, SPLIT)
    block = tl.arange(0, BLOCKS)
    return tl.load(sums + step % 2 * BLOCKS + block, block < tl.cdiv(vocab, BLOCK), other=0.0)


@triton.jit
def current_mass(p, p_row, residuals, slot, version, ids, vocab) -> tl.tensor:
    """Return what is left of p at a node, at token ids `ids`: p itself (version 0), or one of two stored residuals."""
    stored = tl.load(residuals + (slot * 2 + version - 1) * vocab + ids, (ids < vocab) & (version > 0), other=0)
    return tl.where(version > 0, stored, tl.load(p + p_row * vocab + ids, (ids < vocab) & (version == 0), other=0))


@triton.jit
def without(mass, ids, excluded, size) -> tl.tensor:
    """Return the mass [BLOCK] at `ids`, with 0 at the tokens `excluded` [NODES]; -1: none."""
    first = tl.min(ids, 0)
    hits = (excluded >= first) & (excluded < first + ids.shape[0])
    if tl.sum(hits.to(tl.int32), 0) > 0:
        node = 0
        while node < size:
            mass = tl.where(ids == element(excluded, node), 0.0, mass)
            node += 1
    return mass


@triton.jit
def sum_remaining(
    q, q_row, excluded, sums, arrived, step, size, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the mass of q without the excluded tokens."""
    for i in range(STEPS):
        block = tl.program_id(0) + i * SPLIT
        ids = block * BLOCK + tl.arange(0, BLOCK)
        mass = tl.load(q + q_row * vocab + ids, (ids < vocab) & (q_row >= 0), other=0)
        tl.store(sums + step % 2 * BLOCKS + block, tl.sum(without(mass, ids, excluded, size).to(tl.float64), 0))
    return tl.sum(all_sums(sums, arrived, step, vocab, BLOCK, BLOCKS, SPLIT), 0)


@triton.jit
def subtract_draft(
    p, p_row, residuals, slot, version, share, q, q_row, kind, token, excluded, divisor, sums, arrived, step, size,
    vocab, HAS_Q: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Store (share r - draft / divisor)+ as the version of the residual r that is not in use, and return its sum."""
    other = tl.where(version == 1, 2, 1)
    for i in range(STEPS):
        block = tl.program_id(0) + i * SPLIT
        ids = block * BLOCK + tl.arange(0, BLOCK)
        mass = current_mass(p, p_row, residuals, slot, version, ids, vocab)
        draft = draft_mass(q, q_row, kind, token, ids, vocab, HAS_Q)
        if HAS_Q:
            draft = without(draft, ids, excluded, size)
        mass = residual_mass(share, mass, draft / divisor.to(draft.dtype))
        tl.store(residuals + (slot * 2 + other - 1) * vocab + ids, mass, ids < vocab)
        tl.store(sums + step % 2 * BLOCKS + block, tl.sum(mass.to(tl.float64), 0))
    return tl.sum(all_sums(sums, arrived, step, vocab, BLOCK, BLOCKS, SPLIT), 0)


@triton.jit
def sample_current(
    p, p_row, residuals, slot, version, uniform, sums, arrived, step, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sample a token from what is left of p at a node."""
    for i in range(STEPS):
        block = tl.program_id(0) + i * SPLIT
        ids = block * BLOCK + tl.arange(0, BLOCK)
        mass = current_mass(p, p_row, residuals, slot, version, ids, vocab)
        tl.store(sums + step % 2 * BLOCKS + block, tl.sum(mass.to(tl.float64), 0))
    totals = all_sums(sums, arrived, step, vocab, BLOCK, BLOCKS, SPLIT)
    threshold = uniform * tl.sum(totals, 0)
    found, below = find_block(totals, threshold)
    ids = found * BLOCK + tl.arange(0, BLOCK)
    mass = current_mass(p, p_row, residuals, slot, version, ids, vocab)
    return find_token(mass.to(tl.float64), ids, below, threshold, vocab)


@triton.jit(do_not_specialize=["size", "levels"])
def descend_and_climb(
    tokens, parent, kind, count, p, p_at, q, q_at, seed, first, residuals, sums, arrived,
    out_path, out_accepted, out_bonus, out_logprob, size, vocab, levels,
    TRAVERSAL: tl.constexpr, HAS_Q: tl.constexpr, NODES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Verify a tree by `traversal` or `siblings`. Grid (SPLIT, B).

    Both enter the first child of a node that has not been visited. `traversal` decides on a node when all its children
    are rejected: it ends there, or subtracts the node from its parent and goes on at the parent. `siblings` decides on
    a child at once: it stays there and forgets the node above, or subtracts the child and goes on with the next one.

    Args:
        residuals: [B, levels, 2, V] what is left of p, in the type of p: for `traversal` at the nodes of a path, by
            depth, for `siblings` at the current node.
        sums: [B, 2, BLOCKS] float64.
        arrived: [B] int32, zero: the programs that have reached a barrier.
    """
    b = tl.program_id(1).to(tl.int64)
    tokens += b * size
    parent += b * size
    kind += b * size
    q_at += b * size
    p_at += b * (1 + size)
    sums += b * 2 * BLOCKS
    arrived += b
    seed_b = tl.load(seed + b)
    first_b = tl.load(first + b)
    order = tl.arange(0, NODES)
    inside = order < tl.load(count + b)
    all_tokens = tl.load(tokens + order, inside, other=-1)
    above = tl.load(parent + order, inside, other=-2).to(tl.int32)
    unvisited = inside & (all_tokens >= 0) & (all_tokens < vocab)
    excludable = unvisited & (tl.load(kind + order, inside, other=0) == WITHOUT_REPLACEMENT)
    divisors = tl.full((NODES,), 1.0, tl.float64)  # by node: the mass of q without the tokens of rejected siblings
    # By node + 1: the share of a node, the scale of its stored residual, and which version of it holds.
    shares = tl.full((NODES,), 1.0, tl.float64)
    scales = tl.full((NODES,), 1.0, tl.float64)
    versions = tl.zeros((NODES,), tl.int32)
    at = -1
    depth = 0
    step = 0
    active = True
    slot = b * levels  # the row of `residuals` for the node
    while active:
        node = tl.min(tl.where(unvisited & (above == at), order, NODES), 0)
        enters = node < NODES
        rejects = False
        if enters:
            unvisited = unvisited & (order != node)
            token = tl.load(tokens + node)
            divisor = tl.full((), 1.0, tl.float64)
            excluded = tl.where(excludable & (above == at) & (order < node), all_tokens, -1)
            prob = tl.full((), 1.0, tl.float64)
            if HAS_Q:
                q_row = tl.load(q_at + node)
                is_one_hot = tl.load(kind + node) == ONE_HOT
                if (tl.max(excluded, 0) >= 0) & (element(excludable.to(tl.int32), node) > 0):
                    step += 1
                    divisor = sum_remaining(
                        q, q_row, excluded, sums, arrived, step, size, vocab, BLOCK, BLOCKS, STEPS, SPLIT
                    )
                    divisors = tl.where(order == node, divisor, divisors)
                stored = tl.load(q + q_row * vocab + token, (q_row >= 0) & (is_one_hot == 0), other=0).to(tl.float64)
                is_excluded = (tl.max(tl.where(excluded == token, 1, 0), 0) > 0) & (divisor > 0)
                is_excluded = is_excluded & (element(excludable.to(tl.int32), node) > 0)
                stored = tl.where(is_excluded, 0.0, stored / tl.where(divisor > 0, divisor, 1.0))
                prob = tl.where(is_one_hot, 1.0, stored)
            version = element(versions, at + 1)
            left = current_mass(p, tl.load(p_at + at + 1), residuals, slot, version, token, vocab)
            ratio = element(shares * scales, at + 1) * left.to(tl.float64) / prob
            share = clamp_prob(ratio)
            if TRAVERSAL:
                shares = tl.where(order == node + 1, share, shares)
                at = node
                depth += 1
                slot += 1
            else:
                rejects = accept_uniform(seed_b, first_b, node) >= share
                if not rejects:
                    at = node
                    depth += 1
        elif TRAVERSAL:
            node = at
            rejects = (at >= 0) & (accept_uniform(seed_b, first_b, at) >= element(shares, at + 1))
            active = rejects
        else:
            active = False
        if rejects:
            if TRAVERSAL:
                at = tl.load(parent + node).to(tl.int32)
                depth -= 1
                slot -= 1
            token = tl.load(tokens + node)
            is_without = element(excludable.to(tl.int32), node) > 0
            divisor = element(divisors, node)
            excludes = is_without & (divisor > 0)
            excluded = tl.where(excludable & (above == at) & (order < node) & excludes, all_tokens, -1)
            share = element(shares, at + 1)
            version = element(versions, at + 1)
            q_row = tl.load(q_at + node) if HAS_Q else tl.full((), -1, tl.int64)
            step += 1
            total = subtract_draft(
                p, tl.load(p_at + at + 1), residuals, slot, version, share * element(scales, at + 1),
                q, q_row, tl.load(kind + node), token, excluded, tl.where(divisor > 0, divisor, 1.0),
                sums, arrived, step, size, vocab, HAS_Q, BLOCK, BLOCKS, STEPS, SPLIT,
            )  # fmt: skip
            is_parent = order == at + 1
            if TRAVERSAL:
                remaining = total + 1 - share
                shares = tl.where(is_parent, tl.where(remaining > 0, total / remaining, 1.0), shares)
            if total > 0:
                scales = tl.where(is_parent, 1 / total, scales)
                versions = tl.where(is_parent, tl.where(version == 1, 2, 1), versions)
    bonus = sample_current(
        p, tl.load(p_at + at + 1), residuals, slot, element(versions, at + 1),
        target_uniform(seed_b, first_b, depth), sums, arrived, step + 1, vocab, BLOCK, BLOCKS, STEPS, SPLIT,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        before = tl.where(order == depth, at + 1, 0)
        path = tl.zeros((NODES,), tl.int32)
        place = depth
        while at >= 0:
            place -= 1
            path = tl.where(order == place, at, path)
            at = tl.load(parent + at).to(tl.int32)
            before = tl.where(order == place, at + 1, before)
        write_verdict(
            b, before, path, depth, bonus, tokens - b * size, p, p_at - b * (1 + size),
            out_path, out_accepted, out_bonus, out_logprob, size, vocab,
        )  # fmt: skip
