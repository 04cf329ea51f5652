"""Attention in Triton against plain torch: masks, ragged batches, page sizes, tails; equal bits in every batch."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import triton as helper
from tests.models.triton import paged

# isort: split
from outrider.models.triton import attention

SHAPE = attention.Shape(keys=16, piece=64, programs=8)


def run(given, *, shape=SHAPE, **options):
    rows = len(given.prefix)
    with helper.interpreted(attention):
        return attention.attend(*given, rows=rows, columns=len(given.query) // rows, shape=shape, **options)


CASES = {
    "plain": ({"prefixes": [70, 0, 33, 200], "columns": 1}, {}),
    "tree": ({"prefixes": [70, 3, 33], "columns": 17, "block": 64}, {}),
    "wide tail": ({"prefixes": [37, 64], "columns": 64, "block": 32}, {}),
    "two words": ({"prefixes": [37], "columns": 70, "words": 2, "block": 64}, {}),
    "window": ({"prefixes": [150, 9], "columns": 5}, {"window": 40}),
    "cap and sinks": ({"prefixes": [50, 1], "columns": 3, "heads": 6}, {"softcap": 3.0, "sinks": True}),
    "dim 80": ({"prefixes": [20, 65], "columns": 2, "dim": 80, "heads": 3, "key_heads": 1}, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_attention(case, dtype):
    shape, options = CASES[case]
    given = paged.random_pass(**shape, dtype=dtype)
    if "sinks" in options:
        options = {**options, "sinks": torch.linspace(-1, 2, given.query.shape[1])}
    out = run(given, scale=0.3, **options)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), paged.expected(given, scale=0.3, **options), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 24])
def test_prompt(window, dtype):
    given = paged.random_pass([37, 0], 50, heads=6, dim=80, dtype=dtype, tree=False)
    sinks = torch.linspace(-1, 2, 6)
    options = {"scale": 0.3, "window": window, "softcap": 5.0, "sinks": sinks}
    shape = attention.Shape(rows=32, keys=16)
    with helper.interpreted(attention):
        out = attention.attend_prompt(*given, rows=2, columns=50, shape=shape, **options)
    # Column by column, the entries before it are committed.
    every = given._replace(
        prefix=given.position, bits=torch.ones_like(given.bits), block_table=given.block_table.repeat_interleave(50, 0)
    )
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), paged.expected(every, **options), rtol=0, atol=tolerance)
