"""In which type matrices are multiplied while a draft learns."""

from __future__ import annotations

import torch


def products(device: torch.device) -> torch.dtype:
    """bfloat16 where the machine has instructions for it, else float32.

    oneDNN takes bfloat16 on every CPU with AVX-512; without such instructions that is a third as fast as float32.
    """
    if device.type != "cpu":
        return torch.bfloat16
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        able = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        able = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if able else torch.float32
