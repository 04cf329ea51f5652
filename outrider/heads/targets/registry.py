"""Choose the target that runs a draft head."""

from __future__ import annotations

import logging

from outrider.core.types import SharedWeights
from outrider.errors import UnsupportedModel
from outrider.heads.modules.block import BlockHead
from outrider.heads.modules.kv_sharing import KVSharingHead
from outrider.heads.modules.parallel import ParallelHead
from outrider.heads.store import HeadModule
from outrider.heads.targets.autoregressive import AutoregressiveTarget, NativeAutoregressiveTarget
from outrider.heads.targets.base import HeadTarget
from outrider.heads.targets.block import BlockTarget
from outrider.heads.targets.kv_sharing import KVSharingTarget
from outrider.heads.targets.masked import MaskedTarget, NativeMaskedTarget
from outrider.heads.targets.multi_module import MultiModuleTarget
from outrider.heads.targets.parallel import ParallelTarget
from outrider.heads.targets.refined_block import RefinedBlockTarget

_log = logging.getLogger("outrider")


def supports_window(module: HeadModule) -> bool:
    """Return whether a draft head can attend to the latest tokens only: an autoregressive head of one module."""
    other_kinds = isinstance(module, BlockHead | ParallelHead | KVSharingHead)
    return not other_kinds and module.description.modules == 1


def make_head_target(
    module: HeadModule, tables: SharedWeights, *, slots: int, context: int, window: int | None = None
) -> HeadTarget:
    """Return a target that runs a draft head, natively if the kernels can.

    Args:
        module: the draft head.
        tables: the weights that it shares with its target.
        slots: the most sequences.
        context: the most tokens of a sequence.
        window: the latest tokens that each token attends to, for heads that support it; None: all tokens.
    """
    if isinstance(module, BlockHead):
        block_class = RefinedBlockTarget if module.block.refiner else BlockTarget
        return block_class(module, tables, slots=slots, context=context)
    if isinstance(module, ParallelHead):
        return ParallelTarget(module, tables, slots=slots, context=context)
    if isinstance(module, KVSharingHead):
        return KVSharingTarget(module, tables, slots=slots, context=context)
    if module.description.modules > 1:
        return MultiModuleTarget(module, tables, slots=slots, context=context)
    masked = module.description.masks is not None
    if tables.packed is not None:
        native_class = NativeMaskedTarget if masked else NativeAutoregressiveTarget
        try:
            return native_class(module, tables, slots=slots, context=context, window=window)
        except UnsupportedModel as reason:
            _log.warning("the draft head runs on torch: %s", reason)
    torch_class = MaskedTarget if masked else AutoregressiveTarget
    return torch_class(module, tables, slots=slots, context=context, window=window)
