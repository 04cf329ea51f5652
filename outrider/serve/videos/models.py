"""The video models of a server, and what clients may ask of them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.media.calibration.document import Calibration
from outrider.media.models.store import VideoModels, load_models
from outrider.models.loader.embedded import model_folder

FPS = 12.0
FORMATS = ("mp4", "gif")
_SIDE = 256  # pixels: the default is the largest enlargement up to this
_MAX_SIDE = 512  # pixels; a larger frame is not enlarged


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """A set of video models with its name in the API."""

    name: str
    models: VideoModels
    calibration: Calibration | None  # of the folder; it gives the default threshold

    @property
    def max_blocks(self) -> int:
        """The most blocks of a video."""
        return self.models.engine.max_blocks

    @property
    def frame_size(self) -> int:
        """Rows and columns of a frame, before it is enlarged."""
        return self.models.video.frame_size

    @property
    def default_scale(self) -> int:
        """How often a pixel of a frame is repeated if the request has no size."""
        return max(1, _SIDE // self.frame_size)

    @property
    def max_scale(self) -> int:
        """How often a pixel of a frame may be repeated."""
        return max(1, _MAX_SIDE // self.frame_size)

    def seconds(self, blocks: int) -> float:
        """Return the duration of so many blocks."""
        return blocks * self.models.video.frames / FPS

    def blocks(self, seconds: float) -> int:
        """Return the fewest blocks that last so many seconds."""
        # A duration that was rounded for the API is still the same number of blocks.
        return math.ceil(round(seconds * FPS / self.models.video.frames, 2))

    def to_json(self) -> dict[str, Any]:
        """Return the model object of `/v1/models`."""
        limits = self.models.engine.scorer.score_range
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "outrider",
            "video": {
                "exact": False,
                "max_blocks": self.max_blocks,
                "max_seconds": format_seconds(self.seconds(self.max_blocks)),
                "size": format_size(self.frame_size * self.default_scale),
                "formats": list(FORMATS),
                "score_range": None if limits is None else list(limits),
                "threshold": None if self.calibration is None else self.calibration.threshold,
            },
        }


def load_served_models(option: str) -> ServedModels:
    """Return the models of `--media`.

    Args:
        option: a folder that `recipes.video` wrote, or `@media` for the embedded models.

    Raises:
        OutriderError: the folder holds no video models, or its calibration cannot be read or used.
    """
    folder = model_folder(option)
    models = load_models(folder)
    if not isinstance(models, VideoModels):
        raise OutriderError(f"{folder} holds audio models; --media serves video models")
    calibration = _calibration(folder)
    if calibration is not None:
        models.engine.check(calibration.router())
    return ServedModels(name=folder.resolve().name, models=models, calibration=calibration)


def check_video_packages() -> None:
    """Check that the packages that write videos are installed. Raises OutriderError if pillow is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise OutriderError('--media needs pillow; run pip install "outrider[media,serve]"') from None


def format_seconds(seconds: float) -> str:
    """Return a duration as OpenAI's API writes it."""
    return f"{seconds:.4g}"


def format_size(side: int) -> str:
    """Return the size of a square frame as OpenAI's API writes it."""
    return f"{side}x{side}"


def _calibration(folder: Path) -> Calibration | None:
    file = folder / "calibration.json"
    return Calibration.load(file) if file.exists() else None
