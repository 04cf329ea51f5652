"""The rules of timestamps in a transcript (Radford et al. 2022, section 2.3), for every node of a draft tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

SECONDS_PER_TIMESTAMP = 0.02  # between two timestamp tokens that follow each other in the vocabulary


class OutputEnd(NamedTuple):
    """The facts about an output that the rules need."""

    length: int  # tokens, counted up to 2
    last: bool  # whether the last token is a timestamp
    before_last: bool  # whether the token before it is one
    latest: int | None  # the last timestamp; None: there is none


class AllowedTokens(NamedTuple):
    """The tokens that may follow an output, as ranges of ids."""

    text: int  # the first id of other tokens than timestamps; at least `begin`: none
    timestamps: int  # the first id of timestamps
    stop: int  # the id after the last timestamp


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampRules:
    """Which tokens a transcript with timestamps may hold, as `WhisperTimeStampLogitsProcessor` of transformers says.

    A transcript begins with a timestamp. Timestamps come in pairs, the end of a segment and the
    beginning of the next one, and never fall. If all timestamps together are likelier than the
    likeliest other token, one of them follows. The rules read the logits and the tokens before, so
    they are a part of the distribution of the model, and hold for draft tokens as for others.
    """

    begin: int  # the token of 0.00 s; all tokens from there on are timestamps
    end_of_text: int  # tokens below it are text
    no_timestamps: int  # the token that switches timestamps off
    max_initial: int | None  # the latest first timestamp, in steps of 0.02 s; None: any

    def end_of(self, output: Sequence[int]) -> OutputEnd:
        """Return the end of an output."""
        latest = next((token for token in reversed(output) if token >= self.begin), None)
        return OutputEnd(
            length=min(len(output), 2),
            last=len(output) > 0 and output[-1] >= self.begin,
            before_last=len(output) > 1 and output[-2] >= self.begin,
            latest=latest,
        )

    def extend(self, end: OutputEnd, token: int) -> OutputEnd:
        """Return the end of an output after one more token."""
        is_timestamp = token >= self.begin
        return OutputEnd(
            length=min(end.length + 1, 2),
            last=is_timestamp,
            before_last=end.last,
            latest=token if is_timestamp else end.latest,
        )

    def allowed(self, end: OutputEnd, vocab: int) -> AllowedTokens:
        """Return what may follow an output, in a vocabulary of this size."""
        if not end.length:
            stop = vocab if self.max_initial is None else min(self.begin + self.max_initial + 1, vocab)
            return AllowedTokens(text=self.begin, timestamps=self.begin, stop=stop)
        opened = end.last and (end.length == 1 or end.before_last)
        if opened:  # text follows
            return AllowedTokens(text=0, timestamps=vocab, stop=vocab)
        if end.last:  # the end of a segment: the beginning of the next one follows, or the end of the text
            assert end.latest is not None
            return AllowedTokens(text=self.end_of_text, timestamps=end.latest, stop=vocab)
        return AllowedTokens(text=0, timestamps=self.begin if end.latest is None else end.latest + 1, stop=vocab)

    def mask(self, logits: torch.Tensor, ends: Sequence[OutputEnd]) -> torch.Tensor:
        """Return logits [K, V] in which tokens that may not follow have -inf.

        Args:
            logits: [K, V], in which the tokens that the model suppresses have -inf.
            ends: [K] the outputs that the logits follow; K may be 0.
        """
        if not ends:
            return logits
        vocab = logits.shape[-1]
        allowed = torch.tensor([self.allowed(end, vocab) for end in ends], device=logits.device)
        text, first, stop = allowed[:, :, None].unbind(1)
        ids = torch.arange(vocab, device=logits.device)
        is_timestamp = ids >= self.begin
        forbidden = torch.where(is_timestamp, (ids < first) | (ids >= stop), ids < text)
        forbidden |= ids == self.no_timestamps
        masked = logits.masked_fill(forbidden, -torch.inf)
        timestamps = masked[:, self.begin :].logsumexp(-1)
        best_text = masked[:, : self.begin].amax(-1)
        return masked.masked_fill(~is_timestamp & (timestamps > best_text)[:, None], -torch.inf)
