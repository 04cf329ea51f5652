"""Estimate acceptance from the margin of the draft's logits, with an online logistic regression.

A draft with a confidence head predicts log-odds of acceptance itself. They replace the margin, and
the regression corrects them for the current text and temperature.
"""

import math
from collections.abc import Sequence

from outrider.core.types import StopRule

_NUM_POSITIONS = 4  # positions with their own coefficients; later ones share the last
_INITIAL_WEIGHT = 0.9
_INITIAL_BIAS = 0.3
_PRIOR = ((8.0, 0.0), (0.0, 8.0))  # curvature of the initial coefficients
_DECAY = 0.998  # of the curvature, with each draft token
_MAX_MARGIN = 12.0
_TEXT_CURVATURE = 4.0  # prior of the bias of a text
_TEXT_DECAY = 0.95  # of the rest of its curvature, with each draft


class Confidence:
    """P(accepted | margin, ancestors accepted) = sigmoid(w m + b + t), with separate w and b for the first positions.

    w and b are those of all texts. The bias t of a text starts at 0: texts of a kind that the draft
    model has not learned show it after a few draft tokens.

    Each draft token moves w, b and t by a Newton step with a decayed curvature (online logistic
    regression, as an extended Kalman filter). The margin depends on the distribution of the draft
    and not on the sampled token, so stopping by it does not bias the output.
    """

    def __init__(self) -> None:
        self._coefficients = [[_INITIAL_WEIGHT, _INITIAL_BIAS] for _ in range(_NUM_POSITIONS)]
        # [a, b, c] of the curvature [[a, b], [b, c]]
        self._curvature = [[_PRIOR[0][0], _PRIOR[0][1], _PRIOR[1][1]] for _ in range(_NUM_POSITIONS)]
        self._texts: dict[int, list[float]] = {}  # by slot, the bias of its text, and its curvature

    def begin_text(self, slot: int) -> None:
        self._texts[slot] = [0.0, _TEXT_CURVATURE]

    def stop_rule(
        self, slots: Sequence[int], min_path_prob: float, min_draft_probs: tuple[float, ...], ends: tuple[int, ...]
    ) -> StopRule:
        """Return a `StopRule` for the texts in `slots`, with the mean of their biases, these limits and end tokens."""
        text_bias = sum(self._texts[slot][0] for slot in slots) / len(slots)
        return StopRule(
            weight=tuple(weight for weight, _ in self._coefficients),
            bias=tuple(bias + text_bias for _, bias in self._coefficients),
            min_path_prob=min_path_prob,
            min_draft_probs=min_draft_probs,
            ends=ends,
        )

    def learn(self, slot: int, tokens: Sequence[int], margins: Sequence[float], emitted: Sequence[int]) -> None:
        """Learn from the chain of the text in `slot` after the tokens `emitted` were committed."""
        text = self._texts[slot]
        # The prior returns as fast as drafts are forgotten.
        text[1] = _TEXT_CURVATURE + _TEXT_DECAY * (text[1] - _TEXT_CURVATURE)
        text[0] -= (1 - _TEXT_DECAY) * _TEXT_CURVATURE * text[0] / text[1]
        for position, (token, margin, emitted_token) in enumerate(zip(tokens, margins, emitted, strict=False)):
            clamped = min(max(margin, -_MAX_MARGIN), _MAX_MARGIN)
            self._step(text, min(position, _NUM_POSITIONS - 1), clamped, token == emitted_token)
            if token != emitted_token:
                return

    def _step(self, text: list[float], position: int, margin: float, accepted: bool) -> None:
        """Make a Newton step of the coefficients of a position, and of the bias and curvature of a text."""
        coefficients = self._coefficients[position]
        curvature = self._curvature[position]
        p = 1 / (1 + math.exp(-(coefficients[0] * margin + coefficients[1] + text[0])))
        weight = max(p * (1 - p), 1e-3)
        for i, term in enumerate((margin * margin, margin, 1.0)):
            prior = (_PRIOR[0][0], 0.0, _PRIOR[1][1])[i]
            curvature[i] = curvature[i] * _DECAY + weight * term + (1 - _DECAY) * prior
        a, b, c = curvature
        error = accepted - p
        determinant = a * c - b * b
        coefficients[0] += error * (c * margin - b) / determinant
        coefficients[1] += error * (a - b * margin) / determinant
        text[1] += weight
        text[0] += error / text[1]
