"""Which runner a trained draft takes."""

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

_log = logging.getLogger("outrider")


def make_head_target(module: HeadModule, tables: SharedWeights, *, slots: int, context: int) -> HeadTarget:
    """What runs a draft beside a target with these tables."""
    if isinstance(module, BlockHead):
        return BlockTarget(module, tables, slots=slots, context=context)
    if isinstance(module, ParallelHead):
        return ParallelTarget(module, tables, slots=slots, context=context)
    if isinstance(module, KVSharingHead):
        return KVSharingTarget(module, tables, slots=slots, context=context)
    if module.description.modules > 1:
        return MultiModuleTarget(module, tables, slots=slots, context=context)
    masked = module.description.masks is not None
    if tables.packed is not None:
        native = NativeMaskedTarget if masked else NativeAutoregressiveTarget
        try:
            return native(module, tables, slots=slots, context=context)
        except UnsupportedModel as reason:
            _log.warning("the draft runs on torch's kernels: %s", reason)
    return (MaskedTarget if masked else AutoregressiveTarget)(module, tables, slots=slots, context=context)
