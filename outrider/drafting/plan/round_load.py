"""What a round of the engine processes besides draft tokens."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.types import Batch

_START_TOKENS = 16  # output tokens that are the beginning of a text


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLoad:
    """The size of a round, without draft tokens."""

    seqs: int  # decoding sequences
    total_seqs: int  # decoding sequences once all prompts are prefilled
    prompt_tokens: int  # tokens of prompts in the pass
    cached: float  # mean number of cached tokens per sequence
    remaining_tokens: float  # mean number of tokens that a sequence can still emit
    at_start: bool  # whether all sequences are at the beginning of their texts

    @classmethod
    def of(cls, batch: Batch) -> RoundLoad:
        """Return the load of a batch."""
        decoding = sum(batch.emits)
        return cls(
            seqs=decoding,
            total_seqs=len(batch.seqs) + batch.num_waiting,
            prompt_tokens=sum(map(len, batch.feed)) - decoding,
            cached=sum(batch.start) / len(batch.start),
            remaining_tokens=1 + sum(batch.draft_budget) / max(decoding, 1),
            at_start=all(seq.num_output_tokens < _START_TOKENS for seq in batch.seqs),
        )

    def same_size(self, other: RoundLoad) -> bool:
        """Return whether both have the same number of sequences."""
        return self.seqs == other.seqs and self.total_seqs == other.total_seqs
