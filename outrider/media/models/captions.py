"""The captions that the included video models understand, and their words as numbers."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass, fields
from itertools import accumulate

from outrider.errors import OutriderError

COLORS = ("red", "green", "blue", "yellow", "cyan", "magenta")
SHAPES = ("circle", "square", "triangle", "cross")
MOTIONS = ("right", "left", "up", "down")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
BACKGROUNDS = ("black", "gray", "white")
SLOTS = (COLORS, SHAPES, MOTIONS, ROWS, COLUMNS, BACKGROUNDS)  # in the order of a caption
FIRST_IDS = tuple(accumulate(map(len, SLOTS), initial=0))[:-1]  # of the words of each slot
NUM_WORDS = sum(map(len, SLOTS))
NUM_TOKENS = len(SLOTS)
_FILLERS = frozenset(("a", "an", "moving", "moves", "from", "the", "on", "background"))
_FORM = "a COLOR SHAPE moving MOTION from the ROW COLUMN on a BACKGROUND background"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a caption says: a shape, where it starts and moves, and the background."""

    color: str
    shape: str
    motion: str
    row: str
    column: str
    background: str

    def caption(self) -> str:
        """Return the scene in words."""
        place = f"from the {self.row} {self.column}"
        return f"a {self.color} {self.shape} moving {self.motion} {place} on a {self.background} background"

    def tokens(self) -> list[int]:
        """Return the ids of the `NUM_TOKENS` words that carry the meaning."""
        return [first + slot.index(word) for first, slot, word in zip(FIRST_IDS, SLOTS, astuple(self), strict=True)]


_NAMES = [field.name for field in fields(Scene)]


def parse_caption(text: str) -> Scene:
    """Return the scene of a caption. The words that carry no meaning, such as "a" and "moving", may be left out.

    Raises:
        OutriderError: the caption does not have the form that the models were trained on.
    """
    words = [word for word in text.lower().replace(",", " ").replace(".", " ").split() if word not in _FILLERS]
    if len(words) != NUM_TOKENS:
        raise OutriderError(f"caption {text!r} has another form than the models know; use: {_FORM}")
    for word, slot in zip(words, SLOTS, strict=True):
        if word not in slot:
            raise OutriderError(f"caption {text!r} has {word!r} in place of one of: {', '.join(slot)}; use: {_FORM}")
    return Scene(**dict(zip(_NAMES, words, strict=True)))


def random_scene(rng: random.Random) -> Scene:
    """Return a random scene."""
    return Scene(**{name: rng.choice(slot) for name, slot in zip(_NAMES, SLOTS, strict=True)})


def random_captions(count: int, seed: int) -> list[str]:
    """Return `count` different captions. The same seed gives the same captions.

    Raises:
        OutriderError: there are not so many captions.
    """
    most = 1
    for slot in SLOTS:
        most *= len(slot)
    if count > most:
        raise OutriderError(f"{count} captions are asked for, but there are {most}; use fewer")
    rng = random.Random(seed)
    captions: dict[str, None] = {}
    while len(captions) < count:
        captions.setdefault(random_scene(rng).caption())
    return list(captions)
