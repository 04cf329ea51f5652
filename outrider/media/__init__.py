"""Speculation over blocks of video and audio: a drafter proposes, a scorer judges, the target makes the rest.

The outputs are not exact. Each result says so, with its threshold and the share of accepted drafts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.media.calibration.document import Calibration
    from outrider.media.calibration.drift import DriftWatch
    from outrider.media.calibration.tune import tune
    from outrider.media.contract import BlockGenerator, Choice, Judgment, Position, Router, Scorer, StreamDecoder
    from outrider.media.engine import MediaEngine, MediaRun
    from outrider.media.models.store import AudioModels, VideoModels, load_models
    from outrider.media.results import BlockResult, Maker, MediaResult, Seconds
    from outrider.media.routers import DrafterOnly, FixedBlocks, QualityGate, RandomGate, Stride, TargetOnly
    from outrider.media.scorers import ImageRewardScorer

_NAMES = {  # of each module
    "calibration.document": ("Calibration",),
    "calibration.drift": ("DriftWatch",),
    "calibration.tune": ("tune",),
    "contract": ("BlockGenerator", "Choice", "Judgment", "Position", "Router", "Scorer", "StreamDecoder"),
    "engine": ("MediaEngine", "MediaRun"),
    "models.store": ("AudioModels", "VideoModels", "load_models"),
    "results": ("BlockResult", "Maker", "MediaResult", "Seconds"),
    "routers": ("DrafterOnly", "FixedBlocks", "QualityGate", "RandomGate", "Stride", "TargetOnly"),
    "scorers": ("ImageRewardScorer",),
}

__all__ = [
    "AudioModels",
    "BlockGenerator",
    "BlockResult",
    "Calibration",
    "Choice",
    "DrafterOnly",
    "DriftWatch",
    "FixedBlocks",
    "ImageRewardScorer",
    "Judgment",
    "Maker",
    "MediaEngine",
    "MediaResult",
    "MediaRun",
    "Position",
    "QualityGate",
    "RandomGate",
    "Router",
    "Scorer",
    "Seconds",
    "StreamDecoder",
    "Stride",
    "TargetOnly",
    "VideoModels",
    "load_models",
    "tune",
]


def __getattr__(name: str) -> Any:
    # `outrider --help` reads the settings of the commands, and should not import torch.
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"outrider.media.{module}"), name)
    raise AttributeError(f"module 'outrider.media' has no attribute {name!r}")
