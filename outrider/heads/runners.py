"""Which runner a trained draft takes."""

from __future__ import annotations

import logging

from outrider.errors import UnsupportedModel
from outrider.heads.block import BlockDraft
from outrider.heads.block_target import BlockTarget
from outrider.heads.follow_target import FollowTarget, NativeFollowTarget
from outrider.heads.independent import Independent
from outrider.heads.independent_target import IndependentTarget
from outrider.heads.mask_target import MaskTarget, NativeMaskTarget
from outrider.heads.modules_target import ModulesTarget
from outrider.heads.onlook_target import OnlookTarget
from outrider.heads.onlooker import Onlooker
from outrider.heads.store import HeadModule
from outrider.heads.target import HeadTarget
from outrider.types import Tables

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
