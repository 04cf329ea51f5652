"""The products fit into the chips: no spills, shared memory below 100 KB, loads that are vectorized and pipelined."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.helpers import triton as helper

from outrider.models.triton import linear as products  # isort: skip

_NUMBERS = ("rows", "outputs", "inputs", "x_stride", "values_stride", "residual_stride")


class Kind(NamedTuple):
    """A type of weights: bits, Triton's types of the scales and zero points, and the sizes of groups."""

    name: str
    bits: int
    scale: str = ""
    zero: str = ""
    group: int = 0
    scale_rows: int = 1


KINDS = {
    "dense": Kind("dense", 16),
    "fp8": Kind("fp8", 8, "*fp32"),
    "fp8 blocks": Kind("fp8", 8, "*fp32", group=128, scale_rows=128),
    "int8": Kind("int8", 8, "*bf16"),
    "int4": Kind("int4", 4, "*fp16", "*i8", 128),
    "int4 of 32": Kind("int4", 4, "*fp16", group=32),
}


@pytest.mark.fast_cases("dense-8-80", "dense-32-90", "dense-16-100", "fp8 blocks-32-100", "int4-16-80", "int4-32-90")
@pytest.mark.parametrize("capability", helper.CAPABILITIES)
@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_build(kind, rows, capability, tmp_path):
    name, bits, scale, zero, group, scale_rows = KINDS[kind]
    tile = products.choose_tile(rows, 4096, bits)
    types = {"x": "*bf16", "values": "*bf16" if bits == 16 else "*u8", "norm": "*fp32", "residual": "*bf16"}
    types |= {"out": "*bf16", "epsilon": "fp32", **dict.fromkeys(_NUMBERS, "i32")}
    types |= {argument: kind for argument, kind in (("scale", scale), ("zero", zero)) if kind}
    constants = {"KIND": name, "GROUP": group, "SCALE_ROWS": scale_rows, "GATE": "", "EVEN": True}
    constants |= {"OUTPUTS": tile.outputs, "ROWS": tile.rows, "OVERLAP": capability >= 90}
    constants |= dict.fromkeys({"scale", "zero", "bias"} - types.keys())
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = helper.build(products._product, types, constants, capability=capability, cache=tmp_path, **options)
    assert built.stack == 0
    assert built.shared < 100 * 1024
    assembly = next(tmp_path.glob("**/*.ptx")).read_text()
    loop = assembly[assembly.index("Inner Loop") :]
    assert loop.count("cp.async.cg.shared.global") >= 4
