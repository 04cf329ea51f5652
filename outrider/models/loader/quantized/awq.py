"""AWQ (Lin et al. 2023) in the layout `gemm`, as AutoAWQ writes it.

`qweight` [inputs, outputs / 8] and `qzeros` [groups, outputs / 8] pack eight outputs in the order 0 2 4 6 1 3 5 7.
"""

from __future__ import annotations

import torch

from outrider.models.loader.quantized.format import Format, Parts, Settings, refuse
from outrider.models.torch.group_weight import Groups, Layout, unpack

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight outputs in a word


def awq(settings: Settings) -> Format:
    """Return the format of AWQ checkpoints.

    Raises:
        UnsupportedModel: the weights have other bits than 4, or another layout.
    """
    bits = settings.get("bits", settings.get("w_bit"))
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4:
        raise refuse(f"AWQ with {bits} bits")
    if version != "gemm":
        raise refuse(f"AWQ in the layout {version}")

    def layout(parts: Parts) -> Layout:
        inputs, words = parts.shape(".qweight")
        rows = parts.shape(".scales")[0]
        return Layout(outputs=8 * words, inputs=inputs, bits=4, group=-(-inputs // rows))

    def groups(parts: Parts) -> Groups:
        return Groups(
            layout=layout(parts),
            words=_transposed(parts[".qweight"]),
            scale=parts[".scales"].T,
            zero=_in_order(unpack(parts[".qzeros"], 4)).T.to(torch.int16),
        )

    return Format(
        name="AWQ",
        keys=(".qweight",),
        parts=(".qzeros", ".scales"),
        shape=lambda parts: torch.Size((layout(parts).outputs, layout(parts).inputs)),
        dense=lambda parts: groups(parts).dequantize(),
        layout=layout,
        groups=groups,
    )


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """Return values [n, outputs] with each eight outputs in their order."""
    return values.view(len(values), -1, 8)[:, :, _PLACES].flatten(1)


def _transposed(packed: torch.Tensor) -> torch.Tensor:
    """Return words of eight inputs [outputs, inputs / 8] from words of eight outputs [inputs, outputs / 8].

    Squares of eight words are transposed in place: halves of words first, and then bytes and 4-bit integers.
    """
    inputs, count = packed.shape
    words = packed.clone().view(inputs // 8, 8, count)
    for bits, mask in ((16, 0xFFFF), (8, 0xFF00FF), (4, 0xF0F0F0F)):
        first, second = words.view(inputs // 8, -1, 2, bits // 4, count).unbind(2)
        differing = ((first >> bits) ^ second) & mask
        second ^= differing
        first ^= differing << bits
    return words[:, _PLACES].permute(2, 1, 0).reshape(8 * count, inputs // 8)
