"""Attention in Triton against plain torch: masks, ragged batches, page sizes, tails; equal bits in every batch."""

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
    "plain": ({"prefixes": [70, 0, 133], "columns": 1}, {}),
    "pages of 64": ({"prefixes": [70, 3], "columns": 3, "block": 64, "dim": 128}, {}),
    "tree": ({"prefixes": [37, 64], "columns": 9, "block": 32, "heads": 2, "key_heads": 1}, {}),
    "two words": ({"prefixes": [37], "columns": 70, "words": 2, "heads": 1, "key_heads": 1, "dim": 16}, {}),
    "window": ({"prefixes": [150, 9], "columns": 5, "heads": 2, "key_heads": 1}, {"window": 40}),
    "cap and sinks": ({"prefixes": [50, 1], "columns": 3, "heads": 6, "dim": 32}, {"softcap": 3.0, "sinks": True}),
    "dim 80": ({"prefixes": [20, 65], "columns": 2, "dim": 80, "heads": 3, "key_heads": 1}, {}),
}


def check(case, dtype, tolerance):
    inputs, options = CASES[case]
    given = paged.random_pass(**inputs, dtype=dtype)
    if "sinks" in options:
        options = {**options, "sinks": torch.linspace(-1, 2, given.query.shape[1])}
    out = run(given, scale=0.3, **options)
    torch.testing.assert_close(out.double(), paged.expected(given, scale=0.3, **options), rtol=0, atol=tolerance)


@pytest.mark.fast_cases("plain", "tree", "window", "cap and sinks")
@pytest.mark.parametrize("case", CASES)
def test_attention(case):
    check(case, torch.float32, 1e-5)


@pytest.mark.fast_cases("bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_half_precision(dtype):
    check("cap and sinks", dtype, 2e-2)


def test_padding_sees_the_prefix_or_nothing():
    given = paged.random_pass([20, 0], 3, heads=2, key_heads=1, dim=16)
    given.bits[[1, 2, 3, 4, 5]] = 0
    out = run(given, scale=0.3)
    assert torch.equal(out[3:], torch.zeros(3, 2, 16))
    torch.testing.assert_close(out.double(), paged.expected(given, scale=0.3), rtol=0, atol=1e-5)


def test_a_prefix_below_zero_hides_the_first_tokens():
    """Later modules of a draft head have no entries for them."""
    given = paged.random_pass([0], 5, heads=2, key_heads=1, dim=16, tree=False)
    later = given._replace(prefix=given.prefix - 2, bits=given.bits.masked_fill(given.bits < 4, 0))
    out = run(later, scale=0.3)
    assert torch.equal(out, run(given._replace(bits=given.bits >> 2), scale=0.3))
    assert not out[:2].any()
    with helper.interpreted(attention):
        prompt = attention.attend_prompt(*later, scale=0.3, rows=1, columns=5)
    torch.testing.assert_close(prompt, out, rtol=0, atol=1e-5)


def test_padding_beyond_the_block_table_does_no_harm():
    given = paged.random_pass([61], 3, heads=2, key_heads=1, dim=16, tree=False)
    given = given._replace(entries=given.entries.nan_to_num(), block_table=given.block_table[:, :4].contiguous())
    wanted = run(given, scale=0.3)[:2]
    given.bits[2] = 2**63 - 1
    assert torch.equal(run(given, scale=0.3)[:2], wanted)


def test_bits_do_not_depend_on_the_batch(monkeypatch):
    """One token alone, among 64 columns, and among 32 rows of other lengths, which take turns."""
    options = {"scale": 0.3, "window": 100, "shape": SHAPE._replace(keys=32)}
    sizes = {"heads": 1, "key_heads": 1, "dim": 16, "block": 32, "dtype": torch.float16, "tree": False}
    wide = paged.random_pass([150], 64, **sizes)
    columns = run(wide, **options)
    for column in (0, 40):
        assert torch.equal(run(paged.column(wide, column), **options)[0], columns[column])
    many = paged.random_pass([3 * row for row in range(31)], 1, **sizes)
    monkeypatch.setattr(attention, "WORKSPACE", 2560)
    joined = paged.join(many, paged.column(wide, 40))
    assert torch.equal(run(joined, **options)[-1], columns[40])


@pytest.mark.fast_cases("24-float32", "0-bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 24])
def test_prompt(window, dtype):
    columns = 30
    given = paged.random_pass([37, 0], columns, heads=3, key_heads=1, dim=80, dtype=dtype, tree=False)
    given.bits[-1] = 0
    options = {"scale": 0.3, "window": window, "softcap": 5.0, "sinks": torch.linspace(-1, 2, 3)}
    shape = attention.Shape(rows=32, keys=16)
    with helper.interpreted(attention):
        out = attention.attend_prompt(*given, rows=2, columns=columns, shape=shape, **options)
        later = paged.later(given, 0, 7)
        cut = attention.attend_prompt(*later, rows=1, columns=columns - 7, shape=shape, **options)
    assert not out[-1].any()
    assert torch.equal(cut, out[7:columns])
    # A token of a prompt sees what it sees when it is alone.
    wanted = [paged.expected(paged.column(given, at), **options)[0] for at in range(2 * columns - 1)]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out[:-1].double(), torch.stack(wanted), rtol=0, atol=tolerance)
