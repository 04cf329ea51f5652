"""Run a draft model with another vocabulary on the target's token ids.

The method is token-level intersection (Timor et al. 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.core.cache import Cache, Layout, WrappedCache
from outrider.core.target import Target, draft_by_scores
from outrider.core.token_text import TokenText
from outrider.core.types import Batch, Draft, DraftChains, Round, Scores, StopRule
from outrider.drafting.propose.vocabulary.counterparts import counterparts
from outrider.drafting.propose.vocabulary.wrapped_target import WrappedTarget

# The logit of tokens that the draft model lacks. It is finite, so that a distribution remains if a
# request forbids all other tokens.
_MISSING_LOGIT = -1e9


class VocabularyMap:
    """Maps the target's token ids to the draft model's.

    Each id of the target becomes one id of the draft model, so positions are the same in both. It is the counterpart of
    the id, or a substitute if the draft model has none: the last of the draft tokens that spell the same text. After a
    substitute the draft is worse, but the output still has the target's distribution.
    """

    def __init__(self, shared: Sequence[int], stand_in: Sequence[int], *, tokens: int | None = None) -> None:
        """Create a map for a target with V ids.

        Args:
            shared: [V] the counterpart of each id of the target; -1 if there is none.
            stand_in: [V] the substitute of each id without a counterpart.
            tokens: the number of ids that are tokens; the others pad the target's logits. None: all ids are tokens.
        """
        assert len(shared) == len(stand_in)
        self.tokens = len(shared) if tokens is None else tokens
        self.shared = tuple(shared)
        pairs = zip(shared, stand_in, strict=True)
        self.draft_ids = tuple(id if id >= 0 else substitute for id, substitute in pairs)

    @classmethod
    def of(cls, target: TokenText, draft: TokenText, vocab: tuple[int, int]) -> VocabularyMap:
        """Match the tokens of target and draft by their text. `vocab` is the number of logits of each."""
        target_vocab, draft_vocab = vocab
        shared = [id if id < draft_vocab else -1 for id in counterparts(target, draft)[:target_vocab]]
        shared += [-1] * (target_vocab - len(shared))
        tokens = sum(map(bool, target.pieces[:target_vocab])) + sum(id < target_vocab for id in target.special)
        return cls(shared, _substitutes(shared, target, draft), tokens=tokens)

    @property
    def shared_fraction(self) -> float:
        """The fraction of the target's tokens that the draft model has."""
        return sum(id >= 0 for id in self.shared) / max(self.tokens, 1)


class SharedVocabulary(WrappedTarget):
    """A draft model as a `Target` that takes and returns the target's token ids.

    Its distribution over them is the draft model's own, restricted to the shared tokens and renormalized: q' = q(x) /
    q(shared). Draft tokens are sampled from q', so every verifier is exact with them.
    """

    def __init__(self, inner: Target, vocabulary_map: VocabularyMap) -> None:
        """Wrap the draft model `inner`."""
        super().__init__(inner)
        self.vocab = len(vocabulary_map.draft_ids)
        self.vocabulary_map = vocabulary_map
        shared = torch.tensor(vocabulary_map.shared, dtype=torch.int64, device=inner.device)
        self._draft_ids = torch.tensor(vocabulary_map.draft_ids, dtype=torch.int64, device=inner.device)
        self._missing = shared < 0
        self._source = shared.clamp(min=0)
        # The target's id of each draft id; -1 if there is none.
        self._target_ids = torch.full((inner.vocab,), -1, dtype=torch.int64, device=inner.device)
        self._target_ids[shared[shared >= 0]] = torch.arange(self.vocab, device=inner.device)[shared >= 0]
        self._cache = _SharedCache(self)

    @property
    def cache(self) -> Cache:
        return self._cache

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        scores = self.inner.score(self.translate_batch(batch), self.translate_draft(draft), first)
        logits = scores.logits[..., self._source].masked_fill_(self._missing, _MISSING_LOGIT)
        return Scores(logits=logits, hidden_states=scores.hidden_states, feed_hidden_states=scores.feed_hidden_states)

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        if self.device.type == "cpu":  # on other devices the check of the result would wait for the device
            draft_rule = stop_rule and replace(
                stop_rule, ends=tuple(id for id in map(self._counterpart, stop_rule.ends) if id >= 0)
            )
            chains = self.inner.draft_greedy(self.translate_batch(batch), self.inner.vocab, draft_rule)
            tokens = self._target_ids[chains.tokens]
            valid = torch.arange(tokens.shape[1]) < torch.tensor(chains.count)[:, None]
            if bool(((tokens >= 0) & (tokens < vocab) | ~valid).all()):
                return replace(chains, tokens=tokens * valid)
        return draft_by_scores(self, batch, vocab, stop_rule)

    def bytes(self) -> int:
        tensors = (self._draft_ids, self._missing, self._source, self._target_ids)
        return self.inner.bytes() + sum(tensor.nbytes for tensor in tensors)

    def translate_batch(self, batch: Batch) -> Batch:
        """Return the batch with its feeds in the draft model's ids."""
        draft_ids = self.vocabulary_map.draft_ids
        return replace(batch, feed=tuple(tuple(map(draft_ids.__getitem__, feed)) for feed in batch.feed))

    def translate_draft(self, draft: Draft) -> Draft:
        """Return the draft with its tokens in the draft model's ids."""
        return replace(draft, tokens=self._draft_ids[draft.tokens.clamp(0, self.vocab - 1)], q=None)

    def _counterpart(self, id: int) -> int:
        """Return the draft model's counterpart of an id of the target; -1 if there is none."""
        return self.vocabulary_map.shared[id] if id < len(self.vocabulary_map.shared) else -1


class _SharedCache(WrappedCache):
    """The draft model's cache, which holds the draft model's ids.

    `admit` passes the target's ids on, because equal prefixes are found by comparing the tokens of sequences.
    """

    def __init__(self, owner: SharedVocabulary) -> None:
        super().__init__(owner.inner.cache)
        self._owner = owner

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return self._inner.stage(self._owner.translate_batch(batch), self._owner.translate_draft(draft), first)

    def commit(self, round: Round) -> None:
        batch = self._owner.translate_batch(round.batch)
        draft = self._owner.translate_draft(round.draft)
        self._inner.commit(replace(round, batch=batch, draft=draft))


def _substitutes(shared: Sequence[int], target: TokenText, draft: TokenText) -> list[int]:
    """Return [V] the last of the draft tokens that spell each id of the target that has no counterpart."""
    texts: dict[int, str] = {}
    for id, counterpart in enumerate(shared):
        if counterpart < 0:
            piece = target.pieces[id] if id < len(target.pieces) else b""
            texts[id] = piece.decode(errors="ignore") or target.special.get(id, "")
    encoded = dict(zip(texts, draft.encode(list(texts.values())), strict=True))
    default = draft.roles.get("bos", draft.roles.get("eos", 0))
    return [(encoded.get(id) or [default])[-1] for id in range(len(shared))]
