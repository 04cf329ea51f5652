"""Whether guesses are kept much less often than they used to be."""

from __future__ import annotations

from outrider.core.stats import Stats

_RECENT, _BASELINE = 256, 16384  # first guesses that the two means look back over
_KNOWN = 1024  # first guesses before anybody is alarmed
_FALLEN, _RISEN = 0.7, 0.85  # of the usual rate: below the one the alarm begins, above the other it ends


class Drift:
    """One proposer's alarm.

    It looks at the first guess of each pass alone, for how many of those are kept does not depend on how many the
    planner allows. The alarm begins when the share kept of the last 256 or so falls below 0.7 of that of the last
    16384 or so, and ends when it is above 0.85 of it again; before 1024 of them there is none. Texts that stay
    different become the usual ones, and the alarm ends with that, too.
    """

    def __init__(self) -> None:
        self.recent = self.baseline = 0.0  # shares kept
        self.alarm = False
        self._met = self._kept = 0  # as last told

    def update(self, stats: Stats) -> None:
        """Its sums by now, which only ever grow."""
        met, kept = (counts[0] if counts else 0 for counts in (stats.reached, stats.accepted))
        new = met - self._met
        if not new:
            return
        rate = (kept - self._kept) / new
        self.recent += (rate - self.recent) * min(new / min(met, _RECENT), 1.0)
        self.baseline += (rate - self.baseline) * min(new / min(met, _BASELINE), 1.0)
        self._met, self._kept = met, kept
        self.alarm = met >= _KNOWN and self.recent < (_RISEN if self.alarm else _FALLEN) * self.baseline
