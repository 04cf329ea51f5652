"""Matrix products of 1 to 64 rows that read the weights once, with a fixed order of sums.

    linear(x, weight, *, norm=None, residual=None, gate="", bias=None, out_dtype=None) -> [T, N]

`weight` is a dense matrix [N, K] or a `quantized.QuantizedWeight`. `norm` is a `Norm(weight [K], epsilon)`. `gate`
names an activation, "silu", "gelu" or "gelu_tanh". The weight then has the rows of the gate above those of the other
factor (`[gate; up]`), and the result is [T, N / 2].

The order of sums: an iteration takes 256 inputs. Each of four chains of MMA instructions takes 64 of them, so chain c
sums the inputs k with k // 64 % 4 == c in ascending order. The result is (c0 + c1) + (c2 + c3), in float32. This order
depends on neither the number of rows nor the tile. A row has the same bits alone and among 63 others.

Rounding: products and sums are float32. The dtype of `x` rounds x * g of a norm, and the result after bias, gate and
residual. A norm multiplies the sum: y = rstd * sum_k w_k (x_k g_k).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.models.triton.quantized import QuantizedWeight

MAX_ROWS = 64  # above, the product is one of cuBLAS
_STEP = 256  # inputs of an iteration
# Whether a kernel starts before the one before it ends, and reads weights into the L2 cache meanwhile. GPUs of compute
# capability 9 and later do.
overlap = False


class Norm(NamedTuple):
    """An RMSNorm: its weight [K], which multiplies as it is, and its epsilon."""

    weight: torch.Tensor
    epsilon: float


class Tile(NamedTuple):
    """How a product is cut: the outputs and rows of a program, its warps, and the stages of its pipeline."""

    outputs: int
    rows: int  # 8, 16, 32 or 64
    warps: int
    stages: int


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
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
    call = _call(x, weight, norm, residual, gate, bias, out_dtype, tile)
    _product[call.grid](*call.arguments, **call.options)
    return call.out


def compile_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gate: str = "",
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> None:
    """Compile the kernel that `linear` runs for these arguments, and run nothing.

    In a `triton.runtime._async_compile.AsyncCompileMode` kernels are compiled at the same time.
    """
    call = _call(x, weight, norm, residual, gate, bias, out_dtype, tile)
    _product.warmup(*call.arguments, grid=call.grid, **call.options)


class _Call(NamedTuple):
    """A call of the kernel, and the tensor that it fills."""

    out: torch.Tensor
    grid: tuple[int, int]  # programs with the same weights follow each other
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def _call(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    norm: Norm | None,
    residual: torch.Tensor | None,
    gate: str,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    tile: Tile | None,
) -> _Call:
    """Return the call of the kernel for the arguments of `linear`."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    values = weight.values if isinstance(weight, QuantizedWeight) else weight
    group = quantized.group if quantized else 0
    bits = 8 * values.itemsize if values.shape[1] == inputs else 4
    tile = tile or choose_tile(rows, outputs, bits, x.itemsize)
    overlapped = overlap and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    out = x.new_empty(rows, outputs // 2 if gate else outputs, dtype=out_dtype or x.dtype)
    arguments = (
        x, values, quantized and quantized.scale, quantized and quantized.zero, norm and norm.weight, bias, residual,
        out, rows, outputs, inputs, x.stride(0), values.shape[1], 0 if residual is None else residual.stride(0),
        norm.epsilon if norm else 0.0,
    )  # fmt: skip
    options = {
        "KIND": quantized.kind if quantized else "dense",
        "GROUP": group,
        "SCALE_ROWS": quantized.scale_rows if quantized else 1,
        "GATE": gate,
        "EVEN": inputs % 256 == 0,
        "OUTPUTS": tile.outputs,
        "ROWS": tile.rows,
        "OVERLAP": overlapped,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if overlapped:
        options["launch_pdl"] = True
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs))
    return _Call(out, grid, arguments, options)


def choose_tile(rows: int, outputs: int, bits: int, input_bytes: int = 2) -> Tile:
    """Return the tile of a product of `rows` rows. It changes the time of the product and not its bits.

    As many stages as fit into 99 KB, which all chips have, hide the latency of memory. Small tiles make enough programs
    for all processors. Two programs of 32 rows, at the same time, share the weights through the L2 cache. One of 64
    rows lacks registers.

    Args:
        rows: 1 to 64.
        outputs: rows of the weight.
        bits: of a weight in memory.
        input_bytes: of an input.
    """
    size = 16 if outputs < 3072 or input_bytes == 4 else 32
    tile_rows = min(8 if input_bytes == 4 else 32, max(8, triton.next_power_of_2(rows)))
    stage = _STEP * (size * bits // 8 + input_bytes * tile_rows + 4)  # bytes: weights, inputs, and the weight of a norm
    return Tile(size, tile_rows, 4, min(6, 1 + 99 * 1024 // stage))


def many_rows(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gate: str = "",
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Do what `linear` does for any number of rows, on cuBLAS."""
    out_dtype = out_dtype or x.dtype
    if isinstance(weight, QuantizedWeight):
        weight = expand(weight, x.dtype)
    if norm is not None:
        x = functional.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.epsilon).to(x.dtype)
    if gate:
        first, second = functional.linear(x, weight, bias).chunk(2, -1)
        gated: torch.Tensor = _ACTIVATIONS[gate](first).mul_(second)
        return (gated if residual is None else gated.add_(residual)).to(out_dtype)
    if residual is None:
        whole: torch.Tensor = functional.linear(x, weight, bias)
        return whole.to(out_dtype)
    out = torch.addmm(residual.to(x.dtype), x, weight.T)
    return (out if bias is None else out.add_(bias)).to(out_dtype)


_ACTIVATIONS: dict[str, Any] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def expand(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return a quantized weight [N, K] in a float dtype."""
    outputs, inputs = weight.shape
    out = weight.values.new_empty(outputs, inputs, dtype=dtype)
    width = weight.values.shape[1]
    _expand[triton.cdiv(outputs, 16), triton.cdiv(width, 128)](
        weight.values, weight.scale, weight.zero, out, outputs, inputs, width,
        KIND=weight.kind, GROUP=weight.group, SCALE_ROWS=weight.scale_rows, OUTPUTS=16, BYTES=128,
    )  # fmt: skip
    return out


@triton.jit
def _expand(
    values, scale, zero, out, outputs, inputs, width,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Write the weights of BYTES bytes of OUTPUTS rows."""
    n = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
    byte = (tl.program_id(1) * BYTES + tl.arange(0, BYTES))[None, :]
    q = tl.load(values + n.to(tl.int64) * width + byte, mask=(n < outputs) & (byte < width), other=0)
    for half in tl.static_range(2 if KIND == "int4" else 1):
        k = byte // 32 * 64 + byte % 32 + half * 32 if KIND == "int4" else byte
        inside = (n < outputs) & (k < inputs)
        w = _floats((q >> 4 if half else q & 15) if KIND == "int4" else q, KIND, tl.float32)
        place = k // GROUP * tl.cdiv(outputs, SCALE_ROWS) + n // SCALE_ROWS if GROUP else n + k * 0
        if zero is not None:
            w -= tl.load(zero + place, mask=inside, other=0).to(tl.float32)
        w *= tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + n.to(tl.int64) * inputs + k, w.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "epsilon"])
def _product(
    x, values, scale, zero, norm, bias, residual, out,
    rows, outputs, inputs, x_stride, values_stride, residual_stride, epsilon,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, GATE: tl.constexpr, EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS outputs of ROWS rows."""
    n = _weight_rows(outputs, GATE, OUTPUTS)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if OVERLAP:
        gdc_launch_dependents()
        _prefetch(values, n, values_stride)
        gdc_wait()  # for the kernel before this one, which may write all that follows
    total, squares = _sum_products(
        x + t[None, None, :] * x_stride, values + n.to(tl.int64)[None, :, None] * values_stride, scale, zero, norm,
        (t < rows)[None, None, :], (n // SCALE_ROWS)[None, :], tl.cdiv(outputs, SCALE_ROWS), inputs,
        KIND, GROUP, EVEN, OUTPUTS, ROWS,
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
        result = _gated(result, GATE)
        width = outputs // 2
        column = tl.program_id(1) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
    inside = (column < width)[:, None] & (t < rows)[None, :]
    if residual is not None:
        result += tl.load(residual + t[None, :] * residual_stride + column[:, None], mask=inside).to(tl.float32)
    tl.store(out + t[None, :] * width + column[:, None], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _prefetch(values, n, values_stride):
    """Bring the first 2 KB of rows of the weight into the L2 cache."""
    LINE: tl.constexpr = 128 * 8 // values.dtype.element_ty.primitive_bitwidth  # values of a line of the cache
    place = tl.minimum(tl.arange(0, 16) * LINE, values_stride - 1)
    lines = (values + n.to(tl.int64)[:, None] * values_stride + place[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _sum_products(
    x, values, scale, zero, norm, present, place, groups, inputs,
    KIND: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the sums of products [4, OUTPUTS, ROWS], and of the squares of the inputs [4, ROWS].

    `x` and `values` point to rows. `present` masks the rows. `place` is where the outputs have their scales in a row
    of `groups`.
    """
    STEP: tl.constexpr = 256  # inputs of an iteration
    CHUNK: tl.constexpr = 64  # those of a chain
    HALVES: tl.constexpr = 2 if KIND == "int4" or GROUP == 32 else 1
    PACKED: tl.constexpr = 2 if KIND == "int4" else 1  # inputs of a byte
    chain = tl.arange(0, 4)
    j = tl.arange(0, CHUNK // HALVES)[None, :]
    k = chain[:, None] * CHUNK + j
    values += (chain[:, None] * (CHUNK // PACKED) + j)[:, None, :]
    x += k[:, :, None]
    norm_k = norm + k if norm is not None else None
    squares = tl.zeros((4, ROWS), tl.float32)
    total = tl.zeros((4, OUTPUTS, ROWS), tl.float32)
    # The scales of the next iteration are loaded before the products of this one.
    group = chain * CHUNK
    next_scale = _read_groups(scale, group, place, groups, inputs, GROUP)
    next_zero = _read_groups(zero, group, place, groups, inputs, GROUP)
    if GROUP == 32:
        next_high_scale = _read_groups(scale, group + 32, place, groups, inputs, GROUP)
        next_high_zero = _read_groups(zero, group + 32, place, groups, inputs, GROUP)
    for start in range(0, inputs, STEP):
        this_scale = next_scale
        this_zero = next_zero
        next_scale = _read_groups(scale, group + (start + STEP), place, groups, inputs, GROUP)
        next_zero = _read_groups(zero, group + (start + STEP), place, groups, inputs, GROUP)
        inside = _inside(start + k, inputs, EVEN)
        low = _read(values + start // PACKED, _inside(start + k[:, None, :], inputs, EVEN))
        a, squares = _read_rows(x + start, norm_k, start, present, inside, squares)
        total = _add(total, low & 15 if KIND == "int4" else low, a, this_scale, this_zero, KIND, GROUP)
        if HALVES == 2:
            if GROUP == 32:
                this_scale = next_high_scale
                this_zero = next_high_zero
                next_high_scale = _read_groups(scale, group + (start + STEP + 32), place, groups, inputs, GROUP)
                next_high_zero = _read_groups(zero, group + (start + STEP + 32), place, groups, inputs, GROUP)
            inside = _inside(start + 32 + k, inputs, EVEN)
            high = (
                low >> 4
                if KIND == "int4"
                else _read(values + (start + 32), _inside(start + 32 + k[:, None, :], inputs, EVEN))
            )
            a, squares = _read_rows(x + (start + 32), norm_k, start + 32, present, inside, squares)
            total = _add(total, high, a, this_scale, this_zero, KIND, GROUP)
    return total, squares


@triton.jit
def _inside(k, inputs, EVEN: tl.constexpr):
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
def _read_rows(x, norm, start, present, inside, squares):
    """Return inputs [4, K, ROWS], times the weight of a norm, and `squares` [4, ROWS] plus their squares."""
    a = tl.load(x, mask=present if inside is None else present & inside[:, :, None], other=0.0)
    if norm is not None:
        wide = a.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        a = (wide * _read(norm + start, inside).to(tl.float32)[:, :, None]).to(a.dtype)
    return a, squares


@triton.jit
def _floats(q, KIND: tl.constexpr, dtype: tl.constexpr):
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
    elif KIND == "int4" and dtype == tl.bfloat16:
        q = (q.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    elif KIND == "int4" and dtype == tl.float16:
        q = (q.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    elif KIND == "int4":
        q = q.to(tl.float32) - 8.0
    return q


@triton.jit
def _read_groups(table, k, place, groups, inputs, GROUP: tl.constexpr):
    """Return the numbers [4, OUTPUTS] of the groups of inputs k [4] in float32."""
    if GROUP == 0 or table is None:
        numbers = 0.0
    else:
        group = tl.minimum(k, inputs - 1) // GROUP
        numbers = tl.load(table + group[:, None] * groups + place).to(tl.float32)
    return numbers


@triton.jit
def _add(total, q, a, scale, zero, KIND: tl.constexpr, GROUP: tl.constexpr):
    """Return sums [4, OUTPUTS, ROWS] plus the products of weights [4, OUTPUTS, K] and inputs [4, K, ROWS]."""
    w = _floats(q, KIND, a.dtype)
    if GROUP == 0:
        total = tl.dot(w, a, total, input_precision="ieee")
    else:
        if zero.type.is_block():
            w -= zero[:, :, None].to(w.dtype)  # exact: both are whole numbers below 256
        total += tl.dot(w, a, input_precision="ieee") * scale[:, :, None]
    return total


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
def _gated(result, GATE: tl.constexpr):
    """Return act(gate) * up [OUTPUTS / 2, ROWS] of results [OUTPUTS, ROWS] in the order of `_weight_rows`."""
    OUTPUTS: tl.constexpr = result.shape[0]
    ROWS: tl.constexpr = result.shape[1]
    pairs = result.reshape(OUTPUTS // 16, 2, 8, ROWS).permute(0, 2, 3, 1)
    gate, up = tl.split(pairs)
    if GATE == "silu":
        gate = gate * tl.sigmoid(gate)
    elif GATE == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return (gate * up).reshape(OUTPUTS // 2, ROWS)


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
