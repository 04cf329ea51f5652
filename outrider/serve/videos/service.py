"""Makes the videos of a server in a thread of its own, one after the other."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition, Thread

import torch
from torch import Tensor

from outrider.core.params import InvalidParam
from outrider.media.calibration.drift import DriftWatch
from outrider.media.output.writer import picture, write_video
from outrider.media.results import BlockResult
from outrider.serve.errors import STOPPED, QueueFull, ServerStops
from outrider.serve.openai.errors import UnknownName
from outrider.serve.videos.job import VideoFile, VideoJob
from outrider.serve.videos.models import FPS, ServedModels
from outrider.serve.videos.schema import VideoTask

_log = logging.getLogger("outrider.serve")


class VideoService:
    """Holds the videos in memory and makes those that wait.

    The methods may be called from any thread and do not wait for a video.

    Args:
        served: the models. Only the thread of the service uses them.
        max_queued: videos that may wait, beside the one that is made.
        max_kept: videos that are kept after they have ended. The oldest is dropped first.
    """

    def __init__(self, served: ServedModels, *, max_queued: int, max_kept: int) -> None:
        self.served = served
        self._max_queued = max_queued
        self._max_kept = max_kept
        self._jobs: dict[str, VideoJob] = {}  # by id, in the order in which they were created
        self._changed = Condition()  # guards the jobs and `_stopping`
        self._stopping = False
        self._watch = None if served.calibration is None else DriftWatch(served.calibration)
        self._warned = False  # of the present drift
        self._thread = Thread(target=self._run, name="videos", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current block. Unfinished videos fail."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def create(self, task: VideoTask) -> VideoJob:
        """Queue a video and return it. Raises QueueFull if too many videos wait, and ServerStops."""
        with self._changed:
            if self._stopping:
                raise ServerStops(STOPPED)
            if sum(not job.ended for job in self._jobs.values()) > self._max_queued:  # one of them is being made
                raise QueueFull(f"{self._max_queued} videos wait already; try again later")
            job = VideoJob(task=task)
            self._jobs[job.id] = job
            self._changed.notify_all()
        return job

    def job(self, id: str) -> VideoJob:
        """Return a video. Raises UnknownName if there is no such video, or it was deleted or dropped."""
        with self._changed:
            return self._find(id)

    def jobs(self) -> list[VideoJob]:
        """Return all videos, the oldest first."""
        with self._changed:
            return list(self._jobs.values())

    def delete(self, id: str) -> VideoJob:
        """Forget a video and return it. If it is being made, the thread stops after the current block.

        Raises:
            UnknownName: there is no such video.
        """
        with self._changed:
            job = self._find(id)
            job.deleted = True
            del self._jobs[id]
        return job

    def file(self, id: str) -> VideoFile:
        """Return the file of a video.

        Raises:
            UnknownName: there is no such video.
            InvalidParam: the video has no file, or none yet.
        """
        job = self.job(id)
        if job.error is not None:
            raise InvalidParam("video_id", f"video {job.id} has failed: {job.error}; make it again")
        if job.file is None:
            raise InvalidParam("video_id", f"video {job.id} is {job.status}; wait until its status is completed")
        return job.file

    def _find(self, id: str) -> VideoJob:
        try:
            return self._jobs[id]
        except KeyError:
            raise UnknownName(
                "video_id", f"there is no video {id[:100]!r}; it was never made, or it was deleted or dropped"
            ) from None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._make(job)
            except Exception as error:  # a failed video must not end the thread
                _log.exception("a video failed")
                job.fail(f"{type(error).__name__}: {error}")
            with self._changed:
                self._drop_old()

    def _next(self) -> VideoJob | None:
        """Wait for a video and return it, or return None when the service stops."""
        with self._changed:
            while not self._stopping:
                for job in self._jobs.values():
                    if job.status == "queued":
                        job.status = "in_progress"
                        return job
                self._changed.wait()
        return None

    def _make(self, job: VideoJob) -> None:
        task = job.task
        frames = []
        for block in self.served.models.engine.stream(task.prompt, task.router, seed=task.seed, blocks=task.blocks):
            if job.deleted:
                return
            if self._stopping:
                job.fail("the server stops")
                return
            frames.append(block.content)
            job.add(block)
            if task.calibrated:
                self._watch_drift(block)
        job.complete(encode_video(torch.cat(frames), scale=task.scale, output_format=task.output_format))

    def _watch_drift(self, block: BlockResult) -> None:
        """Log a warning when drafts are no longer accepted as often as at calibration."""
        assert self._watch is not None
        self._watch.add(block)
        message = self._watch.message()
        if message is not None and not self._warned:
            _log.warning("%s: %s", self.served.name, message)
        self._warned = message is not None

    def _drop_old(self) -> None:
        ended = [job for job in self._jobs.values() if job.ended]
        for job in ended[: max(0, len(ended) - self._max_kept)]:
            del self._jobs[job.id]


def encode_video(content: Tensor, *, scale: int, output_format: str) -> VideoFile:
    """Return the file of a video.

    Args:
        content: frames, of shape (frames, 3, rows, columns) with values from 0 to 1.
        scale: rows and columns that a pixel becomes. Pixels are repeated, not blended.
        output_format: mp4 or gif. If mp4 cannot be encoded, the file is a gif and has a note.
    """
    with TemporaryDirectory(prefix="outrider-") as folder:
        pictures = [picture(frame, scale) for frame in content]
        written = write_video(pictures, Path(folder) / f"video.{output_format}", fps=FPS)
        # The path in the note is of no use to a client.
        note = None if written.note is None else written.note.removesuffix(f": {written.file}")
        return VideoFile(data=written.file.read_bytes(), format=written.file.suffix[1:], note=note)
