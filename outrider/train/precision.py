"""Chooses the dtype of matrix products in training."""

import torch


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the hardware has instructions for it, else float32.

    oneDNN accepts bfloat16 on every CPU with AVX-512. Without bfloat16 instructions it runs at a
    third of the speed of float32.
    """
    if device.type != "cpu":
        return torch.bfloat16
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        supported = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if supported else torch.float32
