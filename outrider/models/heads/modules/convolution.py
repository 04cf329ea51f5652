"""Decoder layers with convolutions over the columns of a block (DFlash 2).

A column of a block does not see the draft tokens before it. Convolutions before and after attention and MLP pass on
what the columns before it have computed. Each channel has a coefficient per column that it reads: a trained constant,
and a part that a projection of the input computes for a group of adjacent channels. Both convolutions of a sublayer
take their coefficients from one projection of its input. A block never reads columns of another block, and hidden
states of the target are not convolved.
"""

import torch
from torch import nn
from torch.nn import functional

from outrider.models.heads.description import Body, Convolution
from outrider.models.heads.modules.layers import AttentionFunction, Layer

_BEFORE, _AFTER = 0, 1  # the convolutions of the input and of the output of a sublayer


class SublayerConvolution(nn.Module):
    """The two convolutions around one sublayer. New ones change nothing."""

    def __init__(self, width: int, convolution: Convolution, size: int) -> None:
        """Create the convolutions for blocks of `size` columns of `width` channels."""
        super().__init__()
        self.size = size
        self.taps = convolution.taps
        self.group = convolution.group
        self.base_kernel = nn.Parameter(torch.zeros(2, convolution.taps, width))
        self.kernel_projection = nn.Linear(width, 2 * convolution.taps * (width // convolution.group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def coefficients(self, x: torch.Tensor) -> torch.Tensor:
        """Return the coefficients [*, 2, taps, H] of columns for inputs [*, H] of the sublayer."""
        by_group: torch.Tensor = self.kernel_projection(x)
        by_group = by_group.view(*x.shape[:-1], 2, self.taps, -1)
        return self.base_kernel.to(x.dtype) + by_group.repeat_interleave(self.group, -1)

    def convolve(self, x: torch.Tensor, coefficients: torch.Tensor, which: int) -> torch.Tensor:
        """Return [*, n * size, H] of the columns [*, n * size, H] of n blocks, and coefficients of `coefficients`."""
        by_block = (*x.shape[:-2], -1, self.size)
        blocks = x.reshape(*by_block, x.shape[-1])
        kernel = coefficients[..., which, :, :].reshape(*by_block, self.taps, x.shape[-1])
        out = kernel[..., 0, :] * blocks
        for tap in range(1, self.taps):
            earlier = functional.pad(blocks[..., :-tap, :], (0, 0, tap, 0))
            out = out + kernel[..., tap, :] * earlier
        return out.flatten(-3, -2)


class ConvolvedLayer(Layer):
    """A decoder layer with convolutions around attention and MLP."""

    def __init__(self, body: Body, layer: int, convolution: Convolution, size: int) -> None:
        super().__init__(body, layer, inputs=body.hidden)
        self.attention_conv = SublayerConvolution(body.hidden, convolution, size)
        self.mlp_conv = SublayerConvolution(body.hidden, convolution, size)

    def forward(
        self,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: AttentionFunction,
        *,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert attention_input is None
        x = self.input_layernorm(residual)
        kernel = self.attention_conv.coefficients(x)
        out = self.self_attn(self.attention_conv.convolve(x, kernel, _BEFORE), rotary, attend)
        residual = residual + self.attention_conv.convolve(out, kernel, _AFTER)
        x = self.post_attention_layernorm(residual)
        kernel = self.mlp_conv.coefficients(x)
        out = self.mlp(self.mlp_conv.convolve(x, kernel, _BEFORE))
        return residual + self.mlp_conv.convolve(out, kernel, _AFTER)
