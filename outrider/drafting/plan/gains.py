"""The expected speedup of each alternative of a proposer, and the draft length that reaches it."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from outrider.drafting.plan.pass_cost import Clock
from outrider.drafting.plan.proposer_stats import ProposerStats
from outrider.drafting.plan.round_load import RoundLoad

START_GAIN = 1.05  # expected speedup from which speculation starts
_FREE_GAIN = 0.99  # the same for a proposer without a draft model, whose draft costs almost nothing
_CONTINUE_GAIN_TRIMMED = 1.0  # speedup from which a draft model continues, if it estimates acceptance probabilities
_CONTINUE_GAIN = 1.02  # the same for other draft models
_CONTEXT_STEP = 128  # cached tokens that change the best draft length


class Gains:
    """Computes speedups over plain decoding from acceptance and pass times. It keeps results until `forget`."""

    def __init__(self, proposers: Sequence[ProposerStats], clock: Clock) -> None:
        self._proposers = proposers
        self._clock = clock
        self._best_lengths: dict[tuple[int, int, int], tuple[int, float]] = {}

    def forget(self) -> None:
        """Drop kept results, because acceptance or pass times have changed."""
        self._best_lengths.clear()

    def expected(self, alternative: int, load: RoundLoad) -> float:
        """Return the expected speedup, the lower one of now and of when all prompts are prefilled.

        At the start of a text it is that of whole texts.
        """
        if load.at_start and (text_gain := self._proposers[alternative].text_gain) is not None:
            return text_gain
        return min(self._best(alternative, seqs, load.cached)[1] for seqs in {load.seqs, load.total_seqs})

    def steady(self, alternative: int, load: RoundLoad) -> float:
        """Return the geometric mean of the speedups now and over whole texts.

        An easy or hard passage ends soon. The speedup now alone makes drafts too short in easy ones.
        """
        gain = self.expected(alternative, load)
        text_gain = self._proposers[alternative].text_gain
        return gain if text_gain is None else sqrt(gain * text_gain)

    def best_length(self, alternative: int, load: RoundLoad) -> int:
        """Return the draft length with the highest speedup now."""
        return self._best(alternative, load.seqs, load.cached)[0]

    def lasting_length(self, alternative: int, load: RoundLoad) -> int:
        """Return the lower one of the best draft lengths now and when all prompts are prefilled."""
        return min(self._best(alternative, seqs, load.cached)[0] for seqs in {load.seqs, load.total_seqs})

    def required(self, alternative: int, *, in_use: bool) -> float:
        """Return the speedup from which an alternative is used."""
        proposer = self._proposers[alternative]
        if proposer.costs.draft is None:
            return _FREE_GAIN if proposer.estimates_acceptance else START_GAIN
        if not in_use:
            return START_GAIN
        return _CONTINUE_GAIN_TRIMMED if proposer.estimates_acceptance else _CONTINUE_GAIN

    def _best(self, alternative: int, seqs: int, cached: float) -> tuple[int, float]:
        """Return the best draft length and its speedup."""
        key = (alternative, seqs, int(cached) // _CONTEXT_STEP)
        if key not in self._best_lengths:
            self._best_lengths[key] = self._proposers[alternative].best_length(seqs, cached, self._clock)
        return self._best_lengths[key]
