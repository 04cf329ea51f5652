"""Estimates acceptance from the margin of the draft's logits, with an online logistic regression.

A draft with a confidence head states log-odds of acceptance itself. They replace the margin, and the regression
corrects them for the current text and temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.types import StopRule

_KINDS = 4  # positions with their own coefficients; later ones share the last
_WEIGHT, _BIAS = 0.9, 0.3  # initial coefficients
_SURE = ((8.0, 0.0), (0.0, 8.0))  # weight of the initial coefficients
_MEMORY = 0.998  # decay per draft token


class Confidence:
    """P(accepted | margin, ancestors accepted) = sigmoid(w m + b), with separate w and b for the first positions.

    Each draft token moves w and b by a Newton step with a decayed curvature (online logistic regression, as an extended
    Kalman filter). The margin depends on the distribution of the draft and not on the sampled token, so stopping by it
    does not bias the output.
    """

    def __init__(self) -> None:
        self._theta = [[_WEIGHT, _BIAS] for _ in range(_KINDS)]
        self._curve = [[_SURE[0][0], _SURE[0][1], _SURE[1][1]] for _ in range(_KINDS)]  # [[a, b], [b, c]]

    def trust(self, keep: float, worth: tuple[float, ...], ends: tuple[int, ...]) -> StopRule:
        """Return the current coefficients as a `StopRule`."""
        weight, bias = (tuple(theta[i] for theta in self._theta) for i in range(2))
        return StopRule(weight=weight, bias=bias, min_path_prob=keep, min_draft_probs=worth, ends=ends)

    def learn(self, tokens: Sequence[int], margins: Sequence[float], emitted: Sequence[int]) -> None:
        """Learn from the chain of a sequence after the tokens `emitted` were committed."""
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
