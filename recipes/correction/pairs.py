"""Makes pairs of a text with typing errors and the text without them, from a folder of text files."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.family.corpus import is_for_validation, read_texts

_SHORTEST = 40  # characters
_LONGEST = 160  # characters
_MIN_WORDS = 6
_PROSE = re.compile(r"[A-Za-z][A-Za-z ,.;:'()-]*")  # a line of nothing else is prose
_MARKS = " \t*#>\"'-"  # at the ends of a line in comments and docstrings
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Sentences:
    """Distinct lines of prose, by the kind of their document."""

    train: list[str]
    validation: list[str]


@dataclass(frozen=True, slots=True)
class Pair:
    """A text with typing errors, and the text without them."""

    source: str
    text: str


def read_sentences(folder: Path, suffixes: Sequence[str] = ()) -> Sentences:
    """Return the lines of prose in the text files below a folder."""
    train: dict[str, None] = {}  # a set that keeps the order
    validation: dict[str, None] = {}
    for path, document in read_texts(folder, suffixes):
        lines = validation if is_for_validation(path) else train
        lines.update(dict.fromkeys(prose_lines(document)))
    return Sentences(list(train), [line for line in validation if line not in train])


def prose_lines(document: str) -> Iterator[str]:
    """Yield the lines of a document that are prose, without the marks of comments and lists."""
    for line in document.splitlines():
        text = line.strip(_MARKS)
        if _SHORTEST <= len(text) <= _LONGEST and text.count(" ") >= _MIN_WORDS - 1 and _PROSE.fullmatch(text):
            yield text


def with_typos(text: str, rate: float, rng: random.Random) -> Pair:
    """Return a pair in which each word of at least 3 letters has a typing error with probability `rate`."""
    words = text.split(" ")
    broken = [_break(word, rng) if len(word) > 2 and rng.random() < rate else word for word in words]
    return Pair(source=" ".join(broken), text=text)


def _break(word: str, rng: random.Random) -> str:
    """Swap, drop, double or replace one letter of a word."""
    i = rng.randrange(len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    if kind == 1:
        return word[:i] + word[i + 1 :]
    letter = word[i] if kind == 2 else rng.choice(_LETTERS)
    return word[: i + (kind == 2)] + letter + word[i + 1 :]
