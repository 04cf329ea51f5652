"""Limit the time of failed trials to a small share of the total time."""

from __future__ import annotations

from math import inf

_SHARE_SAVED = 0.01  # share of the time for trials, once speculation has saved time
_SHARE_NEVER_SAVED = 0.004  # the same before that
_MAX_ROUNDS_BEFORE_TRIAL = 512  # longest time without a trial
_FREE_TRIALS = 3  # trials of a new engine that need no budget


class TrialBudget:
    """The seconds that the next trial may cost."""

    def __init__(self) -> None:
        self._seconds = inf
        self._savings = 0.0  # seconds that the alternative in use has saved since it was chosen
        self._trials = 0

    def count_trial(self) -> None:
        """Count a trial that starts."""
        self._trials += 1

    def switch_alternative(self) -> None:
        """Start anew for another alternative, or none. Losses of the previous one are charged."""
        self._seconds += min(self._savings, 0.0)
        self._savings = 0.0

    def add_savings(self, seconds: float) -> None:
        """Add the time that the alternative in use has saved, or lost."""
        self._savings += seconds

    def add_time(self, seconds: float, *, has_saved: bool) -> None:
        """Grow the budget by a share of the time. `has_saved`: whether speculation has saved time before."""
        self._seconds += self._share(has_saved) * seconds

    def allows(self, cost: float, *, plain: float, new_texts: bool, has_saved: bool) -> bool:
        """Return whether a trial of `cost` seconds may start.

        A further trial on the same requests (not `new_texts`) needs twice the budget. A new engine
        has some free trials, because the beginning of a text is often hard to draft. The budget
        never exceeds two trials, and a trial waits for at most `_MAX_ROUNDS_BEFORE_TRIAL` rounds of
        `plain` seconds.
        """
        is_free = self._trials < _FREE_TRIALS
        maximum = (_FREE_TRIALS if is_free else 2) * cost
        minimum = cost - self._share(has_saved) * _MAX_ROUNDS_BEFORE_TRIAL * plain
        self._seconds = min(max(self._seconds, minimum), maximum)
        needed = cost if is_free or new_texts else 2 * cost
        return self._seconds + min(self._savings, 0.0) >= needed

    @staticmethod
    def _share(has_saved: bool) -> float:
        return _SHARE_SAVED if has_saved else _SHARE_NEVER_SAVED
