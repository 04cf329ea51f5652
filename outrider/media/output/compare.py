"""Draws several outputs side by side. The border of each block has the color of who made it."""

from collections.abc import Sequence
from typing import Any

from outrider.media.output.writer import picture as scaled
from outrider.media.results import Maker, MediaResult

COLORS = {Maker.TARGET: (240, 140, 30), Maker.DRAFTER: (60, 150, 250)}
_SCALE = 5  # pixels of the picture for a pixel of a frame
_BORDER = 6
_GAP = 10
_TITLE = 34  # rows above a frame
_BAR = 22  # rows below a frame, for a field of each block
_HEAD = 24  # rows for the prompt
_LEGEND = 24  # rows for the meaning of the colors
_INK, _MUTED, _PAPER, _EMPTY = (235, 235, 235), (150, 150, 150), (24, 24, 28), (60, 60, 66)


def draw_comparison(results: Sequence[tuple[str, str, MediaResult]]) -> list[Any]:
    """Return a pillow image for each frame.

    Args:
        results: title, second line and output; outputs of the same prompt and size.
    """
    prompt = results[0][2].prompt
    return [_draw(results, frame, prompt) for frame in range(len(results[0][2].content))]


def _draw(results: Sequence[tuple[str, str, MediaResult]], frame: int, prompt: str) -> Any:
    from PIL import Image, ImageDraw

    side = results[0][2].content.shape[-1] * _SCALE
    column = side + 2 * _BORDER
    width = len(results) * column + (len(results) + 1) * _GAP
    height = _HEAD + _TITLE + column + _BAR + _LEGEND + 2 * _GAP
    picture = Image.new("RGB", (width + width % 2, height + height % 2), _PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((_GAP, _GAP // 2), prompt, fill=_INK)
    for i, (title, line, result) in enumerate(results):
        left = _GAP + i * (column + _GAP)
        top = _HEAD + _TITLE
        draw.text((left, _HEAD + 2), title, fill=_INK)
        draw.text((left, _HEAD + 17), line, fill=_MUTED)
        current = _block_of(result, frame)
        draw.rectangle((left, top, left + column - 1, top + column - 1), fill=COLORS[result.blocks[current].maker])
        picture.paste(scaled(result.content[frame], _SCALE), (left + _BORDER, top + _BORDER))
        _draw_bar(draw, result, current, left, top + column + 5, column)
    _draw_legend(draw, picture.height - _LEGEND)
    return picture


def _draw_bar(draw: Any, result: MediaResult, current: int, left: int, top: int, width: int) -> None:
    """Draw a field for each block; those after the current one are empty."""
    count = len(result.blocks)
    for block in result.blocks:
        start, end = (left + block_edge * width // count for block_edge in (block.index, block.index + 1))
        color = COLORS[block.maker] if block.index <= current else _EMPTY
        draw.rectangle((start, top, end - 3, top + 10), fill=color, outline=_INK if block.index == current else None)


def _draw_legend(draw: Any, top: int) -> None:
    left = _GAP
    for maker, text in ((Maker.TARGET, "made by the target"), (Maker.DRAFTER, "made by the drafter")):
        draw.rectangle((left, top, left + 11, top + 11), fill=COLORS[maker])
        draw.text((left + 17, top), text, fill=_MUTED)
        left += 160


def _block_of(result: MediaResult, frame: int) -> int:
    """Return the number of the block that holds a frame."""
    seen = 0
    for block in result.blocks:
        seen += len(block.content)
        if frame < seen:
            return block.index
    raise IndexError(f"frame {frame} of {seen}")
