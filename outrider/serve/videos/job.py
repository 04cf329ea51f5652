"""One video of the server: what was asked for, how far it is, and its file."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from uuid import uuid4

from outrider.media.results import BlockResult, Maker, Seconds
from outrider.serve.videos.models import ServedModels, format_seconds, format_size
from outrider.serve.videos.schema import VideoTask

Status = Literal["queued", "in_progress", "completed", "failed"]
_ALMOST_DONE = 99  # percent, until the file is written


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFile:
    """An encoded video."""

    data: bytes
    format: str  # mp4 or gif
    note: str | None  # why it is another format than the one asked for

    @property
    def media_type(self) -> str:
        """The value of Content-Type."""
        return "image/gif" if self.format == "gif" else "video/mp4"


@dataclass(slots=True, kw_only=True, eq=False)
class VideoJob:
    """A video that waits, is made, or has ended. Only the worker changes it once it runs."""

    task: VideoTask
    id: str = field(default_factory=lambda: f"video_{uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    completed_at: int | None = None
    status: Status = "queued"
    error: str | None = None
    deleted: bool = False  # the worker stops after the current block
    blocks: list[dict[str, Any]] = field(default_factory=list)  # the finished ones, as JSON
    seconds: Seconds = field(default_factory=Seconds)  # of the finished blocks
    file: VideoFile | None = None

    @property
    def ended(self) -> bool:
        """Whether the worker is done with it."""
        return self.status in ("completed", "failed")

    def add(self, block: BlockResult) -> None:
        """Record a finished block, without its content."""
        self.blocks.append(block.to_json())
        self.seconds += block.seconds

    def complete(self, file: VideoFile) -> None:
        self.file = file
        self.completed_at = int(time.time())
        self.status = "completed"

    def fail(self, message: str) -> None:
        """Record why there is no video."""
        self.error = message
        self.completed_at = int(time.time())
        self.status = "failed"

    def to_json(self, served: ServedModels) -> dict[str, Any]:
        """Return the video object of OpenAI's API, with Outrider's extensions."""
        return {
            "id": self.id,
            "object": "video",
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "expires_at": None,
            "status": self.status,
            "progress": self._progress(),
            "error": None if self.error is None else {"code": "server_error", "message": self.error},
            "model": served.name,
            "prompt": self.task.prompt,
            "remixed_from_video_id": None,
            "seconds": format_seconds(served.seconds(self.task.blocks)),
            "size": format_size(self.task.scale * served.frame_size),
            "seed": self.task.seed,
            "output_format": self.task.output_format if self.file is None else self.file.format,
            "note": None if self.file is None else self.file.note,
            "speculation": self._speculation(),
        }

    def _progress(self) -> int:
        if self.status == "completed":
            return 100
        return min(_ALMOST_DONE, 100 * len(self.blocks) // self.task.blocks)

    def _speculation(self) -> dict[str, Any]:
        blocks = list(self.blocks)  # the worker may append one meanwhile
        drafted = [block for block in blocks if block["drafted"]]
        accepted = sum(block["maker"] == Maker.DRAFTER for block in drafted)
        return {
            "exact": False,
            "router": self.task.router.name,
            "threshold": self.task.router.threshold,
            "quality": self.task.router.quality,
            "accepted_share": accepted / len(drafted) if drafted else None,
            "scorer_failures": sum(block["failure"] is not None for block in blocks),
            "seconds": asdict(self.seconds),
            "num_blocks": self.task.blocks,
            "blocks": blocks,
        }
