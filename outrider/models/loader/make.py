"""Choose the backend of a checkpoint: the native kernels, or torch with the layers of the model."""

import logging
from functools import cache

import torch

from outrider.core.params import AUTO
from outrider.core.target import Target
from outrider.errors import MissingKernels, OutriderError, UnsupportedModel, either
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.group_weight import GROUP_KINDS

KERNELS = ("auto", "native", "triton", "graphs", "torch")
_log = logging.getLogger("outrider")


def make_target(
    checkpoint: Checkpoint, *, slots: int, context: int, kernels: str = "auto", bits: int = 16, kv_dtype: str = AUTO
) -> Target:
    """Make the target for a checkpoint.

    Args:
        checkpoint: the loaded model.
        slots: maximum number of running sequences.
        context: tokens of a sequence.
        kernels: native, triton, graphs (torch with CUDA graphs), torch or auto. auto chooses the native kernels on a
            CPU and the Triton kernels on a GPU, if they support the dtype and the model; else graphs.
        bits: bits per weight of linear layers. 16 leaves them unchanged. 8 and 4 quantize them, in
            `checkpoint.model` as well.
        kv_dtype: auto or int8, as in `EngineConfig`. int8 needs the native kernels.

    Raises:
        OutriderError: `kernels`, `bits` or `kv_dtype` do not fit the device or the dtype.
        UnsupportedModel: the native or Triton kernels were requested but do not support the model,
            or it cannot be quantized.
    """
    types = checkpoint.block_types
    _check_settings(checkpoint, kernels, bits, types)
    on_torch = checkpoint.recurrent or checkpoint.source is not None or checkpoint.ranks > 1
    has_native_dtype = checkpoint.dtype in (torch.bfloat16, torch.float32)
    native = checkpoint.device.type == "cpu" and has_native_dtype and not on_torch
    _check_kernels(kernels, kv_dtype, native=native, on_torch=on_torch)
    sizes = {"slots": slots, "context": context, "bits": bits}
    in_blocks = types and not GROUP_KINDS.issuperset(types)  # integers of groups are dequantized for torch
    float32_only = ", ".join(types) if in_blocks and checkpoint.dtype != torch.float32 else ""
    target: Target | None = None
    if kernels == "triton" or (kernels == "auto" and checkpoint.device.type == "cuda" and not on_torch):
        target = _try_triton(checkpoint, required=kernels == "triton", float32_only=float32_only, **sizes)
    elif native and kernels != "torch":
        kv_int8 = kv_dtype != AUTO
        required = kernels == "native"
        target = _try_native(checkpoint, kv_int8=kv_int8, required=required, float32_only=float32_only, **sizes)
    if target is not None:
        return target
    if float32_only:
        raise UnsupportedModel(
            f"the {float32_only} weights of this model run on torch in float32 only; use dtype float32"
        )
    if in_blocks and kernels == "auto":
        _log.warning("torch dequantizes the %s weights of this model in each pass, which is slow", ", ".join(types))
    from outrider.models.loader.make_torch import make_torch_target

    return make_torch_target(checkpoint, record=kernels in ("auto", "graphs"), **sizes)


def _check_kernels(kernels: str, kv_dtype: str, *, native: bool, on_torch: bool) -> None:
    """Check the kernels against what the model needs.

    Args:
        native: whether device, dtype and kind of model are those of the native kernels.
        on_torch: whether the model runs on torch only.
    """
    if kernels == "native" and not native:
        raise OutriderError("the native kernels need a CPU, and bfloat16 or float32; use kernels auto, or dtype auto")
    if kv_dtype != AUTO and not (native and kernels in ("auto", "native")):
        raise OutriderError(
            f"kv_dtype {kv_dtype} needs the native kernels, which run decoder-only attention models on a CPU in one"
            " process; use device cpu, and kernels and dtype auto, or leave kv_dtype out"
        )
    if kernels == "triton" and on_torch:
        raise UnsupportedModel("the Triton kernels run decoder-only attention models on one GPU; use kernels auto")


def _try_triton(checkpoint: Checkpoint, *, required: bool, float32_only: str, bits: int, **sizes: int) -> Target | None:
    """Make a target on the Triton kernels; None: torch runs it instead. The arguments are those of `_try_native`."""
    try:
        return _make_triton_target(checkpoint, bits=bits, **sizes)
    except UnsupportedModel as reason:
        if required or bits < 16:
            way = "use kernels auto" if bits == 16 else "leave quantize out"
            raise UnsupportedModel(f"{reason}; {way}") from reason
        _check_torch(reason, float32_only)
        _log.info("running on torch: %s", reason)
        return None


def _try_native(
    checkpoint: Checkpoint, *, kv_int8: bool, required: bool, float32_only: str, **sizes: int
) -> Target | None:
    """Make a target on the native kernels; None: torch runs it instead.

    Args:
        checkpoint: the loaded model.
        kv_int8: whether keys and values have 8 bits.
        required: whether torch may not run it.
        float32_only: the types of its weights if torch cannot run them in the dtype of the checkpoint, else empty.
        sizes: further arguments of `NativeTarget`.

    Raises:
        UnsupportedModel: the kernels do not run it, and torch may not or cannot.
    """
    from outrider.models.native.target import NativeTarget

    try:
        return NativeTarget(checkpoint, kv_dtype=torch.int8 if kv_int8 else None, **sizes)
    except UnsupportedModel as reason:
        if kv_int8:
            raise UnsupportedModel(f"{reason}; leave kv_dtype out") from reason
        if required:
            raise UnsupportedModel(f"{reason}; use kernels auto") from reason
        _check_torch(reason, float32_only)
        _report_fallback(reason)
        return None


def _check_torch(reason: UnsupportedModel, float32_only: str) -> None:
    """Raise if torch cannot run a model which other kernels do not run for this reason."""
    if float32_only:
        raise UnsupportedModel(
            f"{reason}; else use dtype float32: torch then dequantizes the {float32_only} weights of this model in each"
            " pass, which is slow"
        ) from reason


def _make_triton_target(checkpoint: Checkpoint, *, slots: int, context: int, bits: int) -> Target:
    """Make a target on the Triton kernels.

    Raises:
        UnsupportedModel: they do not run here, or do not support the model.
    """
    from outrider.models.triton.support import check_device

    check_device(checkpoint.device)
    from outrider.models.torch.cuda_recorder import CudaRecorder
    from outrider.models.triton.target import TritonTarget

    record = CudaRecorder(checkpoint.device) if checkpoint.device.type == "cuda" else None
    return TritonTarget(checkpoint, slots=slots, context=context, bits=bits, record=record)


def _report_fallback(reason: UnsupportedModel) -> None:
    """Log why a model runs on torch. If it could run on the native kernels, it is a warning."""
    if isinstance(reason, MissingKernels):
        _warn_of_missing_kernels(str(reason))
    else:
        _log.info("running on torch: %s", reason)


@cache  # once per process: a draft model would repeat it
def _warn_of_missing_kernels(reason: str) -> None:
    _log.warning("running on torch, which is many times slower than the native CPU kernels: %s", reason)


def _check_settings(checkpoint: Checkpoint, kernels: str, bits: int, types: tuple[str, ...]) -> None:
    """Check the kernels and the bits against a checkpoint, whose weights are in blocks of the GGUF `types`."""
    if kernels not in KERNELS:
        raise OutriderError(f"kernels {kernels!r} is unknown; use {either(KERNELS)}")
    if kernels == "graphs" and checkpoint.device.type != "cuda":
        raise OutriderError("kernels graphs needs an NVIDIA GPU; use kernels auto or torch")
    on_cpu = checkpoint.device.type == "cpu" and checkpoint.dtype == torch.bfloat16
    on_gpu = kernels == "triton" or (kernels == "auto" and checkpoint.device.type == "cuda")
    if bits < 16 and checkpoint.recurrent and checkpoint.device.type == "cuda":
        raise UnsupportedModel("quantize on a GPU does not support models with recurrent layers; leave it out")
    if bits < 16 and not on_cpu and not on_gpu:
        raise OutriderError(
            "quantize needs a CPU and bfloat16, or a GPU with kernels auto or triton; use dtype and kernels auto, or"
            " leave quantize out"
        )
    if bits < 16 and types:
        raise OutriderError(f"the target is quantized already ({', '.join(types)}); leave quantize out")
    if checkpoint.source is not None and (bits < 16 or kernels == "native"):
        setting = "quantize" if bits < 16 else "kernels native"
        raise OutriderError(f"{setting} does not support encoder-decoder models; leave it out")
