"""Detects that the acceptance of a proposer has dropped."""

from __future__ import annotations

from outrider.core.stats import Stats

_RECENT, _BASELINE = 256, 16384  # window of the two means, in draft tokens at position 0
_KNOWN = 1024  # draft tokens at position 0 before an alarm is possible
_FALLEN, _RISEN = 0.7, 0.85  # ratios to the baseline at which the alarm starts and ends


class Drift:
    """The drift alarm of one proposer.

    It uses draft tokens at position 0, whose acceptance does not depend on the draft length. The alarm starts when the
    mean of the last 256 falls below 0.7 of the mean of the last 16384, and ends above 0.85 of it. There is no alarm
    before 1024 draft tokens. If the traffic stays different, the baseline follows and the alarm ends.
    """

    def __init__(self) -> None:
        self.recent = self.baseline = 0.0  # acceptance
        self.alarm = False
        self._met = self._kept = 0  # at the last update

    def update(self, stats: Stats) -> None:
        """Update with the current sums of the proposer."""
        met, kept = (counts[0] if counts else 0 for counts in (stats.reached, stats.accepted))
        new = met - self._met
        if not new:
            return
        rate = (kept - self._kept) / new
        self.recent += (rate - self.recent) * min(new / min(met, _RECENT), 1.0)
        self.baseline += (rate - self.baseline) * min(new / min(met, _BASELINE), 1.0)
        self._met, self._kept = met, kept
        self.alarm = met >= _KNOWN and self.recent < (_RISEN if self.alarm else _FALLEN) * self.baseline
