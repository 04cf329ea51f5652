"""The captions that the included video models understand, and their words as numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider.errors import OutriderError

COLORS = ("red", "green", "blue", "yellow", "cyan", "magenta")
SHAPES = ("circle", "square", "triangle", "cross")
MOTIONS = ("sideways", "vertically", "diagonally")
BACKGROUNDS = ("black", "gray", "white")
_SLOTS = (COLORS, SHAPES, MOTIONS, COLORS, SHAPES, MOTIONS, BACKGROUNDS)
_FILLERS = frozenset(("a", "an", "moving", "moves", "and", "on", "background", "the"))
_FORM = "a COLOR SHAPE moving MOTION and a COLOR SHAPE moving MOTION on a BACKGROUND background"
NUM_WORDS = len(COLORS) + len(SHAPES) + len(MOTIONS) + len(BACKGROUNDS)
NUM_TOKENS = len(_SLOTS)
_FIRST_ID = {
    COLORS: 0,
    SHAPES: len(COLORS),
    MOTIONS: len(COLORS) + len(SHAPES),
    BACKGROUNDS: len(COLORS) + len(SHAPES) + len(MOTIONS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """A shape of a scene."""

    color: str
    shape: str
    motion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a caption says: two shapes with different colors, the second one in front, and the background."""

    back: Actor
    front: Actor
    background: str

    def caption(self) -> str:
        """Return the scene in words."""
        one, two = (f"a {actor.color} {actor.shape} moving {actor.motion}" for actor in (self.back, self.front))
        return f"{one} and {two} on a {self.background} background"

    def tokens(self) -> list[int]:
        """Return the ids of the `NUM_TOKENS` words that carry the meaning."""
        one, two = self.back, self.front
        words = (one.color, one.shape, one.motion, two.color, two.shape, two.motion, self.background)
        return [_FIRST_ID[slot] + slot.index(word) for slot, word in zip(_SLOTS, words, strict=True)]


def parse_caption(text: str) -> Scene:
    """Return the scene of a caption. Articles and the words "moving", "and", "on", "background" may be left out.

    Raises:
        OutriderError: the caption does not have the form that the models were trained on.
    """
    words = [word for word in text.lower().replace(",", " ").replace(".", " ").split() if word not in _FILLERS]
    if len(words) != NUM_TOKENS:
        raise OutriderError(f"caption {text!r} has another form than the models know; use: {_FORM}")
    for word, slot in zip(words, _SLOTS, strict=True):
        if word not in slot:
            raise OutriderError(f"caption {text!r} has {word!r} in place of one of: {', '.join(slot)}; use: {_FORM}")
    back = Actor(color=words[0], shape=words[1], motion=words[2])
    front = Actor(color=words[3], shape=words[4], motion=words[5])
    return Scene(back=back, front=front, background=words[6])


def random_scene(rng: random.Random) -> Scene:
    """Return a random scene."""
    back_color, front_color = rng.sample(COLORS, 2)
    back = Actor(color=back_color, shape=rng.choice(SHAPES), motion=rng.choice(MOTIONS))
    front = Actor(color=front_color, shape=rng.choice(SHAPES), motion=rng.choice(MOTIONS))
    return Scene(back=back, front=front, background=rng.choice(BACKGROUNDS))


def random_captions(count: int, seed: int) -> list[str]:
    """Return `count` different captions. The same seed gives the same captions."""
    rng = random.Random(seed)
    captions: dict[str, None] = {}
    while len(captions) < count:
        captions.setdefault(random_scene(rng).caption())
    return list(captions)
