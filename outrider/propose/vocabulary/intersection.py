"""A draft model of another vocabulary, made to speak the target's ids (Timor et al. 2025, token-level intersection)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.cache.base import Cache, Layout, WrappedCache
from outrider.core.types import Batch, Draft, DraftChains, Round, Scores, StopRule
from outrider.models.base import Target, draft_by_scores
from outrider.propose.vocabulary.token_text import TokenText, counterparts
from outrider.propose.vocabulary.wrapped_target import Wrapped

_NEVER = -1e9  # the logit of what the draft cannot say; a number, so that a law is left whatever a user forbids


class VocabularyMap:
    """From the target's ids to the draft's and back.

    Each id of the target is fed to the draft as one id: its counterpart, or where the draft lacks it a stand-in, the
    last of the draft's own pieces of it. So positions are the same in both, at the price that the draft misreads what
    it lacks: it guesses worse there, and the text is the target's own all the same.
    """

    def __init__(self, shared: Sequence[int], stand_in: Sequence[int], *, tokens: int | None = None) -> None:
        """Take for each id of the target its counterpart, or -1, and what is fed in its place then.

        Of the ids as many are `tokens`; the others pad the target's logits. None: all are.
        """
        assert len(shared) == len(stand_in)
        self.tokens = len(shared) if tokens is None else tokens
        self.shared = tuple(shared)
        self.fed = tuple(id if id >= 0 else other for id, other in zip(shared, stand_in, strict=True))

    @classmethod
    def of(cls, target: TokenText, draft: TokenText, vocab: tuple[int, int]) -> VocabularyMap:
        """From how both spell; `vocab` are the ids that target and draft have logits for."""
        found = [id if id < vocab[1] else -1 for id in counterparts(target, draft)[: vocab[0]]]
        found += [-1] * (vocab[0] - len(found))
        tokens = sum(map(bool, target.pieces[: vocab[0]])) + sum(id < vocab[0] for id in target.special)
        return cls(found, _stand_ins(found, target, draft), tokens=tokens)

    @property
    def share(self) -> float:
        """Of the target's tokens, how many the draft has."""
        return sum(id >= 0 for id in self.shared) / max(self.tokens, 1)


class SharedVocabulary(Wrapped):
    """A draft model as a `Target` that reads and writes the target's ids.

    Its law over them is the draft's own, restricted to what both have and renormalised: q' = q(x) / q(shared). Guesses
    are drawn from that, so every verifier is exact with them.
    """

    def __init__(self, inner: Target, dictionary: VocabularyMap) -> None:
        """Let `inner` speak the ids of `dictionary`'s target."""
        super().__init__(inner)
        self.vocab = len(dictionary.fed)
        self.dictionary = dictionary
        shared = torch.tensor(dictionary.shared, dtype=torch.int64, device=inner.device)
        self._fed = torch.tensor(dictionary.fed, dtype=torch.int64, device=inner.device)
        self._missing = shared < 0
        self._source = shared.clamp(min=0)
        self._back = torch.full((inner.vocab,), -1, dtype=torch.int64, device=inner.device)
        self._back[shared[shared >= 0]] = torch.arange(self.vocab, device=inner.device)[shared >= 0]
        self._cache = _SharedCache(self)

    @property
    def cache(self) -> Cache:
        return self._cache

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        scores = self.inner.score(self.read(batch), self.read_draft(draft), first)
        logits = scores.logits[..., self._source].masked_fill_(self._missing, _NEVER)
        return Scores(logits=logits, hidden_states=scores.hidden_states, feed_hidden_states=scores.feed_hidden_states)

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        if self.device.type == "cpu":  # elsewhere, looking at what came out would be to wait for it
            own = stop_rule and replace(
                stop_rule, ends=tuple(id for id in map(self._shared, stop_rule.ends) if id >= 0)
            )
            grown = self.inner.draft_greedy(self.read(batch), self.inner.vocab, own)
            tokens = self._back[grown.tokens]
            guesses = torch.arange(tokens.shape[1]) < torch.tensor(grown.count)[:, None]
            if bool(((tokens >= 0) & (tokens < vocab) | ~guesses).all()):
                return replace(grown, tokens=tokens * guesses)
        return draft_by_scores(self, batch, vocab, stop_rule)

    def bytes(self) -> int:
        maps = (self._fed, self._missing, self._source, self._back)
        return self.inner.bytes() + sum(tensor.nbytes for tensor in maps)

    def read(self, batch: Batch) -> Batch:
        """The same batch, its feeds in the draft's ids."""
        return replace(batch, feed=tuple(self.words(feed) for feed in batch.feed))

    def read_draft(self, draft: Draft) -> Draft:
        """The same draft in the draft's ids."""
        return replace(draft, tokens=self._fed[draft.tokens.clamp(0, self.vocab - 1)], q=None)

    def _shared(self, id: int) -> int:
        """The draft's id of one of the target's, or -1."""
        return self.dictionary.shared[id] if id < len(self.dictionary.shared) else -1

    def words(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The draft's ids of some of the target's."""
        return tuple(self.dictionary.fed[id] for id in ids)


class _SharedCache(WrappedCache):
    """The inner model's cache, which holds the draft's ids.

    Which texts begin alike is told by rows, in the target's ids, and so `admit` takes them as they are.
    """

    def __init__(self, owner: SharedVocabulary) -> None:
        super().__init__(owner.inner.cache)
        self._owner = owner

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return self._inner.stage(self._owner.read(batch), self._owner.read_draft(draft), first)

    def commit(self, round: Round) -> None:
        batch, draft = self._owner.read(round.batch), self._owner.read_draft(round.draft)
        self._inner.commit(replace(round, batch=batch, draft=draft))


def _stand_ins(found: Sequence[int], target: TokenText, draft: TokenText) -> list[int]:
    """What the draft is fed for the ids that it lacks: the last of its own pieces of what they spell."""
    written: dict[int, str] = {}
    for id, other in enumerate(found):
        if other < 0:
            piece = target.pieces[id] if id < len(target.pieces) else b""
            written[id] = piece.decode(errors="ignore") or target.special.get(id, "")
    pieces = dict(zip(written, draft.encode(list(written.values())), strict=True))
    anything = draft.roles.get("bos", draft.roles.get("eos", 0))
    return [(pieces.get(id) or [anything])[-1] for id in range(len(found))]
