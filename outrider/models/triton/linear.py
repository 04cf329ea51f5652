"""Matrix products of 1 to 512 rows that read the weights once, with a fixed order of sums.

    linear(x, weight, *, norm=None, residual=None, gate="", bias=None, out_dtype=None) -> [T, N]

`weight` is a dense matrix [N, K], a `quantized.QuantizedWeight` or several of both, one above the other. `norm` is a
`Norm(weight [K], epsilon)`. `gate` names an activation, "silu", "gelu" or "gelu_tanh". The weight then has the rows of
the gate above those of the other factor (`[gate; up]`), and the result is [T, N / 2].

The order of sums: an iteration takes 256 inputs. Each of four chains of MMA instructions takes 64 of them, so chain c
sums the inputs k with k // 64 % 4 == c in ascending order. The result is (c0 + c1) + (c2 + c3), in float32. This order
depends on neither the number of rows nor the tile. A row has the same bits alone and among 511 others. The module
`sums` has this part.

Rounding: products and sums are float32. The dtype of `x` rounds x * g of a norm, and the result after bias, gate and
residual. A norm multiplies the sum: y = rstd * sum_k w_k (x_k g_k).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from outrider.models.triton.expand import expand
from outrider.models.triton.quantized import JoinedWeight, Matrix, QuantizedWeight
from outrider.models.triton.sums import existing, pieces, read_rows, sum_products

MAX_ROWS = 512  # above, the product is one of cuBLAS
_STEP = 256  # inputs of an iteration
FINISH_ROWS = 4  # of a program that adds chains
_FINISH_OUTPUTS = 256


class Norm(NamedTuple):
    """An RMSNorm: its weight [K], which multiplies as it is, and its epsilon."""

    weight: torch.Tensor
    epsilon: float


class Tile(NamedTuple):
    """How a product is cut: the outputs and rows of a program, its warps, and the stages of its pipeline.

    `form` is how the four chains are computed:
        parallel: a program has four warps, which take a chain each.
        split: a program computes one chain, and its warps share the outputs. A second kernel adds the chains.
    """

    outputs: int
    rows: int
    warps: int
    stages: int
    form: str = "parallel"


def linear(
    x: torch.Tensor,
    weight: Matrix,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gate: str = "",
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Multiply rows with a weight.

    Args:
        x: [T, K] float, with consecutive columns. K is a multiple of 16.
        weight: [N, K].
        norm: of the rows of `x`, before the product.
        residual: [T, N] that is added to the result.
        gate: the activation of the first N / 2 outputs, which multiply the others.
        bias: [N].
        out_dtype: of the result; None: that of `x`.
        tile: how the product is cut; None: as `choose_tile` does.
    """
    if len(x) > MAX_ROWS:
        return many_rows(x, weight, norm=norm, residual=residual, gate=gate, bias=bias, out_dtype=out_dtype)
    at_once = max(_LARGEST_SUMS // (16 * weight.shape[0]) // 64, 1) * 64
    if tile is None and len(x) > at_once:  # the sums of all rows would take too much memory
        residuals = [None] * len(x) if residual is None else residual.split(at_once)
        parts = [
            linear(part, weight, norm=norm, residual=added, gate=gate, bias=bias, out_dtype=out_dtype)
            for part, added in zip(x.split(at_once), residuals, strict=False)
        ]
        return torch.cat(parts)
    options: dict[str, Any] = {"norm": norm, "out_dtype": out_dtype, "tile": tile}
    if isinstance(weight, JoinedWeight):
        return _joined(x, weight, residual=residual, gate=gate, bias=bias, options=options)
    out, launches = _launches(x, weight, residual=residual, gate=gate, bias=bias, **options)
    for launch in launches:
        launch.kernel[launch.grid](*launch.arguments, **launch.options)
    return out


def _joined(
    x: torch.Tensor,
    weight: JoinedWeight,
    *,
    residual: torch.Tensor | None,
    gate: str,
    bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Do what `linear` does for a weight of several types: each part writes its own columns of the result."""
    if gate:  # its factors may be in different parts
        both = _joined(x, weight, residual=None, gate="", bias=bias, options=options | {"out_dtype": torch.float32})
        first, second = both.chunk(2, -1)
        gated = _ACTIVATIONS[gate](first).mul_(second)
        return (gated if residual is None else gated.add_(residual)).to(options["out_dtype"] or x.dtype)
    out = x.new_empty(len(x), weight.shape[0], dtype=options["out_dtype"] or x.dtype)
    begin = 0
    for part in weight.parts:
        columns = slice(begin, begin + part.shape[0])
        added = None if residual is None else residual[:, columns]
        shift = None if bias is None else bias[columns]
        for launch in _launches(x, part, out=out[:, columns], residual=added, bias=shift, **options)[1]:
            launch.kernel[launch.grid](*launch.arguments, **launch.options)
        begin = columns.stop
    return out


def compile_linear(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, **options: Any) -> None:
    """Compile the kernels that `linear` runs for these arguments, and run nothing.

    In a `triton.runtime._async_compile.AsyncCompileMode` kernels are compiled at the same time.
    """
    for launch in _launches(x, weight, **options)[1]:
        launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)


class _Launch(NamedTuple):
    """A launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def _launches(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gate: str = "",
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[_Launch]]:
    """Return the result of `linear` for these arguments, not filled yet, and the launches that fill it.

    `out` is where the result is written; None: into a new tensor.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    values = weight if isinstance(weight, torch.Tensor) else weight.values
    kind = quantized.kind if quantized else "dense"
    group = quantized.group if quantized else 0
    bits = 4 if kind == "int4" else 8 * values.itemsize  # int6: a part of its bytes is read twice
    scale, zero, factor = (quantized.scale, quantized.zero, quantized.factor) if quantized else (None, None, None)
    costly = factor is not None or (zero is not None and zero.is_floating_point())
    tile = tile or choose_tile(rows, outputs, bits, grouped=group > 0, costly=costly, input_bytes=x.itemsize)
    if out is None:
        out = x.new_empty(rows, outputs // 2 if gate else outputs, dtype=out_dtype or x.dtype)
    weights = (x, values, scale, zero, factor, norm and norm.weight)
    sizes = (rows, outputs, inputs, x.stride(0), values.shape[1])
    ends = (out.stride(0), 0 if residual is None else residual.stride(0), norm.epsilon if norm else 0.0)
    options = {
        "KIND": kind,
        "GROUP": group,
        "SCALE_ROWS": quantized.scale_rows if quantized else 1,
        "EVEN": inputs % _STEP == 0,
        "OUTPUTS": tile.outputs,
        "ROWS": tile.rows,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    # Programs of the same weights follow each other: the L2 cache serves all but the first.
    tiles = (triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs))
    if tile.form == "parallel":
        arguments = (*weights, bias, residual, out, *sizes, *ends)
        return out, [_Launch(_product, tiles, arguments, {**options, "GATE": gate})]
    sums = x.new_empty(4, rows, outputs, dtype=torch.float32)
    squares = x.new_empty(4, rows, dtype=torch.float32) if norm else None
    launches = []
    if norm:
        scaled = x.new_empty(rows, inputs)
        launches.append(_Launch(
            _normalize, (triton.cdiv(rows, 2),), (x, norm.weight, scaled, squares, rows, inputs, x.stride(0)),
            {"PIECES": pieces(kind, group), "EVEN": inputs % _STEP == 0, "ROWS": 2, "num_warps": 1},
        ))  # fmt: skip
        weights = (scaled, *weights[1:])
        sizes = (rows, outputs, inputs, inputs, values.shape[1])
    grid = (tiles[0], 4, tiles[1])
    launches.append(_Launch(_chain, grid, (*weights[:5], sums, *sizes), {**options, "PARTS": tile.warps}))
    finish = _Launch(
        _finish,
        (triton.cdiv(rows, FINISH_ROWS), triton.cdiv(out.shape[1], _FINISH_OUTPUTS)),
        (sums, squares, None if group else scale, bias, residual, out, rows, outputs, inputs, *ends),
        {"GATE": gate, "OUTPUTS": _FINISH_OUTPUTS, "ROWS": FINISH_ROWS, "num_warps": 4},
    )
    return out, [*launches, finish]


def choose_tile(
    rows: int, outputs: int, bits: int, *, grouped: bool, costly: bool = False, input_bytes: int = 2
) -> Tile:
    """Return the tile of a product of `rows` rows. It changes the time of the product and not its bits.

    The inputs of a program pass through the L2 cache once for each `Tile.outputs` rows of the weight. For few rows they
    are few bytes, and one launch is the fastest. For more rows the tiles grow, as long as their programs fill the
    processors, and a program computes one chain.

    Args:
        rows: 1 to MAX_ROWS.
        outputs: rows of the weight.
        bits: of a weight in shared memory.
        grouped: whether scales belong to groups of inputs, whose sums take registers of their own.
        costly: whether groups have a minimum or a factor, whose products take more registers.
        input_bytes: of an input.
    """
    if rows <= 16 or input_bytes == 4:
        size = 64 if rows > 8 and outputs > 64 * _PROGRAMS and not costly else 32
        size = 16 if outputs < 3072 or input_bytes == 4 or (costly and rows > 8) else size
        return _staged(size, 8 if rows <= 8 or input_bytes == 4 else 16, 4, "parallel", bits, input_bytes)
    most_rows = 32 if costly else min(256, triton.next_power_of_2(rows))
    sizes = [each for each in _WIDE[most_rows] if not grouped or each[0] <= 128]
    enough = (each for each in sizes if 4 * triton.cdiv(outputs, each[0]) * triton.cdiv(rows, each[1]) >= _PROGRAMS)
    size, tile_rows, warps = next(enough, sizes[-1])
    return _staged(size, tile_rows, warps, "split", bits, input_bytes)


_PROGRAMS = 120  # that fill a chip
_LARGEST_SUMS = 1 << 28  # bytes of the four chains in memory
# Outputs, rows and warps of a program, by the next power of two of the rows. A warp has 32 outputs or fewer.
_WIDE = {
    32: ((128, 32, 4), (64, 32, 4)),
    64: ((128, 64, 4), (64, 64, 4)),
    128: ((128, 64, 4), (64, 64, 4)),
    256: ((256, 128, 8), (128, 64, 4), (64, 64, 4)),
}


def _staged(outputs: int, rows: int, warps: int, form: str, bits: int, input_bytes: int) -> Tile:
    """Return a tile with as many stages as fit into 99 KB, which all chips have. They hide the latency of memory."""
    inputs = _STEP if form == "parallel" else _STEP // 4
    stage = inputs * (outputs * bits // 8 + input_bytes * rows + 4)  # bytes: weights, inputs, and the weight of a norm
    return Tile(outputs, rows, warps, min(6, 1 + 99 * 1024 // stage), form)


def many_rows(
    x: torch.Tensor,
    weight: Matrix,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gate: str = "",
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Do what `linear` does for any number of rows, on cuBLAS."""
    out_dtype = out_dtype or x.dtype
    weight = expand(weight, x.dtype)
    if norm is not None:
        x = functional.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.epsilon).to(x.dtype)
    if gate:
        first, second = functional.linear(x, weight, bias).chunk(2, -1)
        gated = _ACTIVATIONS[gate](first).mul_(second)
        return (gated if residual is None else gated.add_(residual)).to(out_dtype)
    if residual is None:
        whole: torch.Tensor = functional.linear(x, weight, bias)
        return whole.to(out_dtype)
    out = torch.addmm(residual.to(x.dtype), x, weight.T)
    return (out if bias is None else out.add_(bias)).to(out_dtype)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@triton.jit(do_not_specialize=["rows", "epsilon"])
def _product(
    x, values, scale, zero, factor, norm, bias, residual, out,
    rows, outputs, inputs, x_stride, values_stride, out_stride, residual_stride, epsilon,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, GATE: tl.constexpr, EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS outputs of ROWS rows. Four warps take a chain each."""
    n = _weight_rows(outputs, GATE, OUTPUTS)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total, squares = sum_products(
        x, values, scale, zero, factor, norm, t, rows, n[None, :], outputs, inputs, x_stride, values_stride, 0,
        KIND, GROUP, SCALE_ROWS, EVEN, 4, 1, OUTPUTS, ROWS,
    )  # fmt: skip
    result = _sum_chains(total)
    if GROUP == 0 and scale is not None:
        result *= tl.load(scale + n).to(tl.float32)[:, None]
    if norm is not None:
        result *= tl.rsqrt(_sum_chains(squares) / inputs + epsilon)[None, :]
    if bias is not None:
        result += tl.load(bias + n).to(tl.float32)[:, None]
    width = outputs
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    if GATE != "":
        pairs = result.reshape(OUTPUTS // 16, 2, 8, ROWS).permute(0, 2, 3, 1)
        gate, up = tl.split(pairs)
        result = (_activated(gate, GATE) * up).reshape(OUTPUTS // 2, ROWS)
        width = outputs // 2
        column = tl.program_id(1) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
    _store(result, residual, out, column, width, t, rows, out_stride, residual_stride)


@triton.jit(do_not_specialize=["rows"])
def _normalize(
    x, norm, out, squares, rows, inputs, x_stride,
    PIECES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows times the weight of a norm to `out` [T, K], and the chains of their squares to `squares` [4, T].

    The squares are summed in the order of `sum_products`.
    """
    CHUNK: tl.constexpr = 64
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = (t < rows)[None, None, :]
    chain = tl.arange(0, 4)[:, None]
    k = chain * CHUNK + tl.arange(0, CHUNK // PIECES)[None, :]
    x += t[None, None, :] * x_stride + k[:, :, None]
    out += t[None, None, :] * inputs + k[:, :, None]
    norm += k
    total = tl.zeros((4, ROWS), tl.float32)
    for start in tl.range(0, inputs, 256, num_stages=4):
        for piece in tl.static_range(PIECES):
            first = start + piece * (CHUNK // PIECES)
            exists = existing(first + k, inputs, EVEN)
            a, total = read_rows(x + first, norm, first, present, exists, total)
            tl.store(out + first, a, mask=present if exists is None else present & exists[:, :, None])
    tl.store(squares + chain * rows + t[None, :], total, mask=(t < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _chain(
    x, values, scale, zero, factor, sums, rows, outputs, inputs, x_stride, values_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write one chain of OUTPUTS outputs of ROWS rows to `sums` [4, T, N]."""
    chain = tl.program_id(1)
    n = (tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)).reshape(PARTS, OUTPUTS // PARTS)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total, _ = sum_products(
        x, values, scale, zero, factor, None, t, rows, tl.minimum(n, outputs - 1), outputs, inputs, x_stride,
        values_stride, chain, KIND, GROUP, SCALE_ROWS, EVEN, 1, PARTS, OUTPUTS, ROWS,
    )  # fmt: skip
    place = chain * rows + t
    inside = (n < outputs)[:, :, None] & (t < rows)[None, None, :]
    tl.store(sums + place[None, None, :] * outputs + n[:, :, None], total, mask=inside)


@triton.jit(do_not_specialize=["rows", "epsilon"])
def _finish(
    sums, squares, scale, bias, residual, out, rows, outputs, inputs, out_stride, residual_stride, epsilon,
    GATE: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Make OUTPUTS outputs of ROWS rows of the chains of `_chain`."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    width = outputs // 2 if GATE != "" else outputs
    result = _finished(sums, squares, scale, bias, column, width, t, rows, outputs, inputs, epsilon)
    if GATE != "":
        up = _finished(sums + width, squares, _moved(scale, width), _moved(bias, width),
                       column, width, t, rows, outputs, inputs, epsilon)  # fmt: skip
        result = _activated(result, GATE) * up
    _store(result, residual, out, column, width, t, rows, out_stride, residual_stride)


@triton.jit
def _finished(sums, squares, scale, bias, column, width, t, rows, outputs, inputs, epsilon):
    """Return the sums of four chains with scale, norm and bias [OUTPUTS, ROWS]."""
    inside = (column < width)[:, None] & (t < rows)[None, :]
    sums += t[None, :] * outputs + column[:, None]
    result = _add_chains(sums, rows * outputs, inside)
    if scale is not None:
        result *= tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    if squares is not None:
        result *= tl.rsqrt(_add_chains(squares + t, rows, t < rows) / inputs + epsilon)[None, :]
    if bias is not None:
        result += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    return result


@triton.jit
def _add_chains(pointers, stride, mask):
    """Return (c0 + c1) + (c2 + c3) of numbers in memory."""
    first = tl.load(pointers, mask=mask, other=0.0) + tl.load(pointers + stride, mask=mask, other=0.0)
    return first + (
        tl.load(pointers + 2 * stride, mask=mask, other=0.0) + tl.load(pointers + 3 * stride, mask=mask, other=0.0)
    )


@triton.jit
def _moved(pointer, distance):
    """Return a pointer plus a distance; None stays None."""
    if pointer is None:
        moved = None
    else:
        moved = pointer + distance
    return moved


@triton.jit
def _store(result, residual, out, column, width, t, rows, out_stride, residual_stride):
    """Write results [OUTPUTS, ROWS] plus the residual to `out` [T, width]."""
    inside = (column < width)[:, None] & (t < rows)[None, :]
    if residual is not None:
        result += tl.load(residual + t[None, :] * residual_stride + column[:, None], mask=inside).to(tl.float32)
    tl.store(out + t[None, :] * out_stride + column[:, None], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weight_rows(outputs, GATE: tl.constexpr, OUTPUTS: tl.constexpr):
    """Return the rows [OUTPUTS] of the weight that a program reads. Rows after the last are the last.

    With a gate, eight rows of the gate and their eight of the other factor alternate, as one thread has them.
    """
    i = tl.arange(0, OUTPUTS)
    if GATE == "":
        return tl.minimum(tl.program_id(1) * OUTPUTS + i, outputs - 1)
    half = outputs // 2
    column = tl.program_id(1) * (OUTPUTS // 2) + i // 16 * 8 + i % 8
    return tl.minimum(column, half - 1) + i // 8 % 2 * half


@triton.jit
def _activated(gate, GATE: tl.constexpr):
    """Return the activation of a gate."""
    if GATE == "silu":
        gate = gate * tl.sigmoid(gate)
    elif GATE == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate


@triton.jit
def _sum_chains(sums):
    """Return (c0 + c1) + (c2 + c3) of sums [4, ...]."""
    if len(sums.shape) == 3:
        pairs = sums.reshape(2, 2, sums.shape[1], sums.shape[2]).permute(2, 3, 0, 1)
    else:
        pairs = sums.reshape(2, 2, sums.shape[1]).permute(2, 0, 1)
    even, odd = tl.split(pairs)
    first, last = tl.split(even + odd)
    return first + last
