"""The captions that the embedded video models understand, and their words as numbers."""

import random
from dataclasses import astuple, dataclass, fields

from outrider.media.models.language import Language

COLORS = ("red", "green", "blue", "yellow", "cyan", "magenta")
SHAPES = ("circle", "square", "triangle", "cross")
MOTIONS = ("right", "left", "up", "down")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
BACKGROUNDS = ("black", "gray", "white")
LANGUAGE = Language(
    slots=(COLORS, SHAPES, MOTIONS, ROWS, COLUMNS, BACKGROUNDS),
    template="a {} {} moving {} from the {} {} on a {} background",
    fillers=frozenset(("a", "an", "moving", "moves", "from", "the", "on", "background")),
    form="a COLOR SHAPE moving MOTION from the ROW COLUMN on a BACKGROUND background",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The content of a caption: a shape, where it starts and moves, and the background."""

    color: str
    shape: str
    motion: str
    row: str
    column: str
    background: str

    def caption(self) -> str:
        """Return the scene in words."""
        return LANGUAGE.template.format(*astuple(self))

    def tokens(self) -> list[int]:
        """Return the ids of the words that carry the meaning."""
        return LANGUAGE.ids(astuple(self))


_NAMES = [field.name for field in fields(Scene)]


def parse_caption(text: str) -> Scene:
    """Return the scene of a caption. The words that carry no meaning, such as "a" and "moving", may be left out.

    Raises:
        OutriderError: the caption does not have the form that the models were trained on.
    """
    return Scene(**dict(zip(_NAMES, LANGUAGE.words(text), strict=True)))


def random_scene(rng: random.Random) -> Scene:
    """Return a random scene."""
    return Scene(**dict(zip(_NAMES, LANGUAGE.random_words(rng), strict=True)))
