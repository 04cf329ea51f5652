"""Call reward functions. One that raises, hangs or returns no number fails its own sample only."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from outrider.errors import OutriderError
from outrider.train.rl.records import Rollout

_THREADS = 8  # reward functions that run at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt, and what a reward function needs to judge its answers."""

    prompt: str | tuple[int, ...]
    answer: Any = None


RewardFunction = Callable[[Rollout, Problem], float]


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a rollout; `error` says why there is none."""

    value: float = math.nan
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether the reward function gave no number."""
        return bool(self.error)


def compute_rewards(
    function: RewardFunction, pairs: Sequence[tuple[Rollout, Problem]], *, timeout: float | None
) -> list[Reward]:
    """Return the rewards of rollouts, in their order.

    Args:
        function: it is called in threads, up to 8 at a time.
        pairs: the rollouts with their problems.
        timeout: seconds that one call may take; None: no limit, and the calls run one after another in this thread. A
            call that takes longer goes on in its thread until it returns, and its result is ignored.

    Raises:
        OutriderError: `timeout` is not above 0.
    """
    if timeout is None:
        return [_call(function, *pair) for pair in pairs]
    if not timeout > 0:
        raise OutriderError(f"the timeout of rewards is {timeout}; use seconds above 0, or None for no limit")
    calls = [_Call(function, *pair) for pair in pairs]
    running: list[_Call] = []
    waiting = calls[::-1]
    while waiting or running:
        while waiting and len(running) < _THREADS:
            running.append(waiting.pop())
            running[-1].start(timeout)
        running[0].join()
        running = [call for call in running if call.runs()]
    return [call.reward for call in calls]


class _Call:
    """A call of a reward function in a thread of its own."""

    def __init__(self, function: RewardFunction, rollout: Rollout, problem: Problem) -> None:
        self._arguments = (function, rollout, problem)
        self._result: Reward | None = None
        self._timeout = 0.0
        self._deadline = 0.0
        # A daemon, because Python cannot end a thread that hangs, and must be able to exit.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._result = _call(*self._arguments)

    def start(self, timeout: float) -> None:
        self._timeout = timeout
        self._deadline = monotonic() + timeout
        self._thread.start()

    def join(self) -> None:
        """Wait until the call has ended or its time is up."""
        self._thread.join(max(self._deadline - monotonic(), 0.0))

    def runs(self) -> bool:
        """Return whether the call still runs and has time left. If its time is up, the reward is an error."""
        if self._thread.is_alive() and monotonic() < self._deadline:
            return True
        self._result = self._result or Reward(error=f"the reward function took more than {self._timeout:g} s")
        return False

    @property
    def reward(self) -> Reward:
        assert self._result is not None
        return self._result


def _call(function: RewardFunction, rollout: Rollout, problem: Problem) -> Reward:
    if rollout.error:
        return Reward(error=f"the rollout has failed: {rollout.error}")
    try:
        value = float(function(rollout, problem))
    except Exception as error:
        return Reward(error=f"the reward function raised {type(error).__name__}: {error}")
    if not math.isfinite(value):
        return Reward(error=f"the reward function returned {value}")
    return Reward(value)
