"""Choose the backend of a checkpoint: the native kernels, torch with attention, or torch with a recurrent state."""

from __future__ import annotations

import logging

import torch

from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.attention_target import AttentionTarget
from outrider.models.base import Target
from outrider.models.checkpoint import Checkpoint
from outrider.models.cuda_graphs import CudaRecorder
from outrider.models.quantize import quantize_model
from outrider.models.recurrent_target import RecurrentTarget
from outrider.native.target import NativeTarget

KERNELS = ("auto", "native", "torch")
_log = logging.getLogger("outrider")


def make_target(
    checkpoint: Checkpoint,
    *,
    slots: int,
    context: int,
    kernels: str = "auto",
    bits: int = 16,
) -> Target:
    """The target that fits the checkpoint's kind of memory and the machine.

    Args:
        checkpoint: what runs.
        slots: rows at once.
        context: tokens of a row.
        kernels: native, torch, or auto: native on a CPU and CUDA graphs on a GPU, where type and model allow it.
        bits: of the linear layers' weights: 16 as they are; 8 or 4 quantised, and then that is the checkpoint's model.

    Raises:
        UnsupportedModel: what was asked for by name cannot be had.
    """
    if kernels not in KERNELS:
        raise OutriderError(f"kernels {kernels!r} is unknown; use {', '.join(KERNELS)}")
    fits = checkpoint.device.type == "cpu" and checkpoint.dtype in (torch.bfloat16, torch.float32)
    if bits < 16 and not (fits and checkpoint.dtype == torch.bfloat16):
        raise OutriderError("quantize needs a CPU and bfloat16; use device cpu and dtype auto, or leave quantize out")
    fits &= not checkpoint.recurrent
    if kernels == "native" and not fits:
        raise OutriderError("the native kernels need a CPU, and bfloat16 or float32; use kernels auto, or dtype auto")
    if fits and kernels != "torch":
        try:
            return NativeTarget(checkpoint, slots=slots, context=context, bits=bits)
        except UnsupportedModel as reason:
            if kernels == "native":
                raise
            _log.info("running on torch: %s", reason)
    if bits < 16:
        quantize_model(checkpoint.model, bits)
    if checkpoint.recurrent:
        target: Target = RecurrentTarget(checkpoint, slots=slots, context=context)
    else:
        record = CudaRecorder(checkpoint.device) if checkpoint.device.type == "cuda" and kernels == "auto" else None
        target = AttentionTarget(checkpoint, slots=slots, context=context, record=record)
    target.kernels += "" if bits == 16 else f" int{bits}"
    return target
