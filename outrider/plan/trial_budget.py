"""What trials of a proposer may cost that come to nothing: a small share of the time."""

from __future__ import annotations

from math import inf

_SPENT, _WASTED = 0.01, 0.004  # of the time, on such trials; and where nothing has ever paid
_PATIENCE_MOST = 512  # rounds without speculation before it is tried again
_FIRST = 3  # trials of a new engine, before they must be earned


class TrialBudget:
    """Seconds that may go into the next trial."""

    def __init__(self) -> None:
        self._left, self._earned = inf, 0.0  # for trials; and brought by the arm in use since it was taken up
        self._trials = 0  # so far

    def begin(self) -> None:
        """A trial."""
        self._trials += 1

    def change(self) -> None:
        """To another arm, or none; what the last one has lost is paid."""
        self._left, self._earned = self._left + min(self._earned, 0.0), 0.0

    def earn(self, seconds: float) -> None:
        """What the arm in use has brought, or cost."""
        self._earned += seconds

    def grow(self, seconds: float, *, paid: bool) -> None:
        """With the time; `paid`: guesses have brought something yet."""
        self._left += self._share(paid) * seconds

    def allows(self, cost: float, *, plain: float, strange: bool, paid: bool) -> bool:
        """Whether there may be a trial of that cost, in seconds.

        A second trial on the same texts, which are not `strange`, takes the credit of two. A new engine has some more
        trials, as texts often begin with what is hard to guess. Else there is never more credit than for two trials,
        nor further below one than what rounds of `plain` seconds earn within patience.
        """
        first = self._trials < _FIRST
        least, most = cost - self._share(paid) * _PATIENCE_MOST * plain, (_FIRST if first else 2) * cost
        self._left = min(max(self._left, least), most)
        return self._left + min(self._earned, 0.0) >= (cost if first or strange else 2 * cost)

    @staticmethod
    def _share(paid: bool) -> float:
        return _SPENT if paid else _WASTED
