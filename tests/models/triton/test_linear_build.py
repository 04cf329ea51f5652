"""The products fit into the chips: no spills, shared memory below 100 KB, loads that are vectorized and pipelined."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import triton as helper

from outrider.models.triton import linear as products  # isort: skip
from outrider.models.triton.linear import Tile

_NUMBERS = ("rows", "outputs", "inputs", "x_stride", "values_stride", "out_stride", "residual_stride")


class Kind(NamedTuple):
    """A type of weights: bits, Triton's types of the scales and zero points, and the sizes of groups."""

    name: str
    bits: int
    scale: str = ""
    zero: str = ""
    group: int = 0
    scale_rows: int = 1
    factor: str = ""  # of integer scales


KINDS = {
    "dense": Kind("dense", 16),
    "fp8": Kind("fp8", 8, "*fp32"),
    "fp8 blocks": Kind("fp8", 8, "*fp32", group=128, scale_rows=128),
    "int8": Kind("int8", 8, "*bf16"),
    "int4": Kind("int4", 4, "*fp16", "*i8", 128),
    "int4 of 32": Kind("int4", 4, "*fp16", group=32),
    "int4 with a minimum": Kind("int4", 4, "*fp32", "*fp32", 32),
    "int8 with a minimum": Kind("int8", 8, "*fp32", "*fp32", 32),
    "Q4_K": Kind("int4", 4, "*i8", "*u8", 32, factor="*fp16"),
    "Q5_K": Kind("int6", 8, "*i8", "*u8", 16, factor="*fp16"),
    "Q6_K": Kind("int6", 8, "*i8", group=16, factor="*fp16"),
    "Q3_K": Kind("int4", 4, "*i8", group=16, factor="*fp16"),
    "Q2_K": Kind("int4", 4, "*i8", "*u8", 16, factor="*fp16"),
}


@pytest.mark.fast_cases(
    "dense-8-80",
    "dense-64-90",
    "dense-256-100",
    "fp8 blocks-64-100",
    "int4-16-80",
    "int4-32-90",
    "int4 with a minimum-64-90",
    "Q4_K-8-90",
    "Q6_K-8-80",
    "Q6_K-64-100",
    "Q5_K-32-90",
)
@pytest.mark.parametrize("capability", helper.CAPABILITIES)
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_build(kind, rows, capability, tmp_path):
    costly = KINDS[kind].factor != "" or KINDS[kind].zero == "*fp32"
    tile = products.choose_tile(rows, 9000, KINDS[kind].bits, grouped=KINDS[kind].group > 0, costly=costly)
    assembly, built = compiled(KINDS[kind], tile, capability, tmp_path)
    assert built.stack == 0
    assert built.shared < 100 * 1024
    loop = assembly[assembly.index("Inner Loop") :]
    assert loop.count("cp.async.cg.shared.global") >= 4
    assert assembly.count("mma.sync") >= 4
    assert "wgmma" not in assembly  # other instructions would sum in another order
    assert "tcgen05" not in assembly
    check_sums_of_squares(tmp_path)


def check_sums_of_squares(cache: Path) -> None:
    """Check that a thread sums eight inputs in a row, and the threads of a warp the others of a chain."""
    code = next(cache.glob("**/*.ttgir")).read_text()
    for name in set(re.findall(r'"tt.reduce"\(.*?\}\) : \(tensor<[^,]*, (#\w+)>', code, re.DOTALL)):
        layout = re.search(re.escape(name) + r" = (.*)", code)[1]
        assert re.search(r"sizePerThread = \[1, 8, 1\], threadsPerWarp = \[\d+, [48], \d+\]", layout)
        assert re.search(r"warpsPerCTA = \[\d+, 1, \d+\]", layout)


def compiled(kind: Kind, tile: Tile, capability: int, cache: Path) -> tuple[str, helper.Build]:
    """Compile the product with a norm, and return its assembly."""
    kernel = products._chain if tile.form == "split" else products._product
    types = {"x": "*bf16", "values": "*bf16" if kind.bits == 16 else "*u8", "residual": "*bf16", "out": "*bf16"}
    types |= {"sums": "*fp32", "squares": "*fp32", "epsilon": "fp32", **dict.fromkeys(_NUMBERS, "i32")}
    types |= {"scale": kind.scale, "zero": kind.zero, "factor": kind.factor, "norm": "*bf16" if tile.rows <= 64 else ""}
    types = {name: each for name, each in types.items() if each and name in kernel.arg_names}
    constants = {"KIND": kind.name, "GROUP": kind.group, "SCALE_ROWS": kind.scale_rows, "GATE": "", "EVEN": True}
    constants |= {"OUTPUTS": tile.outputs, "ROWS": tile.rows, "PARTS": tile.warps}
    constants |= dict.fromkeys({"scale", "zero", "factor", "bias", "norm"} - types.keys())
    constants = {name: each for name, each in constants.items() if name in kernel.arg_names}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = helper.build(kernel, types, constants, capability=capability, cache=cache, **options)
    return next(cache.glob("**/*.ptx")).read_text(), built
