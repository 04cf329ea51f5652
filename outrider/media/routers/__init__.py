"""Who makes each block: a quality gate, and routers that need no score."""

from outrider.media.routers.gate import QualityGate
from outrider.media.routers.placement import DrafterOnly, FixedBlocks, RandomGate, Stride, TargetOnly

__all__ = ["DrafterOnly", "FixedBlocks", "QualityGate", "RandomGate", "Stride", "TargetOnly"]
