"""Choose the target that runs a draft head."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from outrider.core.config import FULL_BITS
from outrider.core.types import SharedWeights
from outrider.errors import UnsupportedModel
from outrider.models.heads.modules.block import BlockHead
from outrider.models.heads.modules.kv_sharing import KVSharingHead
from outrider.models.heads.modules.parallel import ParallelHead
from outrider.models.heads.store import HeadModule
from outrider.models.native.pack import FLOAT_DTYPES

if TYPE_CHECKING:
    from outrider.models.heads.targets.base import HeadTarget

_TARGETS = "outrider.models.heads.targets"  # few heads need all modules of it

_log = logging.getLogger("outrider")


def is_autoregressive(module: HeadModule) -> bool:
    """Return whether a draft head is an autoregressive head of one module, possibly with mask tokens.

    Only such heads support a draft window and the native kernels.
    """
    other_kinds = isinstance(module, BlockHead | ParallelHead | KVSharingHead)
    return not other_kinds and module.description.modules == 1


def make_head_target(
    module: HeadModule,
    tables: SharedWeights,
    *,
    slots: int,
    context: int,
    window: int | None = None,
    kernels: str = "torch",
    bits: int = FULL_BITS,
) -> HeadTarget:
    """Return a target that runs a draft head, on the kernels of the target if they can.

    Args:
        module: the draft head.
        tables: the weights that it shares with its target.
        slots: the most sequences.
        context: the most tokens of a sequence.
        window: the latest tokens that each token attends to, for heads that support it; None: all tokens.
        kernels: those that the target was asked to use. auto chooses the Triton kernels on a GPU. With
            torch, the head runs on the native kernels only if the target does.
        bits: bits per weight of linear layers and LM head, on the native kernels. 16: those of the target's dtype.

    Raises:
        UnsupportedModel: `bits` is below 16, and the head cannot run on the native kernels.
    """
    quantized = bits < FULL_BITS
    if quantized and not is_autoregressive(module):
        raise UnsupportedModel("the native kernels run only autoregressive heads of one module")
    if quantized and not _fits_kernels(tables):
        raise UnsupportedModel("the native kernels need a CPU, and a target in bfloat16 or float32")
    options: dict[str, Any] = {"slots": slots, "context": context}
    if is_autoregressive(module):
        options["window"] = window
    on_gpu = tables.embedding.device.type == "cuda"
    if not quantized and (kernels == "triton" or (kernels == "auto" and on_gpu)):
        try:
            return _recorded(module, tables, **options)
        except UnsupportedModel as reason:
            _log.log(
                logging.WARNING if kernels == "triton" else logging.INFO, "the draft head runs on torch: %s", reason
            )
    if not is_autoregressive(module):
        other_class: Callable[..., HeadTarget] = resolve_name(f"{_TARGETS}.{_other_kind(module)}")
        return other_class(module, tables, **options)
    file, name = "autoregressive", "AutoregressiveTarget"
    if module.description.masks is not None:
        file, name = "masked", "MaskedTarget"
    on_native = tables.packed is not None
    if on_native or (kernels != "torch" and _fits_kernels(tables)):
        native_class: Callable[..., HeadTarget] = resolve_name(f"{_TARGETS}.{file}:Native{name}")
        try:
            return native_class(module, tables, **options, bits=bits)
        except UnsupportedModel as reason:
            if quantized:
                raise
            _log.log(logging.WARNING if on_native else logging.INFO, "the draft head runs on torch: %s", reason)
    torch_class: Callable[..., HeadTarget] = resolve_name(f"{_TARGETS}.{file}:{name}")
    return torch_class(module, tables, **options)


def _recorded(module: HeadModule, tables: SharedWeights, **options: Any) -> HeadTarget:
    """Return a target on the Triton kernels."""
    from outrider.models.torch.cuda_recorder import CudaRecorder
    from outrider.models.triton.support import check_device

    if isinstance(module, KVSharingHead):
        raise UnsupportedModel("it reads the keys and values of its target")
    device = tables.embedding.device
    check_device(device)
    record = CudaRecorder(device) if device.type == "cuda" else None
    recorded_class: Callable[..., HeadTarget] = resolve_name(f"{_TARGETS}.{recorded_kind(module)}")
    return recorded_class(module, tables, record=record, **options)


def recorded_kind(module: HeadModule) -> str:
    """Return the module and the class of the target of a head on the Triton kernels."""
    if isinstance(module, BlockHead):
        if module.block.recurrence:
            return "recorded_blocks:RecordedRecurrentBlocks"
        return "recorded_blocks:RecordedRefinedBlocks" if module.block.refiner else "recorded_blocks:RecordedBlocks"
    if isinstance(module, ParallelHead):
        return "recorded_parallel:RecordedParallel"
    if module.description.masks is not None:
        return "recorded_autoregressive:RecordedMasked"
    several = module.description.modules > 1
    return "recorded_autoregressive:" + ("RecordedModules" if several else "RecordedHead")


def _other_kind(module: HeadModule) -> str:
    """Return the module and the class of the target of a head that is not autoregressive."""
    if isinstance(module, BlockHead):
        if module.block.recurrence:
            return "recurrent_block:RecurrentBlockTarget"
        return "refined_block:RefinedBlockTarget" if module.block.refiner else "block:BlockTarget"
    if isinstance(module, ParallelHead):
        return "parallel:ParallelTarget"
    if isinstance(module, KVSharingHead):
        return "kv_sharing:KVSharingTarget"
    return "multi_module:MultiModuleTarget"


def _fits_kernels(tables: SharedWeights) -> bool:
    """Return whether the device and the dtype of the target are those of the native kernels."""
    return tables.embedding.device.type == "cpu" and tables.embedding.dtype in FLOAT_DTYPES.values()
