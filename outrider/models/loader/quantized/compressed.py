"""compressed-tensors, as LLM Compressor writes it: the formats pack-quantized, int-quantized and float-quantized.

The tensors of a weight say how it is stored. `weight_packed` has integers of 4 or 8 bits plus half their range, from
the lowest bits on. `weight` is int8 or float8. A scale belongs to a group of inputs, an output, a block or the matrix.
"""

from typing import Any

import torch

from outrider.models.loader.quantized.format import Format, Parts, Settings, refuse, shifted
from outrider.models.torch.fp8_weight import Fp8, by_block
from outrider.models.torch.group_weight import Groups, Layout, unpack

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_SCALE, _ZERO, _PACKED = ".weight_scale", ".weight_zero_point", ".weight_packed"


def compressed_tensors(settings: Settings) -> Format:
    """Return the format of compressed-tensors checkpoints.

    Raises:
        UnsupportedModel: the weights have other bits than 4 or 8, or another format; or they are sparse.
    """
    schemes = list((settings.get("config_groups") or {}).values())
    formats = {settings.get("format"), *(scheme.get("format") for scheme in schemes)} - {None}
    if unread := sorted(formats - {*_FORMATS, "dense"}):
        raise refuse(f"compressed-tensors in the format {unread[0]}")
    sparsity = (settings.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise refuse(f"compressed-tensors with the sparsity format {sparsity}")
    if settings.get("transform_config"):
        raise refuse("compressed-tensors with transforms")
    for scheme in schemes:
        weights = scheme.get("weights") or {}
        bits = weights.get("num_bits", 8)
        if bits not in (4, 8) or (weights.get("type") == "float" and bits != 8):
            raise refuse(f"compressed-tensors with {bits}-bit {weights.get('type', 'int')} weights")
    return Format(
        name="compressed-tensors",
        keys=(_SCALE,),
        parts=(_PACKED, _ZERO, ".weight", ".weight_shape", ".weight_g_idx", ".input_scale", ".input_zero_point"),
        shape=_shape,
        dense=_dense,
        layout=_layout,
        groups=_groups,
        is_fp8=_is_fp8,
        fp8=_fp8,
        activations=next(filter(None, map(_activations, schemes)), ""),
    )


def _activations(scheme: dict[str, Any]) -> str:
    """Return how a scheme quantizes activations, such as "8-bit int"; empty: not at all."""
    inputs = scheme.get("input_activations")
    return f"{inputs.get('num_bits', 8)}-bit {inputs.get('type', 'int')}" if inputs else ""


def _shape(parts: Parts) -> torch.Size:
    if _PACKED not in parts:
        return parts.shape(".weight")
    return torch.Size(parts[".weight_shape"].tolist())


def _layout(parts: Parts) -> Layout | None:
    """Return the sizes of a matrix of integers; None for float weights, and for scales of blocks of outputs."""
    outputs, inputs = _shape(parts)
    scale = parts.shape(_SCALE)
    packed = _PACKED in parts
    if not packed and parts.kind(".weight") != "I8":
        return None
    if scale.numel() > 1 and scale[0] != outputs:
        return None
    groups = scale[1] if len(scale) > 1 else 1
    group = inputs if groups == 1 else -(-inputs // groups)
    # A word of 32 bits holds four integers of 8 bits; eight of 4 bits need fewer words.
    bits = 8 if not packed or parts.shape(_PACKED)[1] > -(-inputs // 8) else 4
    return Layout(outputs=outputs, inputs=inputs, bits=bits, group=group, index=_index(parts, group))


def _index(parts: Parts, group: int) -> torch.Tensor | None:
    """Return the group of each input, or None if groups have consecutive inputs."""
    index = parts.find(".weight_g_idx")
    if index is None or bool((index < 0).any()) or torch.equal(index.long(), torch.arange(len(index)) // group):
        return None
    return index.long()


def _groups(parts: Parts) -> Groups:
    layout = _layout(parts)
    assert layout is not None
    scale = parts[_SCALE]
    zero = parts.find(_ZERO)
    rows = (layout.outputs, scale.shape[-1] if scale.dim() > 1 else 1)
    if _PACKED in parts:
        words = parts[_PACKED]
    else:
        words = shifted(parts[".weight"])
    if zero is not None and zero.dtype == torch.int32:  # packed over the outputs
        zero = unpack(zero.T, layout.bits).T[: layout.outputs].to(torch.int16)
    elif zero is not None:
        zero = (zero.to(torch.int16) + layout.middle).expand(rows)
    return Groups(layout=layout, words=words, scale=scale.view(-1, rows[1]).expand(rows), zero=zero)


def _dense(parts: Parts) -> torch.Tensor:
    if _layout(parts) is not None:
        return _groups(parts).dequantize()
    weight = parts[".weight"].float()
    scale, block = _blocks(parts)
    if (zero := parts.find(_ZERO)) is not None:
        weight -= by_block(zero.view(scale.shape), weight.shape, block)
    return weight * by_block(scale, weight.shape, block)


def _is_fp8(parts: Parts) -> bool:
    return _PACKED not in parts and parts.kind(".weight") == "F8_E4M3" and _ZERO not in parts


def _fp8(parts: Parts) -> Fp8:
    scale, block = _blocks(parts)
    return Fp8(values=parts[".weight"], scale=scale, block=block)


def _blocks(parts: Parts) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the scales of float weights, and the rows and columns of a block."""
    outputs, inputs = parts.shape(".weight")
    scale = parts[_SCALE]
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    scale = scale.view(len(scale), -1)
    return scale, (-(-outputs // scale.shape[0]), -(-inputs // scale.shape[1]))
