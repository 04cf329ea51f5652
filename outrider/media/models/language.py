"""Captions of a fixed form: one word for each slot, and their words as numbers."""

import math
import random
from dataclasses import dataclass
from itertools import accumulate

from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """The captions that a set of models understands."""

    slots: tuple[tuple[str, ...], ...]  # the words that carry meaning, in the order of a caption
    template: str  # a caption with {} for each slot
    fillers: frozenset[str]  # words that carry no meaning
    form: str  # a caption with the names of the slots, for messages

    @property
    def num_tokens(self) -> int:
        """How many words of a caption carry meaning."""
        return len(self.slots)

    @property
    def num_words(self) -> int:
        """How many words carry meaning, in all slots together."""
        return sum(map(len, self.slots))

    @property
    def first_ids(self) -> tuple[int, ...]:
        """The id of the first word of each slot."""
        return tuple(accumulate(map(len, self.slots), initial=0))[:-1]

    def words(self, caption: str) -> tuple[str, ...]:
        """Return the words that carry meaning. The others may be left out.

        Raises:
            OutriderError: the caption does not have the form that the models were trained on.
        """
        all_words = caption.lower().replace(",", " ").replace(".", " ").split()
        found = [word for word in all_words if word not in self.fillers]
        if len(found) != len(self.slots):
            raise OutriderError(f"caption {caption!r} has another form than the models know; use: {self.form}")
        for word, slot in zip(found, self.slots, strict=True):
            if word not in slot:
                raise OutriderError(
                    f"caption {caption!r} has {word!r} in place of one of: {', '.join(slot)}; use: {self.form}"
                )
        return tuple(found)

    def ids(self, words: tuple[str, ...]) -> list[int]:
        """Return the ids of the words that carry meaning."""
        return [first + slot.index(word) for first, slot, word in zip(self.first_ids, self.slots, words, strict=True)]

    def tokens(self, caption: str) -> list[int]:
        """Return the ids of a caption's words. Raises the errors of `words`."""
        return self.ids(self.words(caption))

    def random_words(self, rng: random.Random) -> tuple[str, ...]:
        """Return a random word for each slot."""
        return tuple(map(rng.choice, self.slots))

    def random_captions(self, count: int, seed: int) -> list[str]:
        """Return `count` different captions. The same seed gives the same captions.

        Raises:
            OutriderError: there are not so many captions.
        """
        most = math.prod(map(len, self.slots))
        if count > most:
            raise OutriderError(f"{count} captions are asked for, but there are {most}; use fewer")
        rng = random.Random(seed)
        captions: dict[str, None] = {}
        while len(captions) < count:
            captions.setdefault(self.template.format(*self.random_words(rng)))
        return list(captions)
