"""Draft with a model of another tokenizer by passing text (Timor et al. 2025, string-level exact match)."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from operator import eq, mul

from outrider.core import tree
from outrider.core.cache import prompts_that_fit
from outrider.core.proposer import ProposerSetup, delays_first_token
from outrider.core.target import Target
from outrider.core.token_text import TokenText
from outrider.core.types import Batch, Draft, DraftBudget, Needs, Request, Round, SequenceState
from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.draft_model.window import find_window
from outrider.drafting.propose.tree_builder import TreeBuilder, build_draft
from outrider.drafting.propose.vocabulary.counterparts import counterparts
from outrider.drafting.propose.vocabulary.retokenize import Retokenizer

_log = logging.getLogger("outrider")
# Most tokens of a sequence that are prefilled in one round, so that decoding sequences do not wait
# long.
_PREFILL_CHUNK = 1024
_MAX_DEPTH = 4  # deeper draft tokens share their acceptance statistics
_PRIOR = 0.6  # acceptance of a draft token before any has been verified


@dataclass(slots=True, kw_only=True, eq=False)
class _DraftPass:
    """The draft model's work for one sequence in a round."""

    index: int  # of the sequence in the target's batch
    seq: SequenceState  # in the draft model's ids
    start: int  # cached tokens
    feed: tuple[int, ...]
    steps: int  # tokens that the draft model drafts; 0 during prefill
    drafted: list[int]  # in the draft model's ids
    builder: TreeBuilder  # in the target's ids
    kinds: list[Hashable]


class TextProposer:
    """Runs a draft model on its own tokens of the text, and tokenizes its draft again for the target.

    Draft tokens are greedy, not sampled, so they are exact for any pair of tokenizers. The verifier
    `walk` accepts most of them.

    The draft model's KV cache holds only tokens that no further text can change. The last word may
    be tokenized otherwise once it continues, so it is fed again in each round. There is no draft
    while a text ends within a character.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, model: Target, *, target: TokenText, draft: TokenText) -> None:
        """Draft with `model`. `target` and `draft` are the texts of the tokens of both models."""
        self._setup = setup
        self._model = model
        self._window = find_window(model)
        self._target = target
        self._draft = draft
        self._shared = counterparts(target, draft)
        # The target's special tokens, by the draft's id.
        self._special = {self._shared[id]: id for id in target.special if self._shared[id] >= 0}
        self._retokenizers: dict[int, Retokenizer] = {}  # by slot
        self._seqs: dict[int, SequenceState] = {}  # by slot, in the draft model's ids
        self._acceptance = AcceptanceEstimator()
        self._passes: list[_DraftPass] = []  # of this round
        self._has_warned = False

    def admit(self, slot: int, request: Request) -> None:
        self._retokenizers[slot] = Retokenizer(self._target, self._draft, self._shared)
        self._seqs[slot] = SequenceState(request=request, slot=slot, token_ids=[])
        self._model.cache.admit(slot, ())

    def propose(self, batch: Batch) -> Draft:
        planned = [self._plan_pass(batch, b) for b in range(len(batch.seqs))]
        passes = self._fitting(list(filter(None, planned)))
        self._prefill([draft_pass for draft_pass in passes if not draft_pass.steps])
        self._passes = [draft_pass for draft_pass in passes if draft_pass.steps]
        builders = [TreeBuilder() for _ in batch.seqs]
        if self._passes:
            chains = self._model.draft_greedy(_batch(self._passes), self._model.vocab).tokens.tolist()
            for draft_pass, ids in zip(self._passes, chains, strict=True):
                draft_pass.drafted = ids[: draft_pass.steps]
                self._translate(draft_pass, batch.draft_budget[draft_pass.index])
                builders[draft_pass.index] = draft_pass.builder
        num_prefilling = sum(map(bool, batch.draft_budget)) - len(self._passes)
        return replace(build_draft(builders, self._setup.device), num_prefilling=num_prefilling)

    def commit(self, round: Round) -> None:
        passes = self._passes
        self._passes = []
        if not passes:
            return
        batch = _batch(passes)
        draft = _chain(passes, self._model)
        paths = []
        for draft_pass in passes:
            emitted = round.emitted[draft_pass.index]
            self._acceptance.learn(draft_pass.builder, draft_pass.kinds, emitted)
            retokenizer = self._retokenizers[draft_pass.seq.slot]
            retokenizer.push(emitted)
            # The next pass must be fed at least one token, so the last one is not committed.
            end = len(retokenizer.stable_ids) - (not retokenizer.tail)
            stable = retokenizer.stable_ids[draft_pass.start : end]
            # The draft model was not fed its last draft token.
            fed = [*draft_pass.feed, *draft_pass.drafted[:-1]]
            num_equal = sum(takewhile(bool, map(eq, fed, stable)))
            paths.append(tuple(range(num_equal - len(draft_pass.feed))))
            draft_pass.feed = draft_pass.feed[:num_equal]
        committed = replace(batch, feed=tuple(draft_pass.feed for draft_pass in passes))
        self._model.cache.commit(replace(round, batch=committed, draft=draft, path=tuple(paths)))

    def release(self, slot: int) -> None:
        self._retokenizers.pop(slot, None)
        self._seqs.pop(slot, None)
        self._model.cache.release(slot)

    @property
    def model(self) -> Target:
        return self._model

    def _plan_pass(self, batch: Batch, b: int) -> _DraftPass | None:
        """Return what the draft model does for sequence b. None if it cannot draft."""
        slot = batch.seqs[b].slot
        tokens = batch.seqs[b].token_ids
        budget = batch.draft_budget[b]
        if not budget or delays_first_token(batch.seqs[b], len(tokens)):
            return None
        retokenizer = self._retokenizers[slot]
        seq = self._seqs[slot]
        retokenizer.push(tokens[retokenizer.count :])
        seq.token_ids = retokenizer.ids()
        if self._window:
            self._window.slide(seq, len(seq.token_ids))
        start = self._model.cache.length(slot)
        length = len(seq.token_ids)
        room = self._window.room(slot, length) if self._window else self._model.context - length
        # Both tokenizers need about as many tokens for the draft as for the text so far.
        steps = max(round(budget * len(seq.token_ids) / len(tokens)), 1)
        if room < steps and not self._window and not self._has_warned:
            self._has_warned = True
            _log.warning("the draft model's context of %d tokens is full; going on without it", self._model.context)
        if room < 1 or not retokenizer.ends_at_character or start >= len(seq.token_ids):
            return None
        if start + _PREFILL_CHUNK < len(retokenizer.stable_ids):
            stop = start + _PREFILL_CHUNK
            steps = 0
        else:
            stop = len(seq.token_ids)
            steps = min(steps, room)
        return _DraftPass(
            index=b,
            seq=seq,
            start=start,
            feed=tuple(seq.token_ids[start:stop]),
            steps=steps,
            drafted=[],
            builder=TreeBuilder(),
            kinds=[],
        )

    def _fitting(self, passes: Sequence[_DraftPass]) -> list[_DraftPass]:
        """Return the passes that fit into the draft model's KV cache."""
        ends = {each.seq.slot: each.start + len(each.feed) + each.steps for each in passes}
        slots = prompts_that_fit(self._model.cache, {}, ends)
        return [draft_pass for draft_pass in passes if draft_pass.seq.slot in slots]

    def _prefill(self, passes: Sequence[_DraftPass]) -> None:
        """Feed the next chunk of long texts."""
        if passes:
            batch = _batch(passes)
            none = tree.empty(len(passes), self._model.device)
            self._model.cache.commit(tree.prefill_round(batch, none, self._model.score(batch, none)))

    def _translate(self, draft_pass: _DraftPass, budget: int) -> None:
        """Convert the draft to at most `budget` tokens of the target."""
        spelled = b""
        end_token = None  # the special token that ends the draft
        for id in draft_pass.drafted:
            piece = self._draft.pieces[id] if id < len(self._draft.pieces) else b""
            if not piece:
                end_token = self._special.get(id)
                break
            spelled += piece
        text = _decode_characters(spelled)
        tokens = self._retokenize(self._retokenizers[draft_pass.seq.slot].tail, text)
        if end_token is not None and len(text.encode()) == len(spelled):
            tokens.append(end_token)
        tokens = list(takewhile(lambda token: token < self._setup.vocab, tokens[:budget]))
        # The last token may be the beginning of a longer one whose rest was not drafted, so it is a
        # kind of its own.
        draft_pass.kinds = [(min(i, _MAX_DEPTH), i == len(tokens) - 1) for i in range(len(tokens))]
        estimates = (self._acceptance.accept_prob(kind, _PRIOR) for kind in draft_pass.kinds)
        draft_pass.builder = TreeBuilder(tokens, list(range(-1, len(tokens) - 1)), list(accumulate(estimates, mul)))

    def _retokenize(self, tail: str, drafted: str) -> list[int]:
        """Return the target's tokens of the text `drafted`, which follows `tail`."""
        (ids,) = self._target.encode([tail + drafted])
        tail_size = len(tail.encode())
        size = 0
        for i, id in enumerate(ids):
            if size == tail_size:
                return ids[i:]
            size += len(self._target.pieces[id])
        # A token would cover the end of `tail`, but the tokens of `tail` are committed already.
        return self._target.encode([drafted])[0]


def _batch(passes: Sequence[_DraftPass]) -> Batch:
    return Batch(
        seqs=tuple(draft_pass.seq for draft_pass in passes),
        start=tuple(draft_pass.start for draft_pass in passes),
        feed=tuple(draft_pass.feed for draft_pass in passes),
        budget=DraftBudget(_steps(passes)),
    )


def _chain(passes: Sequence[_DraftPass], model: Target) -> Draft:
    """Return the draft in the draft model's ids."""
    steps = _steps(passes)
    drafted = [draft_pass.drafted for draft_pass in passes]
    return tree.chain(tree.upload_rows(drafted, max(steps), model.device), steps)


def _steps(passes: Sequence[_DraftPass]) -> tuple[int, ...]:
    return tuple(draft_pass.steps for draft_pass in passes)


def _decode_characters(text: bytes) -> str:
    """Decode UTF-8 up to the first incomplete character."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
