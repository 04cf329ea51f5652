"""MXFP4 (OCP Microscaling Formats 1.0) experts, as gpt-oss stores them.

`_blocks` [experts, outputs, inputs / 32, 16] has two 4-bit floats in a byte, the lower bits first.
`_scales` [experts, outputs, inputs / 32] has the exponent of each block plus 127.
"""

import torch

from outrider.models.loader.quantized.format import Format, Parts, Settings
from outrider.models.torch.group_weight import unpack

_SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_VALUES = torch.cat([_SIZES, -_SIZES])


def mxfp4(settings: Settings) -> Format:
    """Return the format of MXFP4 checkpoints."""
    return Format(name="MXFP4", keys=("_blocks",), parts=("_scales",), weight="", shape=_shape, dense=_dense)


def _shape(parts: Parts) -> torch.Size:
    experts, outputs, blocks, size = parts.shape("_blocks")
    return torch.Size((experts, 2 * blocks * size, outputs))


def _dense(parts: Parts) -> torch.Tensor:
    """Return the experts [experts, inputs, outputs], as transformers has them."""
    values = _VALUES[unpack(parts["_blocks"], 4).int()]
    exponent = parts["_scales"].int() - 127
    scale = torch.ldexp(torch.ones(exponent.shape), exponent)
    return (values * scale[..., None]).flatten(2).transpose(1, 2).contiguous()
