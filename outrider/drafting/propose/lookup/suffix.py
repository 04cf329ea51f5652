"""Draft a tree of what followed the longest suffix of the text earlier, in it and in past outputs.

After SuffixDecoding (Oliaro et al. 2024) and SAM-Decoding (Hu et al. 2024).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.core import tree
from outrider.core.proposer import Proposer, ProposerSetup, parse_count
from outrider.core.types import Batch, Draft, Needs, Request, Round, SequenceState
from outrider.drafting.propose.acceptance import TextAcceptance
from outrider.drafting.propose.lookup.source_text import source_text
from outrider.drafting.propose.lookup.suffix_history import History
from outrider.drafting.propose.lookup.suffix_text import SuffixIndex, suffix_index_factory
from outrider.drafting.propose.lookup.suffix_tree import ShareCalibration, SuffixDraft
from outrider.drafting.propose.tree_builder import build_draft
from outrider.errors import OutriderError

_MAX_HISTORY = 10**8  # tokens of past outputs; each takes about 120 bytes


class SuffixProposer:
    """Drafts what followed the longest known suffix of a sequence, in the sequence and in past outputs.

    The source of an encoder-decoder target counts as text before the sequence.

    A prompt is indexed in the rounds in which the target prefills it, so that a long prompt does
    not delay sequences that decode.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, *, history: int = 0) -> None:
        """Keep up to `history` tokens of finished outputs for later requests of the same scope."""
        self._device = setup.device
        self._history = History(history) if history else None
        self._make_index = suffix_index_factory(setup.kernels)
        self.indexes: dict[int, SuffixIndex] = {}  # by slot
        self._offsets: dict[int, int] = {}  # by slot: indexed tokens before those of the sequence
        self._seqs: dict[int, SequenceState] = {}  # by slot
        self._calibration = ShareCalibration()
        self._texts: dict[int, TextAcceptance] = {}  # by slot
        self._drafted: dict[int, SuffixDraft] = {}  # by slot, in this round

    def admit(self, slot: int, request: Request) -> None:
        index = self.indexes[slot] = self._make_index()
        index.extend(source_text(request))
        self._offsets[slot] = len(index)
        self._texts[slot] = TextAcceptance()

    def propose(self, batch: Batch) -> Draft:
        self._drafted = {}
        self._seqs.update((seq.slot, seq) for seq in batch.seqs)
        if not any(batch.draft_budget) and sum(map(len, batch.feed)) == len(batch.seqs):
            return tree.empty(len(batch.seqs), self._device)  # the next draft indexes these tokens
        for seq, start, feed, budget in zip(batch.seqs, batch.start, batch.feed, batch.draft_budget, strict=True):
            index = self.indexes[seq.slot]
            index.extend(seq.token_ids[len(index) - self._offsets[seq.slot] : start + len(feed)])
            self._drafted[seq.slot] = self._grow(seq, index, budget) if budget else SuffixDraft()
        return build_draft([self._drafted[seq.slot].builder for seq in batch.seqs], self._device)

    def commit(self, round: Round) -> None:
        for seq, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if drafted := self._drafted.get(seq.slot):
                self._calibration.learn(drafted, emitted)
                self._texts[seq.slot].learn(drafted.builder, emitted)
                if self._history:
                    self._history.mark_useful(drafted.outputs(emitted))

    def release(self, slot: int) -> None:
        self.indexes.pop(slot, None)
        self._offsets.pop(slot, None)
        self._texts.pop(slot, None)
        seq = self._seqs.pop(slot, None)
        # A preempted sequence has no slot any more, and continues later.
        if self._history and seq and seq.slot == slot:
            num_prompt_tokens = len(seq.request.prompt_token_ids)
            prompt = seq.token_ids[:num_prompt_tokens]
            self._learn(self._history, seq, prompt, seq.token_ids[num_prompt_tokens:])

    def bytes(self) -> int:
        """Return the memory of running sequences and of past outputs, in bytes."""
        indexes = sum(index.bytes() for index in self.indexes.values())
        return indexes + (self._history.bytes() if self._history else 0)

    def _scope(self, seq: SequenceState) -> str:
        """Return the part of the history that a sequence uses."""
        return seq.request.params.scope

    def _learn(self, history: History, seq: SequenceState, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Store the output of a sequence that has ended."""
        history.learn(self._scope(seq), prompt, output)

    def _grow(self, seq: SequenceState, index: SuffixIndex, budget: int) -> SuffixDraft:
        factor = self._texts[seq.slot].factor
        factors = array("d", [factor * each for each in self._calibration.factors])
        if self._history is None:
            return index.grow([], 0, factors, budget)
        continuations, matched = self._history.continuations(self._scope(seq), seq.token_ids, budget)
        return index.grow(continuations, matched, factors, budget)


def suffix_proposer(argument: str, setup: ProposerSetup) -> Proposer:
    """Make `suffix`, or `suffix:TOKENS` with a history of past outputs."""
    return SuffixProposer(setup, history=parse_history_size(argument))


def parse_history_size(argument: str) -> int:
    """Parse the tokens of `suffix:TOKENS`; 0 without an argument.

    Raises:
        OutriderError: the argument is not a number of tokens within the limit.
    """
    tokens = parse_count(argument or "0")
    if argument and not (tokens and tokens <= _MAX_HISTORY):
        raise OutriderError(
            f"suffix:{argument} is not a valid number of tokens; write suffix:100000 to keep 100000"
            f" tokens of past outputs, or another number up to {_MAX_HISTORY}"
        )
    return tokens or 0
