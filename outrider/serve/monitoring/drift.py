"""Detects that the acceptance of a proposer has dropped."""

from outrider.core.stats import Stats

_RECENT_WINDOW = 256  # draft tokens at position 0 in the recent mean
_BASELINE_WINDOW = 16384  # draft tokens at position 0 in the baseline
_MIN_DRAFT_TOKENS = 1024  # draft tokens at position 0 before an alarm is possible
_ALARM_RATIO = 0.7  # the alarm starts when recent / baseline falls below this
_RECOVERED_RATIO = 0.85  # the alarm ends when recent / baseline rises to this


class Drift:
    """The drift alarm of one proposer.

    It uses draft tokens at position 0, whose acceptance does not depend on the draft length. The
    alarm starts when the mean of the last 256 falls below 0.7 of the mean of the last 16384, and
    ends above 0.85 of it. There is no alarm before 1024 draft tokens. If the traffic stays
    different, the baseline follows and the alarm ends.
    """

    def __init__(self) -> None:
        self.recent = 0.0  # acceptance
        self.baseline = 0.0  # acceptance
        self.alarm = False
        self._verified = 0  # draft tokens at position 0 until the last update
        self._accepted = 0  # of these, the accepted ones

    def update(self, stats: Stats) -> None:
        """Update with the current sums of the proposer."""
        verified = stats.reached[0] if stats.reached else 0
        accepted = stats.accepted[0] if stats.accepted else 0
        num_new = verified - self._verified
        if not num_new:
            return
        acceptance = (accepted - self._accepted) / num_new
        self.recent += (acceptance - self.recent) * min(num_new / min(verified, _RECENT_WINDOW), 1.0)
        self.baseline += (acceptance - self.baseline) * min(num_new / min(verified, _BASELINE_WINDOW), 1.0)
        self._verified = verified
        self._accepted = accepted
        threshold = _RECOVERED_RATIO if self.alarm else _ALARM_RATIO
        self.alarm = verified >= _MIN_DRAFT_TOKENS and self.recent < threshold * self.baseline
