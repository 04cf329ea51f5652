"""Prefills of a draft model. It must process all tokens of a sequence before it drafts."""

from __future__ import annotations

from outrider.core.types import Batch, SequenceState
from outrider.drafting.plan.pass_cost import Clock
from outrider.drafting.plan.proposer_stats import ProposerStats
from outrider.drafting.plan.round_load import RoundLoad

_LENGTH_RATE = 0.1  # weight of the last completion in the mean output length


class Prefills:
    """Knows which requests the draft model in use has prefilled, and which ones are not worth a prefill."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.prefilled: frozenset[int] = frozenset()  # ids of requests
        self.excluded: frozenset[int] = frozenset()  # requests that are not worth a prefill
        self.seqs: tuple[SequenceState, ...] = ()  # of the last decision
        self._output_length = 0.0  # recent mean; 0: no completion has ended yet

    def see(self, seqs: tuple[SequenceState, ...]) -> None:
        """Take the sequences of the next decision. Learn how long outputs are from those that have ended."""
        for seq in self.seqs:
            if seq.finish_reason:
                rate = _LENGTH_RATE if self._output_length else 1.0
                self._output_length += (seq.num_output_tokens - self._output_length) * rate
        self.seqs = seqs

    def keep(self, ids: frozenset[int]) -> None:
        """Forget all prefilled requests except these."""
        self.prefilled &= ids

    def exclude(
        self,
        proposer: ProposerStats,
        gain: float,
        batch: Batch,
        load: RoundLoad,
        *,
        prefilled: frozenset[int],
        margin: int,
    ) -> bool:
        """Exclude requests whose prefill takes longer than speculation saves. Return whether any request remains.

        Args:
            proposer: the alternative with the draft model.
            gain: its expected speedup.
            batch: the next round.
            load: of the next round.
            prefilled: requests that need no prefill.
            margin: factor of the prefill time.
        """
        excluded = set()
        remains = False
        for seq, count, cached in zip(batch.seqs, batch.draft_budget, batch.start, strict=True):
            if not count:
                continue
            seconds = 0.0 if seq.request.id in prefilled else proposer.prefill_seconds(1, cached)
            if self._seconds_saved(gain, 1 + count, load) < margin * seconds:
                excluded.add(seq.request.id)
            else:
                remains = True
        self.excluded = frozenset(excluded)
        # Requests without a budget are at their last token. They do not end speculation for the next texts.
        return remains or not excluded

    def limit(self, batch: Batch, budget: tuple[int, ...]) -> tuple[int, ...]:
        """Return the draft budgets without those of excluded requests."""
        if not self.excluded:
            return budget
        pairs = zip(batch.seqs, budget, strict=True)
        return tuple(0 if seq.request.id in self.excluded else count for seq, count in pairs)

    def begin(self, proposer: ProposerStats, batch: Batch, budget: tuple[int, ...]) -> float:
        """Record the prefills of a round with these budgets. Return their expected seconds."""
        seconds = 0.0
        for seq, cached, count in zip(batch.seqs, batch.start, budget, strict=True):
            if count and seq.request.id not in self.prefilled:
                seconds += proposer.prefill_seconds(1, cached)
        self.prefilled |= {seq.request.id for seq, count in zip(batch.seqs, budget, strict=True) if count}
        return seconds

    def repays(self, proposer: ProposerStats, gain: float, load: RoundLoad) -> bool:
        """Return whether speculation saves twice the prefill of one sequence."""
        seconds = proposer.prefill_seconds(1, load.cached)
        return not seconds or self._seconds_saved(gain, load.remaining_tokens, load) > 2 * seconds

    def _seconds_saved(self, gain: float, max_tokens: float, load: RoundLoad) -> float:
        """Return the expected time that speculation saves until a sequence ends, after at most `max_tokens` tokens."""
        plain = self._clock.verify(load.seqs, 0, cached=load.cached) / load.seqs
        tokens = min(max_tokens, self._output_length or max_tokens / 4)
        return tokens * plain * (1 - 1 / max(gain, 1.0))
