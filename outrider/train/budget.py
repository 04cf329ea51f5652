"""The time budget of a training."""

from collections.abc import Callable
from time import perf_counter


class TimeBudget:
    """Measures how much of its time a training has used, over all its runs.

    Time counts between `start` and `stop`. Loading the models and evaluations are not part of it.
    """

    def __init__(self, seconds: float, *, used: float = 0.0, clock: Callable[[], float] = perf_counter) -> None:
        """Make a budget of `seconds`. Earlier runs have used `used` of them."""
        self.seconds = seconds
        self._began = used
        self._used = used
        self._clock = clock
        self._started: float | None = None
        self._last: dict[str, float] = {}  # elapsed seconds when an action last took place

    def start(self) -> None:
        """Let time count."""
        self._started = self._clock()

    def stop(self) -> None:
        """Let time not count until the next start."""
        self._used = self.elapsed
        self._started = None

    @property
    def elapsed(self) -> float:
        """Seconds of all runs."""
        return self._used + (0.0 if self._started is None else self._clock() - self._started)

    @property
    def share(self) -> float:
        """Share of the budget that is used, at most 1."""
        return min(self.elapsed / self.seconds, 1.0)

    def is_over(self, cycle_seconds: float) -> bool:
        """Return whether another generation cycle would end further from the budget than the training is now."""
        return self.elapsed + cycle_seconds / 2 >= self.seconds

    def is_due(self, action: str, interval: float) -> bool:
        """Return whether `interval` seconds have counted since this was last true, or since the run began."""
        last = self._last.setdefault(action, self._began)
        if self.elapsed - last < interval:
            return False
        self._last[action] = self.elapsed
        return True
