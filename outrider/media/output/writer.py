"""Writes frames as an mp4 file, or as a gif where no encoder is installed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import OutriderError
from outrider.runtime.atomic_files import check_writable

SUFFIXES = (".mp4", ".gif")
_QUALITY = 8  # of imageio-ffmpeg, from 0 to 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A written file."""

    file: Path
    note: str | None  # why it is another file than the one asked for


def check_video_file(path: str | Path) -> Path:
    """Return the path of a video that can be written.

    Raises:
        OutriderError: the suffix is unknown, the folder cannot be written, or pillow is missing.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() not in SUFFIXES:
        raise OutriderError(f"{path} is not the name of a video file; end it with {' or '.join(SUFFIXES)}")
    check_writable(file)
    _pillow()
    return file


def picture(frame: Tensor, scale: int) -> Any:
    """Return the pillow image of a frame (3, rows, columns) from 0 to 1. Each pixel becomes scale x scale pixels."""
    from PIL import Image

    made = Image.fromarray((frame.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy())
    return made.resize((made.width * scale, made.height * scale), Image.Resampling.NEAREST)


def write_video(pictures: Sequence[Any], file: Path, *, fps: float) -> Written:
    """Write a video.

    Args:
        pictures: pillow images of one size, with even width and height for mp4.
        file: ends in .mp4 or .gif. If mp4 cannot be encoded, the file ends in .gif instead, and the result says so.
        fps: frames per second.
    """
    if file.suffix.lower() == ".gif":
        _write_gif(pictures, file, fps)
        return Written(file=file, note=None)
    problem = _write_mp4(pictures, file, fps)
    if problem is None:
        return Written(file=file, note=None)
    gif = file.with_suffix(".gif")
    _write_gif(pictures, gif, fps)
    return Written(file=gif, note=f"mp4 cannot be encoded ({problem}), so the video is a gif: {gif}")


def _write_mp4(pictures: Sequence[Any], file: Path, fps: float) -> str | None:
    """Write an mp4 file. Return why it was not possible, or None."""
    try:
        import imageio_ffmpeg
    except ImportError:
        return 'no encoder; pip install "outrider[media]"'
    try:
        writer = imageio_ffmpeg.write_frames(
            str(file), pictures[0].size, fps=fps, codec="libx264", quality=_QUALITY, macro_block_size=2
        )
        writer.send(None)
        for picture in pictures:
            writer.send(picture.convert("RGB").tobytes())
        writer.close()
    except (OSError, RuntimeError) as error:  # no ffmpeg program, or one without this codec
        file.unlink(missing_ok=True)
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None


def _write_gif(pictures: Sequence[Any], file: Path, fps: float) -> None:
    _pillow()
    first, *rest = pictures
    # gif counts hundredths of a second.
    first.save(file, save_all=True, append_images=rest, duration=10 * round(100 / fps), loop=0)


def _pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise OutriderError('videos need pillow; pip install "outrider[media]"') from None
