"""A draft model of another tokenizer goes on with the text itself (Timor et al. 2025, string-level exact match)."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from operator import eq, mul

from outrider.cache.base import prompts_that_fit
from outrider.core import tree
from outrider.core.types import Batch, Draft, Needs, Request, Round, SequenceState
from outrider.models.base import Target
from outrider.propose.acceptance import AcceptanceEstimator
from outrider.propose.base import ProposerSetup
from outrider.propose.tree_builder import TreeBuilder, picked
from outrider.propose.vocabulary.retokenize import Retokenizer
from outrider.propose.vocabulary.token_text import TokenText, counterparts

_log = logging.getLogger("outrider")
_PIECE = 1024  # tokens of a text read in one round: those who decode beside it wait for no more
_DEEP = 4  # from this guess on they fare alike
_HOPE = 0.6  # that a guess is kept, before any has been seen


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    """One row's part in a round."""

    at: int  # which row of the batch
    row: SequenceState  # in the draft's ids
    start: int  # how many of them are cached
    feed: tuple[int, ...]
    steps: int  # tokens that the draft is to grow; 0 while it still reads
    grown: list[int]
    sketch: TreeBuilder
    kinds: list[Hashable]


class TextProposer:
    """Runs a draft model over its own tokenization of the text, and guesses what the target's makes of what it says.

    The guesses are picked, never drawn, so they are exact whatever the tokenizers are; the walk keeps most of them. The
    draft's cache holds ids that no more text can change: the last word, which may be cut otherwise once it goes on, is
    fed anew each round. Where a text ends within a character nothing is guessed.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, model: Target, *, target: TokenText, draft: TokenText) -> None:
        """Let `model`, whose ids spell as `draft` says, guess for a target whose ids spell as `target` says."""
        self._setup, self._model = setup, model
        self._target, self._draft = target, draft
        self._shared = counterparts(target, draft)
        self._special = {self._shared[id]: id for id in target.special if self._shared[id] >= 0}
        self._readings: dict[int, Retokenizer] = {}
        self._rows: dict[int, SequenceState] = {}  # the same texts in the draft's ids
        self._chances = AcceptanceEstimator()
        self._turns: list[_Turn] = []  # of this round
        self._told = False

    def admit(self, slot: int, request: Request) -> None:
        self._readings[slot] = Retokenizer(self._target, self._draft, self._shared)
        self._rows[slot] = SequenceState(request=request, slot=slot, token_ids=[])
        self._model.cache.admit(slot, ())

    def propose(self, batch: Batch) -> Draft:
        turns = self._able([turn for b in range(len(batch.seqs)) if (turn := self._turn(batch, b))])
        self._read([turn for turn in turns if not turn.steps])
        self._turns = [turn for turn in turns if turn.steps]
        sketches = [TreeBuilder() for _ in batch.seqs]
        if self._turns:
            grown = self._model.draft_greedy(_batch(self._turns), self._model.vocab).tokens.tolist()
            for turn, ids in zip(self._turns, grown, strict=True):
                turn.grown = ids[: turn.steps]
                self._guess(turn, batch.draft_budget[turn.at])
                sketches[turn.at] = turn.sketch
        return picked(sketches, self._setup.device)

    def commit(self, round: Round) -> None:
        turns, self._turns = self._turns, []
        if not turns:
            return
        ours, draft, paths = _batch(turns), _chain(turns, self._model), []
        for turn in turns:
            emitted = round.emitted[turn.at]
            self._chances.learn(turn.sketch, turn.kinds, emitted)
            reading = self._readings[turn.row.slot]
            reading.push(emitted)
            # The last token is left for the next pass to feed, as ever.
            settled = reading.settled[turn.start : len(reading.settled) - (not reading.tail)]
            # What was grown last has come out of a pass and been in none.
            same = map(eq, [*turn.feed, *turn.grown[:-1]], settled)
            kept = sum(takewhile(bool, same))
            paths.append(tuple(range(kept - len(turn.feed))))
            turn.feed = turn.feed[:kept]
        kept_batch = replace(ours, feed=tuple(turn.feed for turn in turns))
        self._model.cache.commit(replace(round, batch=kept_batch, draft=draft, path=tuple(paths)))

    def release(self, slot: int) -> None:
        self._readings.pop(slot, None)
        self._rows.pop(slot, None)
        self._model.cache.release(slot)

    @property
    def model(self) -> Target:
        """The draft model."""
        return self._model

    def _turn(self, batch: Batch, b: int) -> _Turn | None:
        """What the draft is to do for a row; None where there is nothing to guess."""
        slot, text, budget = batch.seqs[b].slot, batch.seqs[b].token_ids, batch.draft_budget[b]
        if not budget:
            return None
        reading, row = self._readings[slot], self._rows[slot]
        reading.push(text[reading.count :])
        row.token_ids = reading.ids()
        start, room = self._model.cache.length(slot), self._model.context - len(row.token_ids)
        steps = max(round(budget * len(row.token_ids) / len(text)), 1)  # going by the text so far
        if room < steps and not self._told:
            self._told = True
            _log.warning("the draft model's context of %d tokens is full; going on without it", self._model.context)
        if room < 1 or not reading.whole or start >= len(row.token_ids):
            return None
        if start + _PIECE < len(reading.settled):
            stop, steps = start + _PIECE, 0
        else:
            stop, steps = len(row.token_ids), min(steps, room)
        feed = tuple(row.token_ids[start:stop])
        return _Turn(at=b, row=row, start=start, feed=feed, steps=steps, grown=[], sketch=TreeBuilder(), kinds=[])

    def _able(self, turns: Sequence[_Turn]) -> list[_Turn]:
        """Those whose texts and guesses the draft's cache has memory for."""
        wanted = {turn.row.slot: turn.start + len(turn.feed) + turn.steps for turn in turns}
        able = prompts_that_fit(self._model.cache, {}, wanted)
        return [turn for turn in turns if turn.row.slot in able]

    def _read(self, turns: Sequence[_Turn]) -> None:
        """Feed what is settled and long."""
        if turns:
            batch, none = _batch(turns), tree.empty(len(turns), self._model.device)
            self._model.cache.commit(tree.prefill_round(batch, none, self._model.score(batch, none)))

    def _guess(self, turn: _Turn, budget: int) -> None:
        """Make the turn's sketch of what was grown."""
        said, ending = b"", None
        for id in turn.grown:
            piece = self._draft.pieces[id] if id < len(self._draft.pieces) else b""
            if not piece:
                ending = self._special.get(id)
                break
            said += piece
        text = _whole(said)
        tokens = self._retold(self._readings[turn.row.slot].tail, text)
        if ending is not None and len(text.encode()) == len(said):
            tokens.append(ending)
        tokens = list(takewhile(lambda token: token < self._setup.vocab, tokens[:budget]))
        # The last one may be the beginning of a longer token, of which the rest was not said.
        turn.kinds = [(min(i, _DEEP), i == len(tokens) - 1) for i in range(len(tokens))]
        chances = accumulate((self._chances.of(kind, _HOPE) for kind in turn.kinds), mul)
        turn.sketch = TreeBuilder(tokens, list(range(-1, len(tokens) - 1)), list(chances))

    def _retold(self, tail: str, said: str) -> list[int]:
        """What the draft said in the target's ids, where `tail` stands before it."""
        (ids,) = self._target.encode([tail + said])
        border, length = len(tail.encode()), 0
        for i, id in enumerate(ids):
            if length == border:
                return ids[i:]
            length += len(self._target.pieces[id])
        return self._target.encode([said])[0]  # a token would reach across, but the text before is what it is


def _batch(turns: Sequence[_Turn]) -> Batch:
    return Batch(
        seqs=tuple(turn.row for turn in turns),
        start=tuple(turn.start for turn in turns),
        feed=tuple(turn.feed for turn in turns),
        draft_budget=tuple(turn.steps for turn in turns),
    )


def _chain(turns: Sequence[_Turn], model: Target) -> Draft:
    size = max(turn.steps for turn in turns)
    tokens = [turn.grown + [0] * (size - turn.steps) for turn in turns]
    return tree.chain(tree.upload(tokens, model.device), tuple(turn.steps for turn in turns))


def _whole(said: bytes) -> str:
    """As much of it as is whole characters."""
    try:
        return said.decode()
    except UnicodeDecodeError as error:
        return said[: error.start].decode()
