"""Plans the order in which a training uses its prompts."""

import random
from collections.abc import Sequence
from typing import Protocol

from outrider.core.noise import derive_seed
from outrider.train.data.batches import micro_batches, split_evenly
from outrider.train.data.sample import Sample
from outrider.train.settings import Settings


class SampleSource(Protocol):
    """Provides the samples of a training."""

    def samples(self, numbers: Sequence[int], *, answer: int) -> list[Sample]:
        """Return a sample for each of these prompts, in ascending order. `answer` is the number of the answer."""


class PromptSchedule:
    """Divides the training of one process into generation cycles.

    In a generation cycle the target answers some prompts, and the draft trains for some steps on the answers. An epoch
    goes through all prompts of the process once. The contents of a cycle depend only on its number.
    """

    def __init__(
        self, source: SampleSource, numbers: Sequence[int], settings: Settings, *, most_per_process: int
    ) -> None:
        """Plan the cycles.

        Args:
            source: provides the samples.
            numbers: the prompts of this process.
            settings: the options of the training.
            most_per_process: the largest number of prompts of a process, so that all processes have as many cycles.
        """
        self._source = source
        self._numbers = sorted(numbers)
        self._settings = settings
        self._cycles_per_epoch = -(-most_per_process // (settings.batch_size * settings.steps_per_generation))
        self.num_cycles = self._cycles_per_epoch * settings.epochs

    def samples(self, cycle: int) -> list[Sample]:
        """Return the samples of a cycle, in the order of their prompts."""
        settings = self._settings
        epoch, cycle_of_epoch = divmod(cycle, self._cycles_per_epoch)
        order = random.Random(derive_seed(settings.seed, epoch)).sample(self._numbers, len(self._numbers))
        indices = split_evenly(len(order), self._cycles_per_epoch)[cycle_of_epoch]
        answer = epoch % settings.answers_per_prompt if settings.answers_per_prompt else epoch
        return self._source.samples([order[i] for i in indices], answer=answer)

    def steps(self, samples: Sequence[Sample], cycle: int) -> list[list[list[Sample]]]:
        """Return the micro-batches of each step of a cycle. Each pass over the samples shuffles them anew."""
        settings = self._settings
        rng = random.Random(derive_seed(settings.seed, cycle))
        steps = []
        for _ in range(settings.passes_per_generation):
            shuffled = rng.sample(samples, len(samples))
            for run in split_evenly(len(shuffled), settings.steps_per_generation):
                steps.append(micro_batches([shuffled[i] for i in run], settings.micro_batch_tokens))
        return steps
