"""Kernels of the rules that subtract one draft token after another from the target distribution: siblings, traversal.

Each sum over the vocabulary waits for the one before, so one launch does all. SPLIT programs share a sequence: each
takes every SPLIT-th block of the vocabulary, and all take the same decisions. The sums of blocks meet in memory behind
a barrier and are added in order, so a verdict does not depend on SPLIT.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.models.triton.barrier import wait_for_all
from outrider.models.triton.noise import accepts, clamp_prob, find_block, find_token, target_uniform
from outrider.models.triton.verdicts import (
    ONE_HOT,
    WITHOUT_REPLACEMENT,
    draft_mass,
    element,
    residual_mass,
    write_verdict,
)


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
def excluded_tokens(tokens, above, replaces, node, at) -> tl.tensor:
    """Return the tokens of the rejected siblings that the q of a node excludes, [NODES]; -1: none.

    Args:
        tokens: [NODES] the draft tokens.
        above: [NODES] their parents.
        replaces: [NODES] bool: whether q still has the tokens of rejected siblings, or the node cannot be accepted.
        node: the node. Its earlier siblings are rejected.
        at: its parent.
    """
    order = tl.arange(0, tokens.shape[0])
    earlier = (above == at) & (order < node) & (replaces == 0) & (element(replaces.to(tl.int32), node) == 0)
    return tl.where(earlier, tokens, -1)


@triton.jit
def without(mass, ids, excluded, size) -> tl.tensor:
    """Return the mass [BLOCK] at `ids`, with 0 at the tokens `excluded` [NODES]."""
    first = tl.min(ids, 0)
    hits = (excluded >= first) & (excluded < first + ids.shape[0])
    if tl.sum(hits.to(tl.int32), 0) > 0:
        node = 0
        while node < size:
            mass = tl.where(ids == element(excluded, node), 0.0, mass)
            node += 1
    return mass


@triton.jit
def remaining_mass(
    q, q_row, excluded, sums, arrived, step, size, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the mass of q without the excluded tokens (1 if there are none), and the number of the next barrier."""
    mass_left = tl.full((), 1.0, tl.float64)
    if tl.max(excluded, 0) >= 0:
        for i in range(STEPS):
            block = tl.program_id(0) + i * SPLIT
            ids = block * BLOCK + tl.arange(0, BLOCK)
            mass = tl.load(q + q_row * vocab + ids, (ids < vocab) & (q_row >= 0), other=0)
            mass = without(mass, ids, excluded, size).to(tl.float64)
            tl.store(sums + step % 2 * BLOCKS + block, tl.sum(mass, 0))
        mass_left = tl.sum(all_sums(sums, arrived, step, vocab, BLOCK, BLOCKS, SPLIT), 0)
        step += 1
    return mass_left, step


@triton.jit
def draft_prob(q, q_row, kind, token, excluded, divisor, vocab, HAS_Q: tl.constexpr) -> tl.tensor:
    """Return the probability of a draft token under the distribution that it was sampled from.

    `divisor` is the mass of q without the excluded tokens. If it is 0, they are not excluded.
    """
    one_hot = tl.where(kind == ONE_HOT, 1.0, 0.0).to(tl.float64)
    if HAS_Q:
        stored = tl.load(q + q_row * vocab + token, (q_row >= 0) & (kind != ONE_HOT), other=0).to(tl.float64)
        is_excluded = (divisor > 0) & (tl.sum((excluded == token).to(tl.int32), 0) > 0)
        stored = tl.where(is_excluded, 0.0, stored / tl.where(divisor > 0, divisor, 1.0))
        return tl.where(kind == ONE_HOT, one_hot, stored)
    return one_hot


@triton.jit
def subtract_draft(
    p, p_row, residuals, slot, version, share, q, q_row, kind, token, excluded, divisor, sums, arrived, step, size,
    vocab, HAS_Q: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Store (share r - draft)+ as the version of the residual r that is not in use, and return its sum."""
    unused = tl.where(version == 1, 2, 1)
    excluded = tl.where(divisor > 0, excluded, -1)
    for i in range(STEPS):
        block = tl.program_id(0) + i * SPLIT
        ids = block * BLOCK + tl.arange(0, BLOCK)
        mass = current_mass(p, p_row, residuals, slot, version, ids, vocab)
        draft = draft_mass(q, q_row, kind, token, ids, vocab, HAS_Q)
        if HAS_Q:
            draft = without(draft, ids, excluded, size) / tl.where(divisor > 0, divisor, 1.0).to(draft.dtype)
        mass = residual_mass(share, mass, draft)
        tl.store(residuals + (slot * 2 + unused - 1) * vocab + ids, mass, ids < vocab)
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


@triton.jit
def end_at(
    b, at, depth, tokens, parent, p, p_at, residuals, slot, version, seed, first, sums, arrived, step,
    out_path, out_accepted, out_bonus, out_logprob, size, vocab,
    NODES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Accept the path to a node, and sample the bonus token from what is left of p there."""
    uniform = target_uniform(tl.load(seed + b), tl.load(first + b), depth)
    p_row = tl.load(p_at + b * (1 + size) + at + 1)
    bonus = sample_current(
        p, p_row, residuals, slot, version, uniform, sums, arrived, step, vocab, BLOCK, BLOCKS, STEPS, SPLIT
    )
    if tl.program_id(0) == 0:
        order = tl.arange(0, NODES)
        before = tl.where(order == depth, at + 1, 0)
        path = tl.zeros((NODES,), tl.int32)
        place = depth
        while at >= 0:
            place -= 1
            path = tl.where(order == place, at, path)
            at = tl.load(parent + b * size + at).to(tl.int32)
            before = tl.where(order == place, at + 1, before)
        write_verdict(
            b, before, path, depth, bonus, tokens, p, p_at,
            out_path, out_accepted, out_bonus, out_logprob, size, vocab,
        )  # fmt: skip


@triton.jit
def sample_rows(
    p, uniform, sums, arrived, tokens, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Sample a token from each row of p [rows, V], without a residual. Grid (SPLIT, rows)."""
    row = tl.program_id(1).to(tl.int64)
    token = sample_current(
        p, row, p, row, 0, tl.load(uniform + row), sums + row * 2 * BLOCKS, arrived + row, 1, vocab,
        BLOCK, BLOCKS, STEPS, SPLIT,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(tokens + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["size"])
def descend(
    tokens, parent, kind, count, p, p_at, q, q_at, seed, first, residuals, sums, arrived,
    out_path, out_accepted, out_bonus, out_logprob, size, vocab,
    HAS_Q: tl.constexpr, NODES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Verify a tree by `siblings`: accept a child, or subtract it from p and try the next one. Grid (SPLIT, B).

    Args:
        residuals: [B, 2, V] what is left of p at the current node, in the type of p.
        sums: [B, 2, BLOCKS] float64.
        arrived: [B] int32, zero: counts the programs that have reached a barrier.
    """
    b = tl.program_id(1).to(tl.int64)
    sums += b * 2 * BLOCKS
    arrived += b
    order = tl.arange(0, NODES)
    inside = order < tl.load(count + b)
    all_tokens = tl.load(tokens + b * size + order, inside, other=-1)
    above = tl.load(parent + b * size + order, inside, other=-2).to(tl.int32)
    untried = inside & (all_tokens >= 0) & (all_tokens < vocab)
    replaces = (tl.load(kind + b * size + order, inside, other=0) != WITHOUT_REPLACEMENT) | (untried == 0)
    at = -1
    depth = 0
    version = 0
    scale = tl.full((), 1.0, tl.float64)  # of the stored residual
    step = 1
    node = tl.min(tl.where(untried & (above == at), order, NODES), 0)
    while node < NODES:
        token = tl.load(tokens + b * size + node)
        node_kind = tl.load(kind + b * size + node)
        p_row = tl.load(p_at + b * (1 + size) + at + 1)
        q_row = tl.load(q_at + b * size + node) if HAS_Q else tl.full((), -1, tl.int64)
        excluded = excluded_tokens(all_tokens, above, replaces, node, at)
        divisor, step = remaining_mass(
            q, q_row, excluded, sums, arrived, step, size, vocab, BLOCK, BLOCKS, STEPS, SPLIT
        )
        left = scale * current_mass(p, p_row, residuals, b, version, token, vocab).to(tl.float64)
        prob = clamp_prob(left / draft_prob(q, q_row, node_kind, token, excluded, divisor, vocab, HAS_Q))
        if accepts(tl.load(seed + b), tl.load(first + b), node, prob):
            at = node
            depth += 1
            version = 0
            scale = tl.full((), 1.0, tl.float64)
        else:
            total = subtract_draft(
                p, p_row, residuals, b, version, scale, q, q_row, node_kind, token, excluded, divisor,
                sums, arrived, step, size, vocab, HAS_Q, BLOCK, BLOCKS, STEPS, SPLIT,
            )  # fmt: skip
            step += 1
            version = tl.where(total > 0, tl.where(version == 1, 2, 1), version)
            scale = tl.where(total > 0, 1 / total, scale)
        untried = untried & (order != node)
        node = tl.min(tl.where(untried & (above == at), order, NODES), 0)
    end_at(
        b, at, depth, tokens, parent, p, p_at, residuals, b, version, seed, first, sums, arrived, step,
        out_path, out_accepted, out_bonus, out_logprob, size, vocab, NODES, BLOCK, BLOCKS, STEPS, SPLIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size", "levels"])
def traverse(
    tokens, parent, kind, count, p, p_at, q, q_at, seed, first, residuals, sums, arrived,
    out_path, out_accepted, out_bonus, out_logprob, size, vocab, levels,
    HAS_Q: tl.constexpr, NODES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Verify a tree by `traversal`, from the leaves to the root. Grid (SPLIT, B).

    A loop enters the first child of the current node that has not been visited. If there is none, it ends at the node,
    or subtracts the node from its parent and goes on there.

    Args:
        residuals: [B, levels, 2, V] what is left of p at the nodes of a path, by depth, in the type of p.
        sums: [B, 2, BLOCKS] float64.
        arrived: [B] int32, zero: counts the programs that have reached a barrier.
    """
    b = tl.program_id(1).to(tl.int64)
    sums += b * 2 * BLOCKS
    arrived += b
    order = tl.arange(0, NODES)
    inside = order < tl.load(count + b)
    all_tokens = tl.load(tokens + b * size + order, inside, other=-1)
    above = tl.load(parent + b * size + order, inside, other=-2).to(tl.int32)
    unvisited = inside & (all_tokens >= 0) & (all_tokens < vocab)
    replaces = (tl.load(kind + b * size + order, inside, other=0) != WITHOUT_REPLACEMENT) | (unvisited == 0)
    divisors = tl.full((NODES,), 1.0, tl.float64)  # by node: of q
    # By node + 1: the share of a node, which version of its residual holds, and the scale of that.
    shares = tl.full((NODES,), 1.0, tl.float64)
    versions = tl.zeros((NODES,), tl.int32)
    scales = tl.full((NODES,), 1.0, tl.float64)
    at = -1
    depth = 0
    step = 1
    active = True
    while active:
        node = tl.min(tl.where(unvisited & (above == at), order, NODES), 0)
        enters = node < NODES
        if enters:
            unvisited = unvisited & (order != node)
        else:
            node = at
            share = element(shares, at + 1)
            active = at >= 0
            if active:
                active = accepts(tl.load(seed + b), tl.load(first + b), at, share) == 0
            if active:
                at = tl.load(parent + b * size + node).to(tl.int32)
                depth -= 1
        if active:
            token = tl.load(tokens + b * size + node)
            node_kind = tl.load(kind + b * size + node)
            p_row = tl.load(p_at + b * (1 + size) + at + 1)
            q_row = tl.load(q_at + b * size + node) if HAS_Q else tl.full((), -1, tl.int64)
            excluded = excluded_tokens(all_tokens, above, replaces, node, at)
            slot = b * levels + depth
            is_parent = order == at + 1
            version = element(versions, at + 1)
            share = element(shares, at + 1)
            scale = share * element(scales, at + 1)
            if enters:
                divisor, step = remaining_mass(
                    q, q_row, excluded, sums, arrived, step, size, vocab, BLOCK, BLOCKS, STEPS, SPLIT
                )
                divisors = tl.where(order == node, divisor, divisors)
                left = scale * current_mass(p, p_row, residuals, slot, version, token, vocab).to(tl.float64)
                prob = draft_prob(q, q_row, node_kind, token, excluded, divisor, vocab, HAS_Q)
                shares = tl.where(order == node + 1, clamp_prob(left / prob), shares)
                at = node
                depth += 1
            else:
                total = subtract_draft(
                    p, p_row, residuals, slot, version, scale, q, q_row, node_kind, token, excluded,
                    element(divisors, node), sums, arrived, step, size, vocab, HAS_Q, BLOCK, BLOCKS, STEPS, SPLIT,
                )  # fmt: skip
                step += 1
                remaining = total + 1 - share
                shares = tl.where(is_parent, tl.where(remaining > 0, total / remaining, 1.0), shares)
                if total > 0:  # otherwise the residual before holds
                    scales = tl.where(is_parent, 1 / total, scales)
                    versions = tl.where(is_parent, tl.where(version == 1, 2, 1), versions)
    end_at(
        b, at, depth, tokens, parent, p, p_at, residuals, b * levels + depth, element(versions, at + 1), seed, first,
        sums, arrived, step, out_path, out_accepted, out_bonus, out_logprob, size, vocab,
        NODES, BLOCK, BLOCKS, STEPS, SPLIT,
    )  # fmt: skip
