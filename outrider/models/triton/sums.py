"""The sums of a product, in a fixed order: how a program reads weights, their scales and the inputs."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def sum_products(
    x, values, scale, zero, factor, norm, t, rows, weights, outputs, inputs, x_stride, values_stride, first_chain,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN: tl.constexpr,
    CHAINS: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return sums of products [CHAINS * PARTS, OUTPUTS / PARTS, ROWS], and of the squares of the inputs [CHAINS, ROWS].

    A warp computes one of CHAINS * PARTS matrices, so that all tiles take the same instructions (mma.sync). There are
    4 chains and 1 part, or 1 chain and a part for each warp.

    `t` are the rows [ROWS], and `weights` those of the weight [PARTS, OUTPUTS / PARTS].
    """
    STEP: tl.constexpr = 256  # inputs of an iteration
    CHUNK: tl.constexpr = 64  # those of a chain
    PIECES: tl.constexpr = pieces(KIND, GROUP)
    PIECE: tl.constexpr = CHUNK // PIECES
    PACKED: tl.constexpr = KIND == "int4" or KIND == "int6"
    BYTES: tl.constexpr = 32 if KIND == "int4" else 48  # of a packed chunk
    HALVES: tl.constexpr = 2 if GROUP == 16 else 1  # groups of a piece
    SHIFTED: tl.constexpr = is_shifted(zero, factor)
    FACTORS: tl.constexpr = 2 if SHIFTED else 1  # rows of the table for 256 inputs
    present = (t < rows)[None, None, :]
    place = weights // SCALE_ROWS
    groups = tl.cdiv(outputs, SCALE_ROWS)
    chain = first_chain + tl.arange(0, CHAINS)
    j = tl.arange(0, PIECE)[None, :]
    k = chain[:, None] * CHUNK + j
    values += weights.to(tl.int64)[:, :, None] * values_stride
    if KIND == "int6":
        high_bytes = values + (chain[:, None] * BYTES + 32 + j % 16)[:, None, :]
        high_shift = (j // 16 * 4).to(tl.uint8)[:, None, :]
    values += (chain[:, None] * (BYTES if PACKED else CHUNK) + j)[:, None, :]
    x += t[None, None, :] * x_stride
    x += k[:, :, None]
    norm_k = norm + k if norm is not None else None
    squares = tl.zeros((CHAINS, ROWS), tl.float32)
    total = tl.zeros((CHAINS * PARTS, OUTPUTS // PARTS, ROWS), tl.float32)
    # The scales of the next iteration are loaded before the products of this one.
    first = chain * CHUNK
    next_scales = _read_groups(scale, first, place, groups, inputs, GROUP)
    next_zeros = _read_groups(zero, first, place, groups, inputs, GROUP)
    next_factor = _read_factor(factor, 0, place, groups)
    next_zero_factor = _read_factor(factor, 1, place, groups) if SHIFTED else 0.0
    for start in range(0, inputs, STEP):
        scales = next_scales
        zeros = next_zeros
        this_factor = next_factor
        zero_factor = next_zero_factor
        next_scales = _read_groups(scale, first + (start + STEP), place, groups, inputs, GROUP)
        next_zeros = _read_groups(zero, first + (start + STEP), place, groups, inputs, GROUP)
        row = FACTORS * tl.minimum(start // STEP + 1, tl.cdiv(inputs, STEP) - 1)
        next_factor = _read_factor(factor, row, place, groups)
        next_zero_factor = _read_factor(factor, row + 1, place, groups) if SHIFTED else 0.0
        if PACKED:
            bytes_of_chunk = values + start // CHUNK * BYTES
            low = _read(bytes_of_chunk, existing(start + k[:, None, :], inputs, EVEN))
            if KIND == "int6":
                high = _read(high_bytes + start // CHUNK * BYTES, None) >> high_shift
        for piece in tl.static_range(PIECES):
            begin = start + piece * PIECE
            exists = existing(begin + k, inputs, EVEN)
            if PACKED:
                q = low >> 4 if piece == 1 else low & 15
                if KIND == "int6":
                    q = q | (high >> 2 * piece & 3) << 4
            else:
                q = _read(values + begin, existing(begin + k[:, None, :], inputs, EVEN))
            a, squares = read_rows(x + begin, norm_k, begin, present, exists, squares)
            for half in tl.static_range(HALVES):
                this_scale = scales[piece * HALVES + half]
                this_zero = zeros[piece * HALVES + half]
                if factor is not None:
                    this_scale *= this_factor
                    if SHIFTED:
                        this_zero = this_zero * zero_factor - middle(KIND) * this_scale
                # The other half adds exact zeros. Tiles of 16 inputs would not be loaded ahead.
                part = a if HALVES == 1 else tl.where((j // 16 == half)[:, :, None], a, 0.0).to(a.dtype)
                total = _add(total, q, part, this_scale, this_zero, KIND, GROUP, SHIFTED)
    return total, squares


@triton.constexpr_function
def pieces(kind, group) -> Any:
    """Return into how many pieces a chunk of 64 inputs is cut: halves of packed bytes, or of groups."""
    return 2 if kind in ("int4", "int6") or group == 32 else 1


@triton.constexpr_function
def middle(kind) -> Any:
    """Return what `floats` subtracts from integers."""
    return {"int4": 8.0, "int6": 32.0, "int8": 128.0}[kind]


@triton.constexpr_function
def is_shifted(zero, factor) -> Any:
    """Return whether `zero` is subtracted from the weights, and not from the integers."""
    return zero is not None and (factor is not None or zero.dtype.element_ty.is_floating())


@triton.jit
def existing(k, inputs, EVEN: tl.constexpr) -> tl.tensor:
    """Return the mask of inputs that exist; None: all do."""
    if EVEN:
        mask = None
    else:
        mask = k < inputs
    return mask


@triton.jit
def _read(pointers, mask):
    """Load a tile. Values outside a mask are 0. None: there is no mask."""
    if mask is None:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=mask, other=0)
    return tile


@triton.jit
def read_rows(x, norm, start, present, exists, squares) -> tl.tuple:
    """Return inputs [CHAINS, K, ROWS] times the weight of a norm, and `squares` [CHAINS, ROWS] plus their squares."""
    a = tl.load(x, mask=present if exists is None else present & exists[:, :, None], other=0.0)
    if norm is not None:
        wide = a.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        a = (wide * _read(norm + start, exists).to(tl.float32)[:, :, None]).to(a.dtype)
    return a, squares


@triton.jit
def floats(q, KIND: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return weights in a float dtype, without scales. Integers lose their middle."""
    if KIND == "fp8" and dtype == tl.bfloat16:
        # e4m3 has four bits of the exponent, three of the fraction, and another bias.
        bits = (q.to(tl.int8, bitcast=True).to(tl.int16) << 4) & -30736  # 0x87F0
        q = bits.to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
    elif KIND == "fp8":
        bits = (q.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16512  # 0xBF80
        q = bits.to(tl.float16, bitcast=True).to(dtype) * 256.0
    elif KIND == "int8":
        # The bits of 2 ** 23 make a float of an integer.
        q = ((q.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0).to(dtype)
    elif KIND != "dense" and dtype == tl.bfloat16:
        q = (q.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + middle(KIND))
    elif KIND != "dense" and dtype == tl.float16:
        q = (q.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + middle(KIND))
    elif KIND != "dense":
        q = q.to(tl.float32) - middle(KIND)
    return q


@triton.jit
def _read_groups(table, k, place, groups, inputs, GROUP: tl.constexpr):
    """Return the numbers of the groups of a chunk, whose first inputs are k [CHAINS], for weights `place` [PARTS, N].

    They are float32. Numbers after the last group repeat the first one; the compiler keeps one copy.
    """
    if GROUP == 0 or table is None:
        numbers = (0.0, 0.0, 0.0, 0.0)
    else:
        first = _read_group(table, k, place, groups, inputs, GROUP)
        second = first
        third = first
        fourth = first
        if GROUP < 64:
            second = _read_group(table, k + GROUP, place, groups, inputs, GROUP)
        if GROUP == 16:
            third = _read_group(table, k + 32, place, groups, inputs, GROUP)
            fourth = _read_group(table, k + 48, place, groups, inputs, GROUP)
        numbers = (first, second, third, fourth)
    return numbers


@triton.jit
def _read_group(table, k, place, groups, inputs, GROUP: tl.constexpr):
    """Return the numbers of the groups of inputs k [CHAINS] for weights `place` [PARTS, N], in float32."""
    group = tl.minimum(k, inputs - 1) // GROUP
    return tl.load(table + group[:, None] * groups + place).to(tl.float32)


@triton.jit
def _read_factor(factor, row, place, groups):
    """Return the factors of a row of a table for weights `place` [PARTS, N], in float32. None: there is no table."""
    if factor is None:
        numbers = 0.0
    else:
        numbers = tl.load(factor + row * groups + place).to(tl.float32)
    return numbers


@triton.jit
def _add(total, q, a, scale, zero, KIND: tl.constexpr, GROUP: tl.constexpr, SHIFTED: tl.constexpr):
    """Return sums [B, N, ROWS] plus the products of weights [B, N, K] and inputs [B or 1, K, ROWS]."""
    w = floats(q, KIND, a.dtype)
    a = a.broadcast_to(w.shape[0], a.shape[1], a.shape[2])
    if GROUP == 0:
        total = tl.dot(w, a, total, input_precision="ieee")
    else:
        if zero.type.is_block() and not SHIFTED:
            w -= zero[:, :, None].to(w.dtype)  # exact: both are whole numbers below 256
        total += tl.dot(w, a, input_precision="ieee") * scale[:, :, None]
        if SHIFTED:
            # A product with ones sums the inputs in the same order in each tile. The ones are made of the weights, so
            # that both products read the inputs in the same layout, and the compiler loads them ahead.
            total -= tl.dot(w * 0.0 + 1.0, a, input_precision="ieee") * zero[:, :, None]
    return total
