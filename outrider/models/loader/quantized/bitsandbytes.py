"""bitsandbytes: 4-bit weights of a table of values (nf4 of Dettmers et al. 2023, or fp4), and int8 weights."""

import json
from typing import Any

import torch

from outrider.models.loader.quantized.format import Format, Parts, Settings, shifted
from outrider.models.torch.group_weight import Groups, Layout

_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_SCALE = ".SCB"  # the largest absolute value of each output


def bitsandbytes(settings: Settings) -> Format:
    """Return the format of bitsandbytes checkpoints with 4 or 8 bits."""
    if settings.get("load_in_4bit"):
        ends = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
        return Format(
            name=f"bitsandbytes {settings.get('bnb_4bit_quant_type', 'fp4')}",
            keys=_STATES,
            parts=(".weight", *(f".weight{end}" for end in ends)),
            shape=lambda parts: torch.Size(_state(parts)["shape"]),
            dense=_dense,
        )
    return Format(
        name="bitsandbytes int8",
        keys=(_SCALE,),
        parts=(".weight", ".weight_format"),
        shape=lambda parts: parts.shape(".weight"),
        dense=lambda parts: _groups(parts).dequantize(),
        layout=_layout,
        groups=_groups,
        activations="8-bit int",
    )


def _state(parts: Parts) -> dict[str, Any]:
    """Return the sizes that are stored with a 4-bit weight."""
    stored = next(parts[end] for end in _STATES if end in parts)
    state: dict[str, Any] = json.loads(bytes(stored.tolist()))
    return state


def _dense(parts: Parts) -> torch.Tensor:
    """Look 4-bit values up in the table, the higher bits of a byte first. Multiply them with the scales of blocks."""
    state = _state(parts)
    packed = parts[".weight"].flatten()
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten()
    scale = parts[".weight.absmax"]
    if ".weight.nested_absmax" in parts:  # the scales are quantized, too
        table = parts[".weight.nested_quant_map"]
        block = parts[".weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(scale)]
        scale = table[scale.int()] * block + state["nested_offset"]
    count = torch.Size(state["shape"]).numel()
    values = parts[".weight.quant_map"][codes[:count].int()]
    return (values * scale.repeat_interleave(state["blocksize"])[:count]).view(state["shape"])


def _layout(parts: Parts) -> Layout:
    outputs, inputs = parts.shape(".weight")
    return Layout(outputs=outputs, inputs=inputs, bits=8, group=inputs)


def _groups(parts: Parts) -> Groups:
    scale = parts[_SCALE].float()[:, None] / 127
    return Groups(layout=_layout(parts), words=shifted(parts[".weight"]), scale=scale)
