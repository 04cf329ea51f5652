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

_HOMES = {
    "AudioModels": "models.store",
    "BlockGenerator": "contract",
    "BlockResult": "results",
    "Calibration": "calibration.document",
    "Choice": "contract",
    "DrafterOnly": "routers",
    "DriftWatch": "calibration.drift",
    "FixedBlocks": "routers",
    "ImageRewardScorer": "scorers",
    "Judgment": "contract",
    "Maker": "results",
    "MediaEngine": "engine",
    "MediaResult": "results",
    "MediaRun": "engine",
    "Position": "contract",
    "QualityGate": "routers",
    "RandomGate": "routers",
    "Router": "contract",
    "Scorer": "contract",
    "Seconds": "results",
    "StreamDecoder": "contract",
    "Stride": "routers",
    "TargetOnly": "routers",
    "VideoModels": "models.store",
    "load_models": "models.store",
    "tune": "calibration.tune",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider.media' has no attribute {name!r}")
    return getattr(import_module(f"outrider.media.{_HOMES[name]}"), name)
