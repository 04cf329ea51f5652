"""Rotary embedding, norms and moves of entries in Triton, against plain torch."""

import pytest
import torch

from tests.helpers import triton as helper

# isort: split
from outrider.models.triton import layers


def numbers(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x, weight, epsilon):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "pairs", "with_norm"), [(64, 32, True), (80, 16, False)])
def test_rotation_and_writes(dim, pairs, with_norm, dtype):
    heads, key_heads, block, rows, columns = 3, 2, 16, 2, 3
    qkv = numbers(rows * columns, (heads + 2 * key_heads) * dim, dtype=dtype)
    angles = torch.arange(50)[:, None] * torch.logspace(0, -2, pairs)
    position = torch.tensor([4, 5, 5, 40, 41, 0], dtype=torch.int32)
    entry = torch.tensor([14, 15, 16, 1, 0, -1], dtype=torch.int32)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    entries = torch.full((4, 2, key_heads, 2, block, dim), 7.0, dtype=dtype)
    norms = (numbers(dim, seed=1, dtype=dtype), numbers(dim, seed=2, dtype=dtype)) if with_norm else (None, None)

    wanted = qkv.double().view(rows * columns, -1, dim)
    if with_norm:
        wanted[:, :heads] = normed(wanted[:, :heads], norms[0], 1e-5)
        wanted[:, heads : heads + key_heads] = normed(wanted[:, heads : heads + key_heads], norms[1], 1e-5)
    cos = angles.cos().double()[position.long()][:, None]
    sin = angles.sin().double()[position.long()][:, None]
    first = wanted[:, : heads + key_heads, :pairs].clone()
    second = wanted[:, : heads + key_heads, pairs : 2 * pairs].clone()
    wanted[:, : heads + key_heads, :pairs] = first * cos - second * sin
    wanted[:, : heads + key_heads, pairs : 2 * pairs] = second * cos + first * sin
    cache = entries.double()
    for token, to in enumerate(entry.tolist()):
        if to >= 0:
            held = cache[table[token // columns, to // block], 1, :, :, to % block]
            held[:, 0] = wanted[token, heads : heads + key_heads]
            held[:, 1] = wanted[token, heads + key_heads :]

    with helper.interpreted(layers):
        alone = entries.clone()
        query = layers.rotate_and_write(
            qkv, angles.cos(), angles.sin(), position, entry, table, entries[:, 1], *norms, 1e-5
        )
        without_queries = qkv[:, heads * dim :].contiguous()
        layers.rotate_and_write(
            without_queries, angles.cos(), angles.sin(), position, entry, table, alone[:, 1], None, norms[1], 1e-5
        )
    assert torch.equal(alone, entries)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(query.double(), wanted[:, :heads], rtol=0, atol=tolerance)
    torch.testing.assert_close(entries.double(), cache, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype):
    x = numbers(3, 72, dtype=dtype)
    weight = numbers(72, seed=2, dtype=dtype)
    with helper.interpreted(layers):
        plain = layers.rms_norm(x, weight, 1e-5)
        alone = layers.rms_norm(x[1:2], weight, 1e-5)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.equal(alone, plain[1:2])
    torch.testing.assert_close(plain.double(), normed(x, weight, 1e-5), rtol=tolerance, atol=tolerance)
