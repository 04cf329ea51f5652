"""Turns the frames of a finished video into the bytes of a file."""

from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from outrider.media.output.writer import picture, write_video
from outrider.serve.videos.job import VideoFile
from outrider.serve.videos.models import FPS


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
