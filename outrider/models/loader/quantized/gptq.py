"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it.

`qweight` [inputs * bits / 32, outputs] packs the inputs of each output, and `qzeros` [groups,
outputs * bits / 32] the outputs of each group, from the lowest bits on. `g_idx` [inputs] has the
group of each input. Zero points of format version 1 are stored minus 1.
"""

from typing import Any

import torch

from outrider.models.loader.quantized.format import Format, Parts, Settings, refuse
from outrider.models.torch.group_weight import Groups, Layout, unpack

_VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zero points


def gptq(settings: Settings) -> Format:
    """Return the format of GPTQ checkpoints.

    Raises:
        UnsupportedModel: the weights have other bits than 4 or 8, or another layout.
    """
    bits: Any = settings.get("bits")
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    overrides = settings.get("dynamic") or {}
    widths = {bits, *(each["bits"] for each in overrides.values() if isinstance(each, dict) and "bits" in each)}
    if unread := sorted(widths - {4, 8}, key=str):
        raise refuse(f"GPTQ with {unread[0]} bits")
    if version not in _VERSIONS or settings.get("is_marlin_format"):
        raise refuse(f"GPTQ in the layout {'marlin' if settings.get('is_marlin_format') else version}")

    def layout(parts: Parts) -> Layout:
        words, outputs = parts.shape(".qweight")
        rows = parts.shape(".scales")[0]
        order = parts.find(".g_idx")
        width = bits if order is None else 32 * words // len(order)
        inputs = words * 32 // width
        group = -(-inputs // rows)
        return Layout(outputs=outputs, inputs=inputs, bits=width, group=group, index=_index(order, group))

    def groups(parts: Parts) -> Groups:
        shape = layout(parts)
        zero = unpack(parts[".qzeros"], shape.bits).T.to(torch.int16) + _VERSIONS[version]
        return Groups(
            layout=shape, words=parts[".qweight"].T, scale=parts[".scales"].T, zero=_unless_middle(zero, shape.middle)
        )

    return Format(
        name="GPTQ",
        keys=(".qweight",),
        parts=(".qzeros", ".scales", ".g_idx"),
        shape=lambda parts: torch.Size((layout(parts).outputs, layout(parts).inputs)),
        dense=lambda parts: groups(parts).dequantize(),
        layout=layout,
        groups=groups,
    )


def _index(order: torch.Tensor | None, group: int) -> torch.Tensor | None:
    """Return the group of each input, or None if groups have consecutive inputs."""
    if order is None or torch.equal(order.long(), torch.arange(len(order)) // group):
        return None
    return order.long()


def _unless_middle(zero: torch.Tensor, middle: int) -> torch.Tensor | None:
    """Return zero points, or None for symmetric weights."""
    return None if bool((zero == middle).all()) else zero
