"""A draft model with n-gram lookup of its own draft, which needs fewer passes (Chen et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from types import MappingProxyType

import torch

from outrider.core import tree
from outrider.core.types import Batch, DraftChains, SequenceState, StopRule
from outrider.models.base import Target
from outrider.models.draft_chains import ChainBuilder
from outrider.propose.vocabulary.wrapped_target import Wrapped

_SIZES = (4, 3, 2, 1)  # lengths of the looked-up suffix, longest first
_REACH: Mapping[int, int] = MappingProxyType({1: 2, 2: 3, 3: 6})  # draft tokens of a match, by its length


class Cascade(Wrapped):
    """A draft model whose greedy chains take fewer passes.

    It looks up what followed the last occurrence of the end of text and chain, scores it in the same pass, and keeps it
    as far as the model agrees. The chain equals the one that the model drafts token by token. Each pass synchronizes
    with the host, so it is meant for the CPU.
    """

    def __init__(self, inner: Target) -> None:
        super().__init__(inner)
        self._lookups: dict[int, _Lookup] = {}  # by slot

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        lookups = [self._lookup(row) for row in batch.seqs]
        watch = ChainBuilder(batch.draft_budget, stop_rule if tree.is_cpu(self.device) else None)
        chains: list[list[int]] = [[] for _ in batch.seqs]
        laws: list[list[torch.Tensor]] = [[] for _ in batch.seqs]  # logits [V] of each token
        while going := [b for b, most in enumerate(watch.count) if len(chains[b]) < most]:
            # The last token of a chain has not been fed yet.
            first = min(len(chains[b]) for b in going) - 1
            guesses = {b: lookups[b].guess(chains[b], watch.count[b] - len(chains[b]) - 1) for b in going}
            nodes = [chain + guesses[b] if b in guesses else [] for b, chain in enumerate(chains)]
            best, logits = self._say(batch, nodes, first, min(vocab, self.vocab))
            for b, guess in guesses.items():
                begin = len(chains[b]) - 1 - first
                said = best[b][begin : begin + len(guess) + 1]
                kept = 1 + sum(takewhile(bool, map(eq, guess, said)))
                chains[b] += said[:kept]
                laws[b] += logits[b, begin : begin + kept]
            _look(watch, chains, laws)
        size = max(map(len, chains))
        tokens = tree.upload([chain + [0] * (size - len(chain)) for chain in chains], self.device)
        return DraftChains(
            tokens=tokens, count=tuple(watch.count), margin=watch.margins, accept_prob=watch.accept_probs
        )

    def _say(
        self, batch: Batch, rows: Sequence[list[int]], first: int, vocab: int
    ) -> tuple[list[list[int]], torch.Tensor]:
        """Score the chains `rows` from node `first` on. Returns the likeliest ids [B][M] and the logits [B, M, V]."""
        size = max(map(len, rows))
        tokens = tree.upload([row + [0] * (size - len(row)) for row in rows], self.device)
        draft = tree.chain(tokens, tuple(map(len, rows))) if size else tree.empty(len(rows), self.device)
        scores = self.inner.score(batch, draft, first)
        logits = scores.logits[..., :vocab]
        known = scores.best is not None and self.inner.vocab <= vocab
        best = scores.best if known else logits.argmax(-1)
        assert best is not None
        return best.tolist(), logits

    def _lookup(self, row: SequenceState) -> _Lookup:
        lookup = self._lookups.get(row.slot)
        if lookup is None or lookup.row is not row:
            lookup = self._lookups[row.slot] = _Lookup(row)
        lookup.read()
        return lookup


class _Lookup:
    """An index of short token sequences in a text: where each one was last followed by a token."""

    def __init__(self, row: SequenceState) -> None:
        self.row = row
        self._read = 0
        self._after: dict[tuple[int, ...], int] = {}

    def read(self) -> None:
        """Add new tokens of the text."""
        text = self.row.token_ids
        for at in range(max(self._read, 1), len(text)):
            for size in _SIZES:
                if size <= at:
                    self._after[tuple(text[at - size : at])] = at
        self._read = len(text)

    def guess(self, chain: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest known suffix of text and chain."""
        text = self.row.token_ids
        ending = [*text[-max(_SIZES) :], *chain]
        for size in _SIZES if count > 0 else ():
            at = self._after.get(tuple(ending[-size:])) if size <= len(ending) else None
            if at is not None:
                return text[at : at + min(count, _REACH.get(size, count))]
        return []


def _look(watch: ChainBuilder, chains: Sequence[list[int]], laws: Sequence[list[torch.Tensor]]) -> None:
    """Pass the draft tokens of all active sequences to `watch`, one position at a time."""
    while watch.margins is not None and watch.depth < max(watch.count):
        at = watch.depth
        if any(len(chain) <= at < most for chain, most in zip(chains, watch.count, strict=True)):
            return
        # Sequences that have stopped pass their first token, which is ignored.
        shown = [at if at < len(chain) else 0 for chain in chains]
        seen = [law[i] for law, i in zip(laws, shown, strict=True)]
        logits = torch.stack(seen) if len(seen) > 1 else seen[0][None]
        watch.look(logits, torch.tensor([chain[i] for chain, i in zip(chains, shown, strict=True)]))
