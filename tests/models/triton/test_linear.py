"""Products of few rows equal the reference, and a row has the same bits alone and among others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tests.helpers import triton as helper

from outrider.models.triton import expand  # isort: skip
from outrider.models.triton import linear as products  # isort: skip
from outrider.models.torch.fp8_weight import Fp8
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.group_weight import Groups, Layout, pack_integers
from outrider.models.triton.linear import Norm, Tile, linear
from outrider.models.triton.quantized import (
    JoinedWeight,
    Matrix,
    QuantizedWeight,
    from_fp8,
    from_groups,
    from_weight,
    quantize,
    stacked,
)

ROWS = (1, 2, 5, 16, 17, 33, products.MAX_ROWS + 1)  # the last: cuBLAS


def made(kind: str, outputs: int, inputs: int) -> Matrix:
    """Return a random weight."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    dense = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    if kind == "dense":
        return dense
    if kind.startswith("own"):
        return quantize(dense, int(kind[3:]))
    if kind == "fp8":
        scale = dense.abs().amax(1, keepdim=True) / 448
        return from_fp8(Fp8(values=(dense / scale).to(torch.float8_e4m3fn), scale=scale, block=(1, inputs)))
    if kind == "fp8 blocks":
        scale = torch.rand(-(-outputs // 128), -(-inputs // 128), generator=generator) + 0.5
        return from_fp8(Fp8(values=dense.to(torch.float8_e4m3fn), scale=scale, block=(128, 128)))
    if "K" in kind:
        files = pytest.importorskip("tests.helpers.gguf_files")
        kinds = kind.split()
        parts = [BlockWeight(files.random_blocks(each, outputs // len(kinds), inputs), each, inputs) for each in kinds]
        return stacked([from_weight(part) for part in parts])
    bits, group, zero = map(int, kind.split("-"))
    group = group or inputs
    values = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    sizes = (outputs, -(-inputs // group))
    weight = from_groups(
        Groups(
            layout=Layout(outputs=outputs, inputs=inputs, bits=bits, group=group),
            words=pack_integers(values, bits),
            scale=(torch.rand(sizes, generator=generator) + 0.5).half() / inputs**0.5,
            zero=torch.randint(0, 1 << bits, sizes, generator=generator, dtype=torch.int16) if zero else None,
        )
    )
    return replace(weight, zero=torch.rand(weight.scale.shape, generator=generator)) if zero == 2 else weight


def product(*arguments, **options):
    with helper.interpreted(products):
        return linear(*arguments, **options)


def reference(x, weight, norm=None, residual=None, gate="", bias=None):
    """The product in float64."""
    dense = weight.dequantize() if isinstance(weight, QuantizedWeight | JoinedWeight) else weight
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
    "4-32-2",  # 2: a minimum in place of a zero point
    "8-32-2",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q4_K Q6_K",
]


def width(kind: str) -> int:
    """Return a number of inputs that the type has."""
    return 512 if "K" in kind else 288


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_of_weight(kind):
    weight = made(kind, 40, width(kind))
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1))
    expected = reference(x, weight)
    # A minimum is subtracted from sums that are larger than what is left.
    tolerance = 5e-5 * max(1.0, float(expected.abs().max()) / 4)
    torch.testing.assert_close(product(x, weight).double(), expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_prompts_expand_the_weight(kind):
    weight = made(kind, 40, width(kind))
    x = torch.randn(products.MAX_ROWS + 1, weight.shape[1], generator=torch.Generator().manual_seed(1))
    with helper.interpreted(products):
        torch.testing.assert_close(products.expand(weight, torch.float32), weight.dequantize(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(product(x, weight).double(), reference(x, weight), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kind", ["Q6_K", "Q4_K", "own4"])
def test_rows_of_an_embedding(kind):
    table = made(kind, 40, 512)
    tokens = torch.tensor([3, 39, 0, 3, 99])
    with helper.interpreted(expand):
        rows = expand.embed(tokens, table, torch.bfloat16)
    assert torch.equal(rows, table.dequantize().bfloat16()[tokens.clamp(max=39)])


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("rows", [3, 20])
def test_parts_of_other_types(gate, rows):
    weight = made("Q4_K Q6_K", 48, 256)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)) / 64
    options = {"norm": Norm(torch.rand(256) / 64, 1e-6), "gate": gate, "bias": torch.randn(48)}
    options["residual"] = torch.randn(rows, 24 if gate else 48)
    out = product(x, weight, **options)
    torch.testing.assert_close(out.double(), reference(x, weight, **options), rtol=1e-4, atol=1e-4)
    assert torch.equal(product(x[2:3], weight, **options | {"residual": options["residual"][2:3]})[0], out[2])


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
@pytest.mark.parametrize("rows", [3, products.MAX_ROWS + 1])
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


@pytest.mark.parametrize("kind", ["dense", "own4", "Q6_K", "Q5_K"])
def test_row_has_the_same_bits_in_each_tile(kind, monkeypatch):
    """A program computes the four chains at once, one after the other, or one of them."""
    monkeypatch.setattr(products, "FINISH_ROWS", 64)  # fewer programs take less time
    generator = torch.Generator().manual_seed(0)
    inputs = width(kind)
    weight = made(kind, 48, inputs)
    norm = Norm(torch.rand(inputs, generator=generator) / (64 if "K" in kind else 1), 1e-6)
    x = torch.randn(66, inputs, generator=generator).half()
    weight = weight.half() if kind == "dense" else weight
    options = {"norm": norm, "gate": "silu", "bias": torch.randn(48, generator=generator)}
    whole = product(x, weight, **options)
    torch.testing.assert_close(whole.double(), reference(x, weight, **options), rtol=1e-2, atol=1e-2)
    for rows in (1, 9, 40):
        assert torch.equal(product(x[:rows], weight, **options), whole[:rows]), rows
    for tile in (Tile(32, 16, 4, 3), Tile(64, 16, 8, 3, "split")):
        assert torch.equal(product(x[60:], weight, **options, tile=tile), whole[60:]), tile


@pytest.mark.parametrize("kind", ["dense", "fp8 blocks", "4-32-2"])
def test_row_has_the_same_bits_among_many(kind, monkeypatch):
    monkeypatch.setattr(products, "FINISH_ROWS", 64)  # fewer programs take less time
    weight = made(kind, 40, 272)
    weight = weight.half() if kind == "dense" else weight
    x = torch.randn(300, 272, generator=torch.Generator().manual_seed(1)).half()
    residual = torch.randn(300, 40, generator=torch.Generator().manual_seed(2)).half()
    whole = product(x, weight, residual=residual)
    for first, rows in ((299, 1), (235, 65), (170, 130)):
        part = slice(first, first + rows)
        assert torch.equal(product(x[part], weight, residual=residual[part]), whole[part]), (first, rows)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256, 512])
@pytest.mark.parametrize("outputs", [2048, 4096, 6144, 28672, 128256])
def test_tiles_fill_the_chip_and_fit_into_it(rows, outputs):
    for bits, grouped in ((16, False), (8, False), (8, True), (4, True)):
        tile = products.choose_tile(rows, outputs, bits, grouped=grouped)
        programs = -(-rows // tile.rows) * -(-outputs // tile.outputs) * (4 if tile.form == "split" else 1)
        assert programs >= 120
        stage = 256 // (4 if tile.form == "split" else 1) * (tile.outputs * bits // 8 + 2 * tile.rows + 4)
        assert (tile.stages - 1) * stage < 100 * 1024
        assert tile.stages >= 3
