"""The helper runs a kernel on the CPU and builds it for GPUs, in one process."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.helpers import triton as helper

triton = helper.triton
tl = helper.language


@triton.jit
def _scaled(product, scale):
    return product * scale


@triton.jit
def _multiply(left, right, out, scale, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    place = rows[:, None] * SIZE + rows[None, :]
    product = _scaled(tl.dot(tl.load(left + place), tl.load(right + place), input_precision="ieee"), scale)
    tl.store(out + place, product + tl.sum(product, 1)[:, None])


TYPES = {"left": "*bf16", "right": "*bf16", "out": "*fp32", "scale": "fp32"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_interpreted_kernel_and_build_beside_it(dtype, tmp_path):
    left, right = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.empty(16, 16)
    with helper.interpreted(sys.modules[__name__]):
        _multiply[(1,)](left, right, out, 0.5, SIZE=16)
    product = left.float() @ right.float() / 2
    torch.testing.assert_close(
        out, product + product.sum(1, keepdim=True), rtol=1e-2 if dtype is not torch.float32 else 1e-5, atol=1e-3
    )
    built = helper.build(_multiply, TYPES, {"SIZE": 16}, capability=90, cache=tmp_path, num_warps=4)
    assert built.stack == 0
    assert 0 < built.registers <= 255
    assert 0 < built.shared <= 4096
