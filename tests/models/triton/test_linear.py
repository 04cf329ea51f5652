"""Products of few rows equal the reference, and a row has the same bits alone and among others."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch.nn import functional

from tests.helpers import triton as helper

from outrider.models.triton import linear as products  # isort: skip
from outrider.models.torch.group_weight import Groups, Layout, pack_integers
from outrider.models.triton.linear import Norm, Tile, linear
from outrider.models.triton.quantized import QuantizedWeight, from_fp8, from_groups, quantize

ROWS = (1, 2, 5, 16, 17, 33, 64, 65)  # the last: cuBLAS


def made(kind: str, outputs: int, inputs: int) -> torch.Tensor | QuantizedWeight:
    """Return a random weight."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    dense = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    if kind == "dense":
        return dense
    if kind.startswith("own"):
        return quantize(dense, int(kind[3:]))
    if kind == "fp8":
        scale = dense.abs().amax(1, keepdim=True) / 448
        return from_fp8((dense / scale).to(torch.float8_e4m3fn), scale)
    if kind == "fp8 blocks":
        scale = torch.rand(-(-outputs // 128), -(-inputs // 128), generator=generator) + 0.5
        return from_fp8(dense.to(torch.float8_e4m3fn), scale)
    bits, group, zero = map(int, kind.split("-"))
    group = group or inputs
    values = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    sizes = (outputs, -(-inputs // group))
    return from_groups(
        Groups(
            layout=Layout(outputs=outputs, inputs=inputs, bits=bits, group=group),
            words=pack_integers(values, bits),
            scale=(torch.rand(sizes, generator=generator) + 0.5).half() / inputs**0.5,
            zero=torch.randint(0, 1 << bits, sizes, generator=generator, dtype=torch.int16) if zero else None,
        )
    )


def product(*arguments, **options):
    with helper.interpreted(products):
        return linear(*arguments, **options)


def reference(x, weight, norm=None, residual=None, gate="", bias=None):
    """The product in float64."""
    dense = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
    x = x.double()
    if norm is not None:
        x = functional.rms_norm(x, x.shape[-1:], norm.weight.double(), norm.epsilon)
    out = functional.linear(x, dense.double(), None if bias is None else bias.double())
    if gate:
        first, second = out.chunk(2, -1)
        acts = {"silu": functional.silu, "gelu": functional.gelu}
        act = acts.get(gate, lambda value: functional.gelu(value, approximate="tanh"))
        out = act(first) * second
    return out if residual is None else out + residual.double()


KINDS = [
    "dense",
    "own8",
    "own4",
    "fp8",
    "fp8 blocks",
    "4-32-0",
    "4-64-1",
    "4-128-1",
    "4-96-0",
    "4-0-1",
    "8-32-1",
    "8-128-0",
    "8-0-1",
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_of_weight(kind):
    weight = made(kind, 40, 288)
    x = torch.randn(5, 288, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(product(x, weight).double(), reference(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_prompts_expand_the_weight(kind):
    weight = made(kind, 40, 288)
    x = torch.randn(65, 288, generator=torch.Generator().manual_seed(1))
    with helper.interpreted(products):
        torch.testing.assert_close(products.expand(weight, torch.float32), weight.dequantize(), rtol=1e-6, atol=0)
    torch.testing.assert_close(product(x, weight).double(), reference(x, weight), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_norm_residual(rows):
    generator = torch.Generator().manual_seed(rows)
    weight = made("dense", 48, 272)
    x = torch.randn(rows, 272, generator=generator)
    norm = Norm(torch.rand(272, generator=generator) + 0.5, 1e-5)
    residual = torch.randn(rows, 48, generator=generator)
    out = product(x, weight, norm=norm, residual=residual)
    torch.testing.assert_close(out.double(), reference(x, weight, norm, residual), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [3, 65])
def test_gate(gate, rows):
    generator = torch.Generator().manual_seed(0)
    weight = made("own4", 2 * 25, 320)
    x = torch.randn(rows, 320, generator=generator)
    bias = torch.randn(50, generator=generator)
    out = product(x, weight, gate=gate, bias=bias)
    torch.testing.assert_close(out.double(), reference(x, weight, gate=gate, bias=bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "fp8", "4-32-1", "8-64-1"])
def test_half_precision_rounds_once(kind):
    weight = made(kind, 32, 256)
    weight = weight.half() if kind == "dense" else weight
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).half()
    out = product(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(out.double(), reference(x, weight), rtol=1e-5, atol=1e-5)
    assert torch.equal(product(x, weight), out.half())


def test_bfloat16():
    x, weight, residual = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = Norm(torch.ones(256), 1e-6)
    out = product(x, weight, norm=norm, residual=residual[:, :5])
    torch.testing.assert_close(out.double(), reference(x, weight, norm, residual[:, :5]), rtol=2e-2, atol=2e-2)


def in_order(left, right, dtype):
    """Multiply matrices with one order of sums, as MMA instructions do, and BLAS does not."""
    total = numpy.zeros((*left.shape[:-1], right.shape[-1]), dtype)
    for k in range(left.shape[-1]):
        total += left[..., k, None] * right[..., k, None, :]
    return total


@pytest.mark.parametrize("kind", ["dense", "own4"])
def test_row_has_the_same_bits_alone_and_among_others(kind, monkeypatch):
    monkeypatch.setattr(numpy, "matmul", in_order)
    generator = torch.Generator().manual_seed(0)
    weight = made(kind, 48, 320)
    norm = Norm(torch.rand(320, generator=generator), 1e-6)
    x = torch.randn(64, 320, generator=generator)
    whole = product(x, weight, norm=norm, gate="silu")
    for first, rows in ((0, 1), (63, 1), (7, 5), (40, 17)):
        part = x[first : first + rows]
        assert torch.equal(product(part, weight, norm=norm, gate="silu"), whole[first : first + rows]), (first, rows)
    assert torch.equal(product(x[3:5], weight, norm=norm, gate="silu", tile=Tile(16, 8, 4, 3)), whole[3:5])
