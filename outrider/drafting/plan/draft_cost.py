"""The time of drafting, learned from rounds: a fixed part, and a part for each draft token."""

from __future__ import annotations

_DECAY = 0.95  # of the sums, per round
_ROUND_WEIGHT = 1.0  # weight of the prior of `per_round`, in rounds
_TOKEN_WEIGHT = 50.0  # weight of the prior of `per_token`, in rounds of one draft token
_MIN_PER_TOKEN = 0.25


class DraftCost:
    """drafted = per_round + per_token * depth, in passes of the draft model.

    A draft token takes one pass, whose time is measured. The model's other work in a round, such as
    preparing inputs and the lookups of a combination, counts once per round. Both numbers are
    fitted by least squares with forgetting. The prior of `per_token` is strong, because rounds of
    equal depth do not tell them apart.
    """

    def __init__(self, per_round: float = 0.0, per_token: float = 1.0) -> None:
        """Begin with these values, which are also the prior."""
        self.per_round = per_round
        self.per_token = per_token
        self._prior = (per_round, per_token)
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, depth, depth^2, drafted, depth * drafted

    def of(self, depth: float) -> float:
        """Return the time of a draft."""
        return self.per_round + self.per_token * depth

    def learn(self, depth: float, drafted: float, rounds: int) -> None:
        """Learn from `rounds` of this mean depth, which took `drafted` on average."""
        terms = (1.0, depth, depth * depth, drafted, depth * drafted)
        decay = _DECAY**rounds
        self._sums = tuple(decay * total + rounds * term for total, term in zip(self._sums, terms, strict=True))  # type: ignore[assignment]
        count, x, xx, y, xy = self._sums
        count += _ROUND_WEIGHT
        xx += _TOKEN_WEIGHT
        y += _ROUND_WEIGHT * self._prior[0]
        xy += _TOKEN_WEIGHT * self._prior[1]
        determinant = count * xx - x * x
        self.per_token = max((count * xy - x * y) / determinant, _MIN_PER_TOKEN)
        self.per_round = max((y - self.per_token * x) / count, 0.0)
