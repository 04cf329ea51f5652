"""The kernels quantize weights as a plain reference does."""

import pytest
import torch
from torch.nn import functional

from outrider.models.native.arena import Arena
from outrider.models.native.pack import GROUP, PackedWeight, pack, quantize


def _reference(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the quantized weight in float32: rounded to multiples of a scale, which is rounded to bfloat16 first."""
    padded = functional.pad(weight.float(), (0, -weight.shape[1] % GROUP))
    groups = padded.view(len(weight), -1, GROUP)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    minimum = low.bfloat16().float() if bits == 4 else torch.zeros_like(low)
    largest = (high - minimum) / 15 if bits == 4 else torch.maximum(high, -low) / 127
    scale = largest.bfloat16().float()
    codes = ((groups - minimum) / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_()
    codes = codes.clamp_(0, 15) if bits == 4 else codes.clamp_(-127, 127)
    return (codes * scale + minimum).flatten(1)[:, : weight.shape[1]]


def _weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    weight[0] = 0
    weight[1] = weight[1, 0]  # one value only
    weight[2] = weight[2].abs()
    weight[3] *= 1e-30
    return weight.to(dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns"), [(4, 64), (32, 61), (100, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_reference(bits, rows, columns, dtype):
    weight = _weight(rows, columns, dtype)
    torch.testing.assert_close(pack(weight, bits=bits).unpack(), _reference(weight, bits), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("source_bits", [32, 16, 8])
def test_a_packed_weight_is_quantized_again(bits, source_bits):
    source = pack(_weight(100, 200, torch.float32), torch.ones(100), bits=source_bits)
    again = quantize(source.c(), source.shape, source.bias, bits=bits, arena=Arena())
    expected = pack(source.unpack(), bits=bits)
    assert torch.equal(again.bias, source.bias)
    assert all(torch.equal(_tensors(again)[name], each) for name, each in _tensors(expected).items())


def test_scales_are_fitted_to_the_important_inputs():
    """The weighted square error is that of a least-squares fit in float64, and smaller than with the range's scales."""
    weight = _weight(100, 200, torch.float32)
    importance = torch.rand(200, generator=torch.Generator().manual_seed(0)) ** 4
    importance[64:128] = 0  # these inputs are not used: any scale does
    source = pack(weight, bits=32)
    fitted = quantize(source.c(), source.shape, None, bits=4, arena=Arena(), importance=importance)

    def error(quantized: torch.Tensor) -> torch.Tensor:
        return ((quantized - weight).double() ** 2 * importance).sum(-1)

    expected = error(_fitted_reference(weight, importance))
    torch.testing.assert_close(error(fitted.unpack()), expected, rtol=0.02, atol=1e-12)
    ranged = error(pack(weight, bits=4).unpack())
    assert error(fitted.unpack())[4:].sum() < 0.8 * ranged[4:].sum()
    exact = fitted.unpack()[:2]  # rows of zeros and of one value
    torch.testing.assert_close(exact, weight[:2].bfloat16().float(), rtol=1e-3, atol=0)


def _fitted_reference(weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Return 4-bit weights with scales fitted twice to the codes they give."""
    padding = (0, -weight.shape[1] % GROUP)
    groups = functional.pad(weight.double(), padding).view(len(weight), -1, GROUP)
    share = functional.pad(importance.double(), padding).view(1, -1, GROUP)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    scale, minimum = 0.95 * (high - low) / 15, low + 0.025 * (high - low)
    tiny = torch.finfo(torch.float32).tiny

    def codes():
        return ((groups - minimum) / scale.clamp(min=tiny)).clamp(0, 15).round()

    def mean(values):
        return (values * share).sum(-1, keepdim=True) / share.sum(-1, keepdim=True).clamp(min=tiny)

    for _ in range(2):
        x = codes()
        spread = mean(x * x) - mean(x) ** 2
        slope = (mean(x * groups) - mean(x) * mean(groups)) / spread.clamp(min=tiny)
        differ = spread > 1e-6 * mean(x * x)
        scale = torch.where(differ, slope, scale)
        minimum = mean(groups) - scale * mean(x)
    scale, minimum = scale.bfloat16().double(), minimum.bfloat16().double()
    return (codes() * scale + minimum).float().flatten(1)[:, : weight.shape[1]]


def _tensors(packed: PackedWeight) -> dict[str, torch.Tensor]:
    tensors = {"words": packed.words, "scale": packed.scale, "minimum": packed.minimum}
    return {name: value for name, value in tensors.items() if value is not None}
