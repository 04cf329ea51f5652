"""AWQ (Lin et al. 2023) in the layout `gemm`, as AutoAWQ writes it.

`qweight` [inputs, outputs / 8] and `qzeros` [groups, outputs / 8] pack eight outputs in the order 0 2 4 6 1 3 5 7.
"""

import torch

from outrider.models.loader.quantized.format import Format, Parts, Settings, refuse
from outrider.models.torch.group_weight import Groups, Layout, in_order, unpack


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
            words=parts[".qweight"],
            scale=parts[".scales"].T,
            zero=in_order(unpack(parts[".qzeros"], 4)).T.to(torch.int16),
            by_input=True,
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
