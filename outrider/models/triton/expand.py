"""Expand quantized weights to a float type: all rows for long prompts, or those of some tokens of an embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from outrider.models.triton.quantized import JoinedWeight, Matrix, QuantizedWeight
from outrider.models.triton.sums import floats, is_shifted, middle


def expand(weight: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight [N, K] in a float dtype. A dense one stays as it is."""
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, JoinedWeight):
        return torch.cat([expand(part, dtype).to(dtype) for part in weight.parts])
    return _rows(weight, None, weight.shape[0], dtype, outputs=16)


def embed(tokens: torch.Tensor, table: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows of an embedding table [V, H] for tokens [T] int64, in a float dtype."""
    tokens = tokens.clamp(0, table.shape[0] - 1)
    if isinstance(table, QuantizedWeight):
        return _rows(table, tokens, len(tokens), dtype, outputs=1)
    return functional.embedding(tokens, table)


def _rows(
    weight: QuantizedWeight, rows: torch.Tensor | None, count: int, dtype: torch.dtype, *, outputs: int
) -> torch.Tensor:
    """Return rows [count, K] of a weight, with `outputs` rows in a program; None: the first ones."""
    inputs = weight.shape[1]
    out = weight.values.new_empty(count, inputs, dtype=dtype)
    _expand[triton.cdiv(count, outputs), triton.cdiv(inputs, 256)](
        weight.values, weight.scale, weight.zero, weight.factor, rows, out, count, weight.shape[0], inputs,
        weight.values.shape[1],
        KIND=weight.kind, GROUP=weight.group, SCALE_ROWS=weight.scale_rows, OUTPUTS=outputs, INPUTS=256,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _expand(
    values, scale, zero, factor, rows, out, count, outputs, inputs, width,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Write INPUTS weights of OUTPUTS rows."""
    i = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
    n = i if rows is None else tl.load(rows + i, mask=i < count, other=0)
    k = (tl.program_id(1) * INPUTS + tl.arange(0, INPUTS))[None, :]
    exists = (i < count) & (k < inputs)
    values += n.to(tl.int64) * width
    if KIND == "int4" or KIND == "int6":
        chunk = values + k // 64 * (32 if KIND == "int4" else 48)
        q = tl.load(chunk + k % 32, mask=exists, other=0) >> (k // 32 % 2 * 4).to(tl.uint8) & 15
        if KIND == "int6":
            high = tl.load(chunk + 32 + k % 16, mask=exists, other=0)
            q = q | (high >> (k // 32 % 2 * 2 + k // 16 % 2 * 4).to(tl.uint8) & 3) << 4
    else:
        q = tl.load(values + k, mask=exists, other=0)
    w = floats(q, KIND, tl.float32)
    groups = tl.cdiv(outputs, SCALE_ROWS)
    place = k // GROUP * groups + n // SCALE_ROWS if GROUP else n + k * 0
    number = tl.load(scale + place, mask=exists, other=0).to(tl.float32)
    SHIFTED: tl.constexpr = is_shifted(zero, factor)
    row = k // 256 * (2 if SHIFTED else 1) * groups + n
    if factor is not None:
        number *= tl.load(factor + row, mask=exists, other=0.0).to(tl.float32)
    if zero is None:
        w *= number
    else:
        least = tl.load(zero + place, mask=exists, other=0).to(tl.float32)
        if factor is not None:
            least *= tl.load(factor + row + groups, mask=exists, other=0.0).to(tl.float32)
            least -= middle(KIND) * number
        w = w * number - least if SHIFTED else (w - least) * number
    tl.store(out + i.to(tl.int64) * inputs + k, w.to(out.dtype.element_ty), mask=exists)
