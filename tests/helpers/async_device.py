"""A device that runs behind the host, on a virtual clock, and models that run on it."""

import random
from collections.abc import Callable

import torch

from outrider.core import tree
from outrider.core.proposer import NoProposer, ProposerSetup
from outrider.core.types import Batch, Draft, Needs, Scores
from outrider.testing.toy_target import ToyTarget


class AsyncDevice:
    """A queue of work. A launch returns at once, and a read waits for all work that was launched."""

    def __init__(self, *, launch: float) -> None:
        """`launch` are the seconds that the host needs for a launch."""
        self.host = 0.0  # seconds, the time of the host
        self.idle_at = 0.0  # seconds, when the device has done all work so far
        self._launch = launch

    def launch(self, seconds: float) -> None:
        self.host += self._launch
        self.idle_at = max(self.idle_at, self.host) + seconds

    def read(self) -> None:
        self.host = max(self.host, self.idle_at)


class EventStopwatch:
    """A stopwatch whose marks are passed by the device, as CUDA events are."""

    def __init__(self, device: AsyncDevice) -> None:
        self._device = device

    def now(self) -> float:
        return self._device.host

    def mark(self) -> float:
        return max(self._device.host, self._device.idle_at)

    def seconds(self, begin: float, end: float) -> float:
        assert self._device.idle_at <= self._device.host, "the stopwatch is read before the round is"
        return end - begin


class LaunchStopwatch(EventStopwatch):
    """A stopwatch of the host alone, which sees launches."""

    def mark(self) -> float:
        return self._device.host


class AsyncTarget(ToyTarget):
    """A toy target whose passes take `pass_seconds(tokens)` on the device."""

    def __init__(self, device: AsyncDevice, pass_seconds: Callable[[int], float], **settings) -> None:
        super().__init__(**settings)
        self._queue = device
        self._pass_seconds = pass_seconds

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        self._queue.launch(self._pass_seconds(sum(map(len, batch.feed)) + sum(draft.width)))
        return super().score(batch, draft, first)


class AsyncDraftModel(NoProposer):
    """Drafts chains whose tokens the toy target accepts with a given probability. A token takes `step` seconds."""

    needs = Needs()

    def __init__(self, setup: ProposerSetup, device: AsyncDevice, *, step: float, acceptance: float) -> None:
        super().__init__(setup)
        self._target = setup.target
        self._queue = device
        self._step = step
        self._acceptance = acceptance
        self._rng = random.Random(0)

    def propose(self, batch: Batch) -> Draft:
        depth = max(batch.draft_budget)
        if not depth:
            return tree.empty(len(batch.seqs), torch.device("cpu"))
        self._queue.launch(depth * self._step)
        chains = [self._chain(seq.token_ids, depth) for seq in batch.seqs]
        return tree.chain(torch.tensor(chains), batch.draft_budget)

    def _chain(self, tokens: list[int], depth: int) -> list[int]:
        text = [0, 0, *tokens]
        for _ in range(depth):
            best = int(self._target.table[text[-2], text[-1]].argmax())
            wrong = (best + 1) % self._target.vocab
            text.append(best if self._rng.random() < self._acceptance else wrong)
        return text[-depth:]
