"""Draws the training videos: a shape moves on a background, as a caption says."""

import math
import random

import torch
from torch import Tensor

from outrider.media.models.captions import COLUMNS, ROWS, Scene, random_scene

_COLORS = {
    "red": (0.9, 0.15, 0.15),
    "green": (0.15, 0.75, 0.2),
    "blue": (0.2, 0.3, 0.95),
    "yellow": (0.95, 0.85, 0.15),
    "cyan": (0.15, 0.85, 0.9),
    "magenta": (0.85, 0.2, 0.85),
}
_BACKGROUNDS = {"black": 0.05, "gray": 0.5, "white": 0.95}
_RADIUS = (6.5, 7.5)  # pixels
_SPEED = (0.9, 1.1)  # pixels per frame
_PLACES = (8.5, 16.0, 23.5)  # rows and columns of the center at the start
_JITTER = 1.0  # pixels
_DIRECTIONS = {"right": (1.0, 0.0), "left": (-1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}  # x first


def draw_clip(scene: Scene, frames: int, size: int, rng: random.Random) -> Tensor:
    """Return a video of a scene, (frames, 3, size, size), from 0 to 1. Places, sizes and speeds vary a little."""
    picture = torch.full((frames, 3, size, size), _BACKGROUNDS[scene.background])
    radius = rng.uniform(*_RADIUS)
    cover = _cover(scene.shape, _path(scene, frames, size, radius, rng), radius, size)[:, None]
    color = torch.tensor(_COLORS[scene.color])[:, None, None]
    return picture + cover * (color - picture)


def random_clips(count: int, frames: int, size: int, seed: int) -> tuple[Tensor, list[Scene]]:
    """Return random videos, (count, frames, 3, size, size), and their scenes."""
    rng = random.Random(seed)
    scenes = [random_scene(rng) for _ in range(count)]
    return torch.stack([draw_clip(scene, frames, size, rng) for scene in scenes]), scenes


def _path(scene: Scene, frames: int, size: int, radius: float, rng: random.Random) -> Tensor:
    """Return the center at each frame, (frames, 2) in pixels, x first. Shapes bounce off the edges."""
    speed = rng.uniform(*_SPEED)
    start = (_PLACES[COLUMNS.index(scene.column)], _PLACES[ROWS.index(scene.row)])
    low, high = radius, size - radius
    times = speed * torch.arange(frames)
    coordinates = [
        _bounce(place + rng.uniform(-_JITTER, _JITTER) + direction * times, low, high)
        for place, direction in zip(start, _DIRECTIONS[scene.motion], strict=True)
    ]
    return torch.stack(coordinates, dim=-1)


def _bounce(x: Tensor, low: float, high: float) -> Tensor:
    """Fold positions on a line into the range from `low` to `high`."""
    length = high - low
    folded = (x - low) % (2 * length)
    return low + torch.where(folded > length, 2 * length - folded, folded)


def _cover(shape: str, centers: Tensor, radius: float, size: int) -> Tensor:
    """Return how much of each pixel a shape covers, (frames, size, size)."""
    grid = torch.arange(size) + 0.5
    x = grid[None, None, :] - centers[:, 0, None, None]
    y = grid[None, :, None] - centers[:, 1, None, None]
    return (0.5 - _distance(shape, x, y, radius)).clamp(0.0, 1.0)


def _distance(shape: str, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Return about how far each point is outside of the shape, in pixels."""
    if shape == "circle":
        return (x.square() + y.square()).sqrt() - radius
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.85 * radius
    if shape == "triangle":
        slanted = (2 * x.abs() - y - 0.9 * radius) / math.sqrt(5)
        return torch.maximum(slanted, y - 0.9 * radius)
    arm = 0.33 * radius
    across = torch.maximum(x.abs() - radius, y.abs() - arm)
    along = torch.maximum(x.abs() - arm, y.abs() - radius)
    return torch.minimum(across, along)
