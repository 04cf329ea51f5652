"""Blocks of GGUF files on the native kernels."""

import pytest
import torch

from outrider.models.loader.load import load_checkpoint
from outrider.models.native import repack
from outrider.models.native.blocks import can_pack, dequantize_blocks, pack_blocks
from outrider.models.native.pack import pack
from outrider.models.torch.gguf_linear import BlockWeight, use_dequantizer
from tests.helpers import tiny
from tests.helpers.gguf_files import random_blocks, write_gguf
from tests.helpers.threads import torch_threads
from tests.models.native.test_native import feed, random_ids, split

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")
# Bits per weight in the packed form.
BITS = {
    "F16": 16,
    "Q8_0": 8.5,
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q2_K": 2.625,
    "Q3_K": 3.5625,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
    "MXFP4": 4.25,
}
KINDS = tuple(BITS)


@pytest.fixture(autouse=True)
def plain_dequantizer():
    """Let the package gguf dequantize the matrices of these tests. It is the reference."""
    use_dequantizer(None)
    yield
    use_dequantizer(dequantize_blocks)


def _random(kind: str, outputs: int, inputs: int, seed: int = 0) -> BlockWeight:
    return BlockWeight(random_blocks(kind, outputs, inputs, seed), kind, inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(40, 256), (32, 512)])
def test_packing_loses_nothing(kind, shape):
    weight = _random(kind, *shape)
    assert torch.equal(pack_blocks([weight]).unpack(), weight.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_dequantize_exactly(kind):
    weight = _random(kind, 40, 512)
    rows = torch.tensor([39, 0, 7, 7, 38]).numpy()
    assert torch.equal(dequantize_blocks(kind, weight.addresses()[rows], 512), weight.dequantize(rows))
    assert dequantize_blocks("IQ2_XXS", weight.addresses(), 512) is None


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_inputs_that_are_no_multiple_of_64_are_padded(kind):
    weight = _random(kind, 16, 96)
    assert torch.equal(pack_blocks([weight]).unpack(), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_table_is_expanded_in_parts(dtype, monkeypatch):
    monkeypatch.setattr(repack, "_VALUES_AT_ONCE", 2 * 32 * 256)
    for kind in KINDS:
        weight = _random(kind, 145, 256)
        assert torch.equal(repack.unpacked_matrix(pack_blocks([weight]), dtype), weight.dequantize().to(dtype))
    for bits in (4, 8, 16, 32):
        packed = pack(torch.randn(145, 96), bits=bits)
        assert torch.equal(repack.unpacked_matrix(packed, dtype), packed.unpack().to(dtype))


def test_rows_can_be_joined_and_reordered():
    first, second = _random("Q4_K", 3, 256, seed=1), _random("Q4_K", 2, 256, seed=2)
    order = torch.tensor([4, 0, 3, 1, 2])
    turned = torch.tensor([2, 0, 1])
    expected = torch.cat([first.dequantize()[turned], second.dequantize()])[order]
    assert torch.equal(first.reordered(turned).dequantize(), first.dequantize()[turned])
    assert torch.equal(first.reordered(turned).reordered(turned).dequantize(), first.dequantize()[turned[turned]])
    assert torch.equal(pack_blocks([first.reordered(turned), second], order=order).unpack(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_takes_the_bits_of_the_file_and_little_more_for_scales(kind):
    weight = _random(kind, 64, 256)
    packed = pack_blocks([weight])
    assert 8 * packed.nbytes == BITS[kind] * 64 * 256
    assert packed.nbytes <= 1.04 * weight.nbytes


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_bits_depend_on_neither_other_rows_nor_threads(kind, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    config = tiny.make_config("LlamaConfig", **sizes)
    path = write_gguf(tmp_path / "model.gguf", tiny.auto_class(config).from_config(config), kind)
    tokens = random_ids(21)
    results = []
    for threads in (1, 3):
        with torch_threads(threads):
            target = tiny.make_target(load_checkpoint(path), slots=2, context=64, kernels="native")
            for widths in ([1] * 21, [2, 3, 4, 5, 7], [6, 15], [3, 18]):
                pieces, ends = split(tokens, widths)
                last = torch.stack([scores.logits[0, -1] for scores in feed(target, pieces)])
                results.append(dict(zip(ends.tolist(), last, strict=True)))
                target.cache.release(0)
    for result in results:
        for at, logits in result.items():
            assert torch.equal(logits, results[0][at])


def test_types_that_are_not_packed():
    assert not can_pack("IQ2_XXS")
