"""How much of the waiting prompts a round reads, so that those who decode beside it do not wait too long."""

from __future__ import annotations

from outrider.errors import OutriderError

_LEAST, _FIRST = 16, 64  # tokens, whatever the bound; and as long as nobody knows what one takes
_WEIGHT, _SHARE = 0.2, 0.05  # of the last round; of a round's time, at the least, is what its prompts took


class PrefillBudget:
    """A number of tokens, or as many as the time of a round allows: base + each x tokens.

    Rounds without prompts teach the base, those with them the rest, at about as many tokens as are read.
    """

    def __init__(self, most: int, *, seconds: float | None = None) -> None:
        """At most `most` tokens a round, and a round of about `seconds` at most where some row decodes."""
        if most < 1:
            raise OutriderError(f"chunk is {most}; it must be at least 1")
        if seconds is not None and not seconds > 0:
            raise OutriderError(f"a round may take {seconds} seconds; use a time above 0, or none at all")
        self._most, self._seconds = most, seconds
        self._base = self._each = 0.0

    def chunk(self, decoding: int) -> int:
        """Tokens of prompts for the next round, in which so many rows decode."""
        if self._seconds is None or not decoding:
            return max(self._most - decoding, 1)
        fits = int((self._seconds - self._base) / self._each) if self._each else _FIRST
        return max(min(max(fits, _LEAST), self._most - decoding), 1)

    def learn(self, fed: int, seconds: float) -> None:
        """From a round that read so many tokens of prompts."""
        if fed:
            each = max(seconds - self._base, _SHARE * seconds) / fed
            self._each += (each - self._each) * (_WEIGHT if self._each else 1.0)
        else:
            self._base += (seconds - self._base) * (_WEIGHT if self._base else 1.0)
