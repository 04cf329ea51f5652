"""In which order a training goes through its prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from outrider.core.noise import derive_seed
from outrider.train.data.batches import parts, shares
from outrider.train.data.sample import Sample
from outrider.train.settings import Settings


class Writer(Protocol):
    """Who has the texts that are learned from."""

    def write(self, numbers: Sequence[int], *, turn: int) -> list[Sample]:
        """Texts that begin with some of the prompts, in the order of their numbers."""


class PromptSchedule:
    """Waves, each of some prompts answered together and some steps on their answers.

    An epoch goes through all prompts of this process once. What a wave holds follows from its number alone.
    """

    def __init__(self, author: Writer, numbers: Sequence[int], settings: Settings, *, most: int) -> None:
        """`numbers` are this process's prompts; `most` says how many a process has at most."""
        self._author, self._numbers, self._settings = author, sorted(numbers), settings
        self._of_epoch = -(-most // (settings.batch_size * settings.steps_per_generation))
        self.waves = self._of_epoch * settings.epochs

    def samples(self, wave: int) -> list[Sample]:
        """The wave's answers, in the order of the prompts' numbers."""
        settings = self._settings
        epoch, place = divmod(wave, self._of_epoch)
        order = random.Random(derive_seed(settings.seed, epoch)).sample(self._numbers, len(self._numbers))
        mine = shares(len(order), self._of_epoch)[place]
        turn = epoch % settings.answers_per_prompt if settings.answers_per_prompt else epoch
        return self._author.write([order[at] for at in mine], turn=turn)

    def steps(self, samples: Sequence[Sample], wave: int) -> list[list[list[Sample]]]:
        """What each of the wave's steps learns from, in parts that fit into memory."""
        mixed = random.Random(derive_seed(self._settings.seed, wave)).sample(samples, len(samples))
        runs = shares(len(mixed), self._settings.steps_per_generation)
        return [parts([mixed[at] for at in run], self._settings.micro_batch_tokens) for run in runs]
