"""Predict how many experts of a mixture a pass over text reads, from calibration, which reads random tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import log

_PRIOR = 2.0  # weight of the start value of the exponent, as a sum of squared logarithms
_DECAY = 0.97  # weight of a round after one more round
_MAX_POWER = 3.0
_FULL = 0.02  # share of the range; counts nearer to its ends say little about the number of tokens


class ExpertUse:
    """Predicts the distinct experts that a pass over text uses, from those that random tokens use.

    t tokens of text use as many experts as t^p random tokens. p is fitted to the counts of real
    passes by least squares with forgetting. It is below 1 where adjacent tokens choose the same
    experts. It is above 1 where a model is sure about texts and routes all random tokens alike.
    """

    def __init__(self, tokens: Sequence[int], experts: Sequence[float]) -> None:
        """Predict from counts of calibration.

        Args:
            tokens: tokens of the measured passes, ascending from 1.
            experts: distinct experts that each of them used. () means that experts were not
                counted.
        """
        self._tokens = tuple(tokens) if experts else ()
        # More tokens never use fewer experts.
        self._experts = tuple(max(experts[: i + 1]) for i in range(len(experts)))
        self.power = 1.0  # p
        self._squares = _PRIOR
        self._products = _PRIOR

    def of_random(self, tokens: float) -> float:
        """Return the distinct experts of a pass over random tokens; 0: they were not counted."""
        if len(self._tokens) < 2:
            return self._experts[0] if self._experts else 0.0
        tokens = min(max(tokens, self._tokens[0]), self._tokens[-1])
        at = max(bisect_left(self._tokens, tokens), 1)
        share = (tokens - self._tokens[at - 1]) / (self._tokens[at] - self._tokens[at - 1])
        return self._experts[at - 1] + share * (self._experts[at] - self._experts[at - 1])

    def of_text(self, tokens: float) -> float:
        """Return the expected distinct experts of a pass over text; 0: they were not counted."""
        return self.of_random(max(tokens, 1.0) ** self.power)

    def learn(self, tokens: float, experts: float) -> None:
        """Learn from a pass over `tokens` of text that used `experts` distinct ones, the mean over layers."""
        random_tokens = self._random_tokens(experts)
        if tokens <= 1 or random_tokens is None:
            return
        x, y = log(tokens), log(random_tokens)
        self._squares = _DECAY * self._squares + (1 - _DECAY) * _PRIOR + x * x
        self._products = _DECAY * self._products + (1 - _DECAY) * _PRIOR + x * y
        self.power = min(max(self._products / self._squares, 0.0), _MAX_POWER)

    def _random_tokens(self, experts: float) -> float | None:
        """Return the number of random tokens that use this number of experts, or None if it is unknown."""
        if len(self._tokens) < 2:
            return None
        low, high = self._experts[0], self._experts[-1]
        if high <= low or experts > high - _FULL * (high - low):
            return None  # nearly all experts are used, by any larger number of tokens
        if experts <= low:
            return float(self._tokens[0])
        at = bisect_left(self._experts, experts)
        share = (experts - self._experts[at - 1]) / (self._experts[at] - self._experts[at - 1])
        return self._tokens[at - 1] + share * (self._tokens[at] - self._tokens[at - 1])
