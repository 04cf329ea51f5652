"""FP8 weights with a scale for each block (`weight_scale_inv`, as DeepSeek and Qwen write it) or for each matrix."""

import torch

from outrider.models.loader.quantized.format import Format, Parts, Settings, refuse
from outrider.models.torch.fp8_weight import Fp8

_SCALES = (".weight_scale_inv", ".weight_scale")


def fp8(settings: Settings) -> Format:
    """Return the format of FP8 checkpoints. Raises UnsupportedModel if the experts are stored in another type."""
    if (experts := settings.get("expert_dtype", "fp8")) != "fp8":
        raise refuse(f"FP8 with experts in {experts}")
    rows, columns = settings.get("weight_block_size") or (0, 0)

    def read(parts: Parts) -> Fp8:
        values = parts[".weight"]
        scale = next(parts[end] for end in _SCALES if end in parts)
        if scale.dtype == torch.uint8:  # exponents
            scale = (scale.float() - 127).exp2()
        block = (rows or values.shape[0], columns or values.shape[1])
        return Fp8(values=values, scale=scale if rows else scale.reshape(1, 1), block=block)

    return Format(
        name="FP8",
        keys=_SCALES,
        parts=(".weight", ".input_scale", ".activation_scale"),
        shape=lambda parts: parts.shape(".weight"),
        dense=lambda parts: read(parts).dequantize(),
        is_fp8=lambda parts: parts.kind(".weight") == "F8_E4M3" and len(parts.shape(".weight")) == 2,
        fp8=read,
        activations=f"FP8 ({settings.get('activation_scheme', 'dynamic')})",
    )
