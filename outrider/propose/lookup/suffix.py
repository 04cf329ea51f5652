"""What followed where a text ended like this, in itself and in finished ones, as a tree.

After SuffixDecoding (Oliaro et al. 2024) and SAM-Decoding (Hu et al. 2024).
"""

from __future__ import annotations

from outrider.core.types import Batch, Draft, Needs, Request, Round, SequenceState
from outrider.errors import OutriderError
from outrider.propose.base import Proposer, ProposerSetup, whole
from outrider.propose.lookup.suffix_history import History
from outrider.propose.lookup.suffix_text import Text, text_maker
from outrider.propose.lookup.suffix_tree import Guessed, Worth
from outrider.propose.tree_builder import picked

_MOST = 10**8  # tokens of finished outputs; each takes about 120 bytes


class SuffixProposer:
    """Goes on as the text did where its longest known ending stood, and as outputs did that agree with it longest.

    A text is read in the rounds in which the target reads it, so that no long prompt holds up those who decode.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, *, history: int = 0) -> None:
        """Keep up to `history` tokens of finished outputs for later requests of the same scope."""
        self._device = setup.device
        self._history = History(history) if history else None
        self._make = text_maker(setup.kernels)
        self._texts: dict[int, Text] = {}
        self._rows: dict[int, SequenceState] = {}
        self._worth = Worth()
        self._open: dict[int, Guessed] = {}  # by slot: this round's guesses

    def admit(self, slot: int, request: Request) -> None:
        self._texts[slot] = self._make()

    def propose(self, batch: Batch) -> Draft:
        ends = (start + len(feed) for start, feed in zip(batch.start, batch.feed, strict=True))
        self._open = {}
        for row, end, budget in zip(batch.seqs, ends, batch.draft_budget, strict=True):
            self._rows[row.slot] = row
            text = self._texts[row.slot]
            text.extend(row.token_ids[len(text) : end])
            self._open[row.slot] = self._grow(row, text, budget) if budget else Guessed()
        return picked([self._open[row.slot].sketch for row in batch.seqs], self._device)

    def commit(self, round: Round) -> None:
        for row, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if grown := self._open.get(row.slot):
                self._worth.learn(grown, emitted)
                if self._history:
                    self._history.used(grown.outputs(emitted))

    def release(self, slot: int) -> None:
        self._texts.pop(slot, None)
        row = self._rows.pop(slot, None)
        if self._history and row and row.slot == slot:  # else it has given way, and goes on later
            begin = len(row.request.prompt_token_ids)
            self._history.learn(row.request.params.scope, row.token_ids[:begin], row.token_ids[begin:])

    def bytes(self) -> int:
        """Memory of the running texts and of finished outputs, in bytes."""
        texts = sum(text.bytes() for text in self._texts.values())
        return texts + (self._history.bytes() if self._history else 0)

    def _grow(self, row: SequenceState, text: Text, budget: int) -> Guessed:
        ways, agreed = self._history.ways(row.request.params.scope, row.token_ids, budget) if self._history else ([], 0)
        return text.grow(ways, agreed, self._worth.of, budget)


def suffix_proposer(argument: str, setup: ProposerSetup) -> Proposer:
    """From what stands behind the colon: how many tokens of finished outputs to keep."""
    return SuffixProposer(setup, history=suffix_history(argument))


def suffix_history(argument: str) -> int:
    """How many tokens of finished outputs to keep, 0 where nobody says.

    Raises:
        OutriderError: it is no such number.
    """
    history = whole(argument or "0")
    if argument and not (history and history <= _MOST):
        raise OutriderError(
            f"suffix:{argument} is no number of tokens; write suffix:100000 to keep so many tokens of finished outputs,"
            f" {_MOST} at most"
        )
    return history or 0
