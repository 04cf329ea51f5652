"""Weigh the time that draft tokens cost in a round against the time that they save."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from outrider.drafting.plan.pass_cost import Clock
from outrider.drafting.plan.proposer_stats import ProposerStats
from outrider.drafting.plan.round_load import RoundLoad
from outrider.drafting.plan.speedup import expected_tau


class Thresholds(NamedTuple):
    """The acceptance probabilities from which a draft token pays, as in `DraftBudget`."""

    min_path_prob: float = 0.0
    min_draft_probs: tuple[float, ...] = ()


class DraftPricing:
    """Compares the expected output tokens of a draft with the seconds that it adds to a round."""

    def __init__(self, clock: Clock, *, padded: bool = False) -> None:
        """`padded`: whether a pass takes as long as if all sequences had the longest draft of the batch."""
        self._clock = clock
        self._padded = padded
        self._token_seconds = 0.0  # time of an output token at the current speed, without prompts

    def set_speed(self, load: RoundLoad, gain: float) -> None:
        """Value an output token at its time with this speedup over plain decoding."""
        plain = self._clock.verify(load.seqs, 0, cached=load.cached)
        self._token_seconds = plain / (load.seqs * max(gain, 1.0))

    def thresholds(self, proposer: ProposerStats, load: RoundLoad, *, in_trial: bool) -> Thresholds:
        """Return the probabilities from which a draft token is worth its time.

        `min_path_prob` counts its time in the target's pass, `min_draft_probs` also that of a pass of the draft model.
        """
        if not proposer.trims(load.seqs):
            return Thresholds()
        verify = self._added_seconds(load.seqs * (1 + proposer.nodes) + load.prompt_tokens, load) / self._token_seconds
        # In a trial few sequences draft. Price their tokens as if all did.
        drafting = (load.seqs if in_trial else seqs for seqs in range(1, load.seqs + 1))
        draft = (proposer.draft_seconds(seqs, load.cached) / self._token_seconds for seqs in drafting)
        return Thresholds(min(verify, 1.0), tuple(verify + cost for cost in draft))

    def pass_tokens(self, widths: Sequence[int]) -> int:
        """Return the draft tokens of a pass, with those that pad the shorter drafts if drafts are padded."""
        return len(widths) * max(widths) if self._padded else sum(widths)

    def profitable_widths(self, accept_probs: Sequence[Sequence[float]], load: RoundLoad) -> tuple[int, ...]:
        """Return how many draft tokens each sequence keeps. The most likely tokens across the batch come first.

        If drafts are padded, all sequences may keep the same number.
        """
        if self._padded:
            columns = zip_longest(*(sorted(probs, reverse=True) for probs in accept_probs), fillvalue=0.0)
            length = self._profitable_steps(list(map(sum, columns)), load.seqs, load)
            return tuple(min(len(probs), length) for probs in accept_probs)
        order = sorted((-prob, b) for b, probs in enumerate(accept_probs) for prob in probs)
        count = self._profitable_steps([-negative_prob for negative_prob, _ in order], 1, load)
        widths = [0] * len(accept_probs)
        for _, b in order[:count]:
            widths[b] += 1
        return tuple(widths)

    def _profitable_steps(self, gains: Sequence[float], tokens: int, load: RoundLoad) -> int:
        """Return how many steps pay. Step i adds `tokens` draft tokens to a pass, and `gains[i]` output tokens."""
        first = load.seqs + load.prompt_tokens
        plain = self._clock.at(first, seqs=load.seqs, cached=load.cached)
        best_profit = self._clock.extra
        best_steps = 0
        gained = 0.0
        for steps, gain in enumerate(gains, 1):
            gained += gain * self._token_seconds
            profit = gained - (self._clock.at(first + steps * tokens, seqs=load.seqs, cached=load.cached) - plain)
            if profit > best_profit:
                best_profit = profit
                best_steps = steps
        return best_steps

    def length_with_prompts(self, proposer: ProposerStats, load: RoundLoad, max_length: int) -> int:
        """Return the draft length that pays in a round that also prefills prompts.

        The prompts take their time anyway. A draft token pays if its expected output is worth more
        than what it adds.
        """
        seqs, cached = load.seqs, load.cached

        def profit(k: int) -> float:
            seconds = self._clock.verify(seqs, k, cached=cached, feed=load.prompt_tokens)
            seconds += proposer.costs.propose(seqs, k, cached=cached)
            return self._token_seconds * seqs * expected_tau(proposer.acceptance[:k]) - seconds

        return max(range(max_length + 1), key=profit)

    def _added_seconds(self, tokens: float, load: RoundLoad) -> float:
        """Return the time that one more token adds to a pass of `tokens` tokens."""
        plain_tokens = min(load.seqs + load.prompt_tokens, tokens)
        speculative = self._clock.at(max(tokens, plain_tokens + 1), seqs=load.seqs, cached=load.cached)
        plain = self._clock.at(plain_tokens, seqs=load.seqs, cached=load.cached)
        return max(speculative - plain, 0.0) / max(tokens - plain_tokens, 1.0)
