"""Run a draft model with n-gram lookup of its own draft, which needs fewer passes (Chen et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from types import MappingProxyType

import torch

from outrider.core import devices, tree
from outrider.core.draft_chains import ChainBuilder
from outrider.core.draws import Draws
from outrider.core.target import ChainSampler, Target
from outrider.core.types import Batch, DraftChains, SequenceState, StopRule
from outrider.drafting.propose.vocabulary.wrapped_target import WrappedTarget

_NGRAM_SIZES = (4, 3, 2, 1)  # sizes of the n-grams that are looked up, largest first
_MAX_TOKENS: Mapping[int, int] = MappingProxyType({1: 2, 2: 3, 3: 6})  # looked-up tokens, by n-gram size
_MIN_TOKENS = 3  # with fewer looked-up tokens at the start, the chain is drafted token by token


class Cascade(WrappedTarget):
    """A draft model whose greedy chains take fewer passes.

    The draft model looks up what followed the last occurrence of the end of text and chain. It
    scores these tokens in the same pass and keeps those that equal its own choice. The chain equals
    the one that the model drafts token by token. Each pass synchronizes with the host, so this is
    meant for the CPU.
    """

    def __init__(self, inner: Target) -> None:
        super().__init__(inner)
        self._indexes: dict[int, _NgramIndex] = {}  # by slot

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        indexes = list(map(self._index, batch.seqs))
        budgets = zip(indexes, batch.draft_budget, strict=True)
        if all(len(index.lookup([], budget - 1)) < _MIN_TOKENS for index, budget in budgets):
            return self.inner.draft_greedy(batch, vocab, stop_rule)
        builder = ChainBuilder(batch.draft_budget, stop_rule if devices.is_cpu(self.device) else None)
        chains: list[list[int]] = [[] for _ in batch.seqs]
        logits: list[list[torch.Tensor]] = [[] for _ in batch.seqs]  # [V] of each token
        while active := [b for b, count in enumerate(builder.count) if len(chains[b]) < count]:
            # The last token of a chain has not been fed yet.
            first = min(len(chains[b]) for b in active) - 1
            lookups = {b: indexes[b].lookup(chains[b], builder.count[b] - len(chains[b]) - 1) for b in active}
            fed_chains = [chain + lookups[b] if b in lookups else [] for b, chain in enumerate(chains)]
            best, pass_logits = self._score_chains(batch, fed_chains, first, min(vocab, self.vocab))
            for b, looked_up in lookups.items():
                begin = len(chains[b]) - 1 - first
                chosen = best[b][begin : begin + len(looked_up) + 1]
                num_new = 1 + sum(takewhile(bool, map(eq, looked_up, chosen)))
                chains[b] += chosen[:num_new]
                logits[b] += pass_logits[b, begin : begin + num_new]
            _update_builder(builder, chains, logits)
        size = max(map(len, chains))
        tokens = tree.upload_rows(chains, size, self.device)
        return DraftChains(
            tokens=tokens, count=tuple(builder.count), margin=builder.margins, accept_prob=builder.accept_probs
        )

    def _score_chains(
        self, batch: Batch, chains: Sequence[list[int]], first: int, vocab: int
    ) -> tuple[list[list[int]], torch.Tensor]:
        """Score the nodes of the chains from `first` on. Return the likeliest ids [B][M] and the logits [B, M, V]."""
        size = max(map(len, chains))
        tokens = tree.upload_rows(chains, size, self.device)
        draft = tree.chain(tokens, tuple(map(len, chains))) if size else tree.empty(len(chains), self.device)
        scores = self.inner.score(batch, draft, first)
        logits = scores.logits[..., :vocab]
        has_best = scores.best is not None and self.inner.vocab <= vocab
        best = scores.best if has_best else logits.argmax(-1)
        assert best is not None
        return best.tolist(), logits

    def _index(self, seq: SequenceState) -> _NgramIndex:
        index = self._indexes.get(seq.slot)
        if index is None or index.seq is not seq:
            index = self._indexes[seq.slot] = _NgramIndex(seq)
        index.update()
        return index


class _SamplingCascade(Cascade):
    """A cascade of a draft model that samples chains in one call."""

    def draft_sampled(self, batch: Batch, vocab: int, draws: Draws, stop_rule: StopRule | None = None) -> DraftChains:
        assert isinstance(self.inner, ChainSampler)
        return self.inner.draft_sampled(batch, vocab, draws, stop_rule)


def cascade(inner: Target) -> Cascade:
    """Return a cascade of a draft model. It samples chains as the draft model does."""
    return _SamplingCascade(inner) if isinstance(inner, ChainSampler) else Cascade(inner)


class _NgramIndex:
    """An index of the n-grams of a sequence: the position after the last occurrence of each one."""

    def __init__(self, seq: SequenceState) -> None:
        self.seq = seq
        self._num_tokens = 0
        self._positions: dict[tuple[int, ...], int] = {}

    def update(self) -> None:
        tokens = self.seq.token_ids
        for position in range(max(self._num_tokens, 1), len(tokens)):
            for size in _NGRAM_SIZES:
                if size <= position:
                    self._positions[tuple(tokens[position - size : position])] = position
        self._num_tokens = len(tokens)

    def lookup(self, chain: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest known suffix of text and chain."""
        tokens = self.seq.token_ids
        suffix = [*tokens[-max(_NGRAM_SIZES) :], *chain]
        for size in _NGRAM_SIZES if count > 0 else ():
            position = self._positions.get(tuple(suffix[-size:])) if size <= len(suffix) else None
            if position is not None:
                return tokens[position : position + min(count, _MAX_TOKENS.get(size, count))]
        return []


def _update_builder(builder: ChainBuilder, chains: Sequence[list[int]], logits: Sequence[list[torch.Tensor]]) -> None:
    """Pass the new draft tokens of all active sequences to the builder, one position at a time."""
    while builder.margins is not None and builder.depth < max(builder.count):
        depth = builder.depth
        if any(len(chain) <= depth < count for chain, count in zip(chains, builder.count, strict=True)):
            return
        # Sequences that have stopped pass their first token, which is ignored.
        positions = [depth if depth < len(chain) else 0 for chain in chains]
        at_depth = [seq_logits[i] for seq_logits, i in zip(logits, positions, strict=True)]
        stacked = torch.stack(at_depth) if len(at_depth) > 1 else at_depth[0][None]
        builder.process(stacked, torch.tensor([chain[i] for chain, i in zip(chains, positions, strict=True)]))
