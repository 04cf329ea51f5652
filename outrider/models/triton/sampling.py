"""Compute the target distribution on a GPU in one launch, without sorting the vocabulary.

Top-k and top-p keep the largest values whose count or mass reaches a target. A bisection finds the smallest kept
value: each step sums the values above a threshold, and narrows the range to values that occur. As in `residuals.py`,
SPLIT programs share a row, and the sums of its blocks are added in order, so a result does not depend on SPLIT.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.models.triton.barrier import block_options, launch_options, wait_for_all
from outrider.models.triton.residuals import sample_rows
from outrider.verify.sampling import SamplingTensors

IDS_AT_ONCE = 8192  # token ids that one program takes at once


@triton.jit
def _put(scratch, step, block, first, second, third, BLOCKS: tl.constexpr) -> None:
    """Store three numbers of a block. Odd and even steps have their own."""
    place = scratch + step % 2 * 3 * BLOCKS + block
    tl.store(place, first)
    tl.store(place + BLOCKS, second)
    tl.store(place + 2 * BLOCKS, third)


@triton.jit
def _get(scratch, step, place: tl.constexpr, other, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """Load one of the three numbers of all blocks, [BLOCKS]; `other` beyond the last block."""
    block = tl.arange(0, BLOCKS)
    return tl.load(scratch + (step % 2 * 3 + place) * BLOCKS + block, block < tl.cdiv(vocab, BLOCK), other=other)


@triton.jit
def _smallest_kept(
    row, low, high, target, scratch, arrived, step, vocab, BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the largest value v of a row such that the values from v on reach `target`, and the next step.

    Args:
        row: [V] float32.
        low: the values from here on reach the target.
        high: those from here on do not.
        target: a number of values, or with BY_MASS their sum. Values are then above 0.
    """
    middle = high
    below = high
    active = low < high
    while active:
        # The scale of masses is logarithmic.
        middle = tl.sqrt(low) * tl.sqrt(high) if BY_MASS else low * 0.5 + high * 0.5
        middle = tl.minimum(middle, below)
        middle = tl.where(middle > low, middle, below)
        for i in range(STEPS):
            block = tl.program_id(0) + i * SPLIT
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(row + ids, ids < vocab, other=float("-inf"))
            is_above = value >= middle
            weight = tl.sum(tl.where(is_above, value if BY_MASS else 1.0, 0.0), 0)
            smallest = tl.min(tl.where(is_above, value, float("inf")), 0)
            largest = tl.max(tl.where(is_above, float("-inf"), value), 0)
            _put(scratch, step, block, weight, smallest, largest, BLOCKS)
        wait_for_all(arrived, step, SPLIT)
        reached = tl.sum(_get(scratch, step, 0, 0.0, vocab, BLOCK, BLOCKS), 0) >= target
        above = tl.min(_get(scratch, step, 1, float("inf"), vocab, BLOCK, BLOCKS), 0).to(tl.float32)
        largest_below = tl.max(_get(scratch, step, 2, float("-inf"), vocab, BLOCK, BLOCKS), 0).to(tl.float32)
        step += 1
        if reached:
            low = above
        else:
            high = middle
            below = largest_below
        # Without a value between the bounds, `low` is the answer. A comparison with NaN ends the search as well.
        active = (low < high) & (below > low)
    return low, step


@triton.jit(do_not_specialize=["nodes"])
def filter_rows(
    logits, settings, probs, scratch, arrived, vocab, nodes,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Apply temperature, top-k, top-p and min-p to one row. Grid (SPLIT, rows).

    Triton cannot launch a kernel with a parameter `params`, which is a name of its own.

    Args:
        logits: [rows, V].
        settings: [rows / nodes, 4] float32: the fields of `DrawParams`.
        probs: [rows, V] float32, the result. Until then it holds the scaled logits, then exp(logit - maximum).
        scratch: [rows, 2, 3, BLOCKS] float64.
        arrived: [rows] int32, zero.
    """
    index = tl.program_id(1).to(tl.int64)
    settings += index // nodes * 4
    temperature = tl.load(settings)
    top_k = tl.load(settings + 1)
    top_p = tl.load(settings + 2)
    min_p = tl.load(settings + 3)
    row = probs + index * vocab
    scratch += index * 6 * BLOCKS
    arrived += index
    step = 1
    scale = tl.where(temperature > 0, temperature, 1.0)
    for i in range(STEPS):
        block = tl.program_id(0) + i * SPLIT
        ids = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + index * vocab + ids, ids < vocab, other=float("-inf")).to(tl.float32)
        value = tl.div_rn(value, tl.full(value.shape, scale, tl.float32))
        tl.store(row + ids, value, ids < vocab)
        largest, place = tl.max(value, 0, return_indices=True)
        smallest = tl.min(tl.where(value > float("-inf"), value, float("inf")), 0)
        _put(scratch, step, block, largest, (block * BLOCK + place).to(tl.float64), smallest, BLOCKS)
    wait_for_all(arrived, step, SPLIT)
    maxima = _get(scratch, step, 0, float("-inf"), vocab, BLOCK, BLOCKS)
    places = _get(scratch, step, 1, 0.0, vocab, BLOCK, BLOCKS)
    smallest = tl.min(_get(scratch, step, 2, float("inf"), vocab, BLOCK, BLOCKS), 0).to(tl.float32)
    maximum, best_block = tl.max(maxima, 0, return_indices=True)
    best = tl.sum(tl.where(tl.arange(0, BLOCKS) == best_block, places, 0.0), 0).to(tl.int32)
    maximum = maximum.to(tl.float32)
    step += 1
    if temperature == 0:
        for i in range(STEPS):
            ids = (tl.program_id(0) + i * SPLIT) * BLOCK + tl.arange(0, BLOCK)
            tl.store(row + ids, tl.where(ids == best, 1.0, 0.0), ids < vocab)
        return
    if top_k < vocab:
        # One value from the maximum on: the maximum is no upper bound if it is the answer.
        smallest, step = _smallest_kept(
            row, smallest, maximum + tl.maximum(tl.abs(maximum), 1.0), top_k, scratch, arrived, step, vocab, False,
            BLOCK, BLOCKS, STEPS, SPLIT,
        )  # fmt: skip
    for i in range(STEPS):
        block = tl.program_id(0) + i * SPLIT
        ids = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(row + ids, ids < vocab, other=float("-inf"))
        value = tl.where(value >= smallest, tl.exp(value - maximum), 0.0)
        tl.store(row + ids, value, ids < vocab)
        _put(scratch, step, block, tl.sum(value, 0), 0.0, 0.0, BLOCKS)
    wait_for_all(arrived, step, SPLIT)
    total = tl.sum(_get(scratch, step, 0, 0.0, vocab, BLOCK, BLOCKS), 0)
    step += 1
    lowest = tl.full((), -1.0, tl.float32)  # the smallest value that top-p keeps
    ties = tl.full((), 0.0, tl.float64)  # how many of the values equal to it are kept
    if top_p < 1:
        # All values below this have less than 1 - top_p together.
        bound = (total * (1 - top_p) / vocab).to(tl.float32)
        bound = tl.maximum(tl.minimum(bound, 1.0), 1e-37)
        lowest, step = _smallest_kept(
            row, bound, tl.full((), 2.0, tl.float32), total * top_p, scratch, arrived, step, vocab, True,
            BLOCK, BLOCKS, STEPS, SPLIT,
        )  # fmt: skip
    if (top_p < 1) | (min_p > 0):
        for i in range(STEPS):
            block = tl.program_id(0) + i * SPLIT
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(row + ids, ids < vocab, other=0.0)
            above = tl.where(value > lowest, value, 0.0)
            kept = tl.sum(tl.where(value >= min_p, above, 0.0), 0)
            _put(scratch, step, block, kept, tl.sum(above, 0), tl.sum(tl.where(value == lowest, 1.0, 0.0), 0), BLOCKS)
        wait_for_all(arrived, step, SPLIT)
        ties = tl.ceil((total * top_p - tl.sum(_get(scratch, step, 1, 0.0, vocab, BLOCK, BLOCKS), 0)) / lowest)
        ties = tl.minimum(tl.maximum(ties, 1.0), tl.sum(_get(scratch, step, 2, 0.0, vocab, BLOCK, BLOCKS), 0))
        ties = tl.where((lowest > 0) & (lowest >= min_p), ties, 0.0)
        total = tl.sum(_get(scratch, step, 0, 0.0, vocab, BLOCK, BLOCKS), 0) + ties * lowest
    for i in range(STEPS):
        block = tl.program_id(0) + i * SPLIT
        ids = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(row + ids, ids < vocab, other=0.0)
        keeps = (value > lowest) & (value >= min_p)
        if ties > 0:
            is_tie = value == lowest
            earlier = tl.sum(
                tl.where(tl.arange(0, BLOCKS) < block, _get(scratch, step, 2, 0.0, vocab, BLOCK, BLOCKS), 0.0), 0
            )
            rank = earlier + tl.cumsum(is_tie.to(tl.int32), 0)  # from 1 on, in the order of ids
            keeps = keeps | (is_tie & (rank <= ties))
        tl.store(row + ids, tl.where(keeps, value / total.to(tl.float32), 0.0), ids < vocab)


def target_probs(logits: torch.Tensor, sampling: SamplingTensors, of: torch.Tensor | slice) -> torch.Tensor:
    """Do what `verify.sampling.target_probs` does. Tokens with equal float32 probabilities count as ties of top-p."""
    logits = logits.contiguous()
    _, nodes, vocab = logits.shape
    rows = logits.shape[0] * nodes
    probs = torch.empty_like(logits, dtype=torch.float32)
    blocks = block_options(logits.device, rows, vocab, IDS_AT_ONCE)
    filter_rows[(blocks["SPLIT"], rows)](
        logits,
        sampling.draw_params[of].contiguous(),
        probs,
        torch.empty(rows, 6, blocks["BLOCKS"], dtype=torch.float64, device=logits.device),
        torch.zeros(rows, dtype=torch.int32, device=logits.device),
        vocab,
        nodes,
        **blocks,
        **launch_options(blocks["SPLIT"]),
        num_warps=16,
    )
    return probs


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Do what `core.noise.inverse_cdf` does for `probs` [rows, V] and `uniform` [rows]."""
    probs = probs.contiguous()
    rows, vocab = probs.shape
    blocks = block_options(probs.device, rows, vocab, IDS_AT_ONCE)
    tokens = torch.empty(rows, dtype=torch.int64, device=probs.device)
    sample_rows[(blocks["SPLIT"], rows)](
        probs,
        uniform.contiguous(),
        torch.empty(rows, 2, blocks["BLOCKS"], dtype=torch.float64, device=probs.device),
        torch.zeros(rows, dtype=torch.int32, device=probs.device),
        tokens,
        vocab,
        **blocks,
        **launch_options(blocks["SPLIT"]),
        num_warps=16,
    )
    return tokens
