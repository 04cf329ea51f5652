"""How far to trust a draft: a logistic on the margin of its logits, learned from what became of its guesses.

A draft with a confidence head says by itself, in log-odds, how likely a guess is kept. That then stands for the margin,
and the logistic corrects it for this text and temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.types import StopRule

_KINDS = 4  # positions told apart; from the last on they fare alike
_WEIGHT, _BIAS = 0.9, 0.3  # the first estimate: a margin of 0 is a little more often right than wrong
_SURE = ((8.0, 0.0), (0.0, 8.0))  # the first estimate counts as so much curvature
_MEMORY = 0.998  # weight of a guess seen one guess earlier


class Confidence:
    """P(kept | margin, ancestors kept) = sigmoid(w m + b), with its own w and b for the first positions.

    Each guess moves w and b by a Newton step under the curvature that all guesses have left, older ones less and less:
    online logistic regression, as an extended Kalman filter has it. The margin is a property of the draft's
    distribution, not of what was drawn from it, so stopping by it does not bias what is sampled.
    """

    def __init__(self) -> None:
        self._theta = [[_WEIGHT, _BIAS] for _ in range(_KINDS)]
        self._curve = [[_SURE[0][0], _SURE[0][1], _SURE[1][1]] for _ in range(_KINDS)]  # [[a, b], [b, c]]

    def trust(self, keep: float, worth: tuple[float, ...], ends: tuple[int, ...]) -> StopRule:
        """As it stands, with when to stop (see `StopRule`)."""
        weight, bias = (tuple(theta[i] for theta in self._theta) for i in range(2))
        return StopRule(weight=weight, bias=bias, min_path_prob=keep, min_draft_probs=worth, ends=ends)

    def learn(self, tokens: Sequence[int], margins: Sequence[float], emitted: Sequence[int]) -> None:
        """From what became of a row's chain when these tokens were emitted; what nobody looked at teaches nothing."""
        for position, (token, margin, truth) in enumerate(zip(tokens, margins, emitted, strict=False)):
            self._step(min(position, _KINDS - 1), min(max(margin, -12.0), 12.0), token == truth)
            if token != truth:
                return

    def _step(self, kind: int, margin: float, kept: bool) -> None:
        theta, curve = self._theta[kind], self._curve[kind]
        p = 1 / (1 + math.exp(-(theta[0] * margin + theta[1])))
        weight = max(p * (1 - p), 1e-3)
        for i, term in enumerate((margin * margin, margin, 1.0)):
            curve[i] = curve[i] * _MEMORY + weight * term + (1 - _MEMORY) * (_SURE[0][0], 0.0, _SURE[1][1])[i]
        a, b, c = curve
        surprise, det = kept - p, a * c - b * b
        theta[0] += surprise * (c * margin - b) / det
        theta[1] += surprise * (a - b * margin) / det
