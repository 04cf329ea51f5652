"""FP8 weights with a scale for each block (`weight_scale_inv`, as DeepSeek and Qwen write it) or for each matrix."""

from __future__ import annotations

import torch

from outrider.models.loader.quantized.format import Format, Parts, Settings, by_block, refuse

_SCALES = (".weight_scale_inv", ".weight_scale")


def fp8(settings: Settings) -> Format:
    """Return the format of FP8 checkpoints.

    Raises:
        UnsupportedModel: the experts are stored in another type.
    """
    if (experts := settings.get("expert_dtype", "fp8")) != "fp8":
        raise refuse(f"FP8 with experts in {experts}")
    rows, columns = settings.get("weight_block_size") or (0, 0)

    def dense(parts: Parts) -> torch.Tensor:
        weight = parts[".weight"].float()
        scale = next(parts[end] for end in _SCALES if end in parts)
        if scale.dtype == torch.uint8:  # exponents
            scale = (scale.float() - 127).exp2()
        if not rows:
            return weight * scale.float()
        return weight * by_block(scale, weight.shape, (rows, columns))

    return Format(
        name="FP8",
        keys=_SCALES,
        parts=(".weight", ".input_scale", ".activation_scale"),
        shape=lambda parts: parts.shape(".weight"),
        dense=dense,
        activations=f"FP8 ({settings.get('activation_scheme', 'dynamic')})",
    )
