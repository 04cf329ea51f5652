"""Which runner a trained draft takes."""

from __future__ import annotations

import logging

from outrider.core.types import Tables
from outrider.errors import UnsupportedModel
from outrider.heads.modules.block import BlockDraft
from outrider.heads.modules.kv_sharing import Onlooker
from outrider.heads.modules.parallel import Independent
from outrider.heads.store import HeadModule
from outrider.heads.targets.autoregressive import FollowTarget, NativeFollowTarget
from outrider.heads.targets.base import HeadTarget
from outrider.heads.targets.block import BlockTarget
from outrider.heads.targets.kv_sharing import OnlookTarget
from outrider.heads.targets.masked import MaskTarget, NativeMaskTarget
from outrider.heads.targets.multi_module import ModulesTarget
from outrider.heads.targets.parallel import IndependentTarget

_log = logging.getLogger("outrider")


def make_head_target(module: HeadModule, tables: Tables, *, slots: int, context: int) -> HeadTarget:
    """What runs a draft beside a target with these tables."""
    if isinstance(module, BlockDraft):
        return BlockTarget(module, tables, slots=slots, context=context)
    if isinstance(module, Independent):
        return IndependentTarget(module, tables, slots=slots, context=context)
    if isinstance(module, Onlooker):
        return OnlookTarget(module, tables, slots=slots, context=context)
    if module.description.modules > 1:
        return ModulesTarget(module, tables, slots=slots, context=context)
    masked = module.description.masks is not None
    if tables.packed is not None:
        native = NativeMaskTarget if masked else NativeFollowTarget
        try:
            return native(module, tables, slots=slots, context=context)
        except UnsupportedModel as reason:
            _log.warning("the draft runs on torch's kernels: %s", reason)
    return (MaskTarget if masked else FollowTarget)(module, tables, slots=slots, context=context)
