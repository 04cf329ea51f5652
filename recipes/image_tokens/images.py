"""Captioned images of 32x32 pixels: a colored shape on a shaded, noisy background."""

from itertools import product
from typing import NamedTuple

import torch
from torch.nn import functional

SIDE = 32  # pixels
SIZES = ("small", "large")
COLORS = {
    "red": (0.85, 0.15, 0.15),
    "green": (0.15, 0.7, 0.2),
    "blue": (0.2, 0.3, 0.9),
    "yellow": (0.9, 0.85, 0.2),
    "purple": (0.6, 0.2, 0.75),
    "orange": (0.95, 0.55, 0.1),
}
SHAPES = ("circle", "square", "triangle", "cross")
_RADIUS = (5.0, 9.0)  # pixels, by size
_NOISE = 0.03  # standard deviation of the noise of a pixel
_TEXTURE = 0.08  # standard deviation of the slow changes of brightness


class Caption(NamedTuple):
    """What an image shows, as indices into SIZES, COLORS and SHAPES."""

    size: int
    color: int
    shape: int

    @property
    def words(self) -> tuple[str, str, str]:
        """The words of the caption."""
        return SIZES[self.size], list(COLORS)[self.color], SHAPES[self.shape]


CAPTIONS = tuple(Caption(*numbers) for numbers in product(range(len(SIZES)), range(len(COLORS)), range(len(SHAPES))))


def draw(captions: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw images [N, 3, 32, 32] in [0, 1] of captions [N, 3]. Equal generators draw equal images."""
    count = len(captions)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    radius = torch.tensor(_RADIUS)[captions[:, 0]] * uniform(0.9, 1.1)
    middle = uniform(0, 1, 2) * (SIDE - 1 - 2 * radius[:, None]) + radius[:, None]
    across, down = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="xy")
    x, y = (axis - middle[:, i, None, None] for i, axis in enumerate((across, down)))
    inside = _inside(x / radius[:, None, None], y / radius[:, None, None], captions[:, 2])
    ground = uniform(0.35, 0.75, 1, 1, 1) + _slow_noise(count, 4, generator)
    tint = uniform(-0.06, 0.06, 3, 1, 1)
    color = torch.tensor(list(COLORS.values()))[captions[:, 1]][:, :, None, None]
    shaded = color * (1 + _slow_noise(count, 3, generator))
    image = torch.where(inside[:, None], shaded, ground + tint)
    noise = _NOISE * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return (image + noise).clamp(0, 1)


def random_captions(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return captions [count, 3] that are drawn uniformly."""
    return torch.tensor(CAPTIONS)[torch.randint(len(CAPTIONS), (count,), generator=generator)]


def _inside(x: torch.Tensor, y: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """Return [N, 32, 32], whether a pixel at (x, y), in units of the radius, belongs to the shape [N]."""
    shapes = torch.stack(
        [
            x**2 + y**2 <= 1,
            (x.abs() <= 0.85) & (y.abs() <= 0.85),
            (y <= 0.85) & (y >= -0.95) & (x.abs() <= (y + 0.95) / 1.8),
            ((x.abs() <= 0.35) & (y.abs() <= 1)) | ((y.abs() <= 0.35) & (x.abs() <= 1)),
        ]
    )
    return shapes[shape, torch.arange(len(shape))]


def _slow_noise(count: int, points: int, generator: torch.Generator) -> torch.Tensor:
    """Return [count, 1, 32, 32], random brightness that is interpolated between points x points values."""
    coarse = _TEXTURE * torch.randn(count, 1, points, points, generator=generator)
    return functional.interpolate(coarse, (SIDE, SIDE), mode="bicubic", align_corners=True)
