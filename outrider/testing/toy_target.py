"""A target so small that its law is known: the next token depends on the last two, through a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.cache.base import Layout, UnboundedCache, lay_out
from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Draft, DraftChains, Round, Scores, SequenceState, StopRule
from outrider.models.base import Target, draft_by_scores
from outrider.verify.sampling import SamplingTensors, apply_sampling


class ToyCache(UnboundedCache):
    """Holds the tokens themselves, and learns them from feeds and commits alone."""

    def __init__(self, slots: int) -> None:
        self.text: list[list[int]] = [[] for _ in range(slots)]

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self.text[slot] = []
        return 0

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return lay_out(batch, draft, first, torch.device("cpu"))

    def commit(self, round: Round) -> None:
        tokens = round.draft.tokens.tolist()
        for b, (row, feed, path) in enumerate(zip(round.batch.seqs, round.batch.feed, round.path, strict=True)):
            assert len(self.text[row.slot]) == round.batch.start[b], "the feed does not continue what is cached"
            self.text[row.slot] += [*feed, *(tokens[b][node] for node in path)]

    def release(self, slot: int) -> None:
        self.text[slot] = []

    def length(self, slot: int) -> int:
        return len(self.text[slot])

    def bytes(self) -> int:
        return 8 * sum(len(text) for text in self.text)


class ToyTarget:
    """A `Target` whose logits are a random table over the last two tokens.

    It reads its own cache, never the rows' texts, so a wrong feed or a wrong commit changes what it says.
    """

    def __init__(
        self, *, vocab: int = 6, slots: int = 16, context: int = 256, seed: int = 0, spread: float = 1.5
    ) -> None:
        """Draw logits of standard deviation `spread` from `seed`."""
        self.vocab, self.context, self.device, self.version = vocab, context, torch.device("cpu"), 0
        self.cache, self.slots, self.kernels = ToyCache(slots), slots, "table"
        self.table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * spread

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        self.cache.stage(batch, draft, first)
        parents, tokens = draft.parent.tolist(), draft.tokens.clamp(0, self.vocab - 1).tolist()
        states = []
        for b, (row, feed) in enumerate(zip(batch.seqs, batch.feed, strict=True)):
            ends = [tuple([0, 0, *self.cache.text[row.slot], *feed][-2:])]
            for node in range(draft.size):
                ends.append((ends[parents[b][node] + 1][1], tokens[b][node]))
            states.append(ends[max(first + 1, 0) :])
        last = torch.tensor(states)
        return Scores(logits=self.table[last[..., 0], last[..., 1]])

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return draft_by_scores(self, batch, vocab, stop_rule)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        assert not layers, "a toy has no layers"

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.table, self.version = weights["table"], version

    def bytes(self) -> int:
        return self.table.nbytes


def joint_distribution(target: Target, prompt: Sequence[int], params: SamplingParams, length: int) -> torch.Tensor:
    """The exact law [V, ..., V] of the first `length` tokens after `prompt`: the target's, with nothing speculated.

    Scores the tree of all V + V^2 + ... prefixes in one pass, and multiplies.
    """
    row = SequenceState.of(prompt, params=params)
    draft = _all_prefixes(target.vocab, length - 1, target.device)
    target.cache.admit(0, prompt)
    logits = target.score(
        Batch(seqs=(row,), start=(0,), feed=(tuple(prompt),), draft_budget=(draft.size,)), draft
    ).logits
    target.cache.release(0)
    p = apply_sampling(logits, SamplingTensors.of((row,), target.vocab, target.device), draft)[0].double()
    law, begin = p[:1], 1
    for depth in range(1, length):
        nodes = target.vocab**depth
        law = law.reshape(-1, 1) * p[begin : begin + nodes]
        begin += nodes
    return law.reshape((target.vocab,) * length)


def _all_prefixes(vocab: int, depth: int, device: torch.device) -> Draft:
    """The full tree of `depth` levels, level by level, children in the order of their ids."""
    tokens: list[int] = []
    parents: list[int] = []
    level = [-1]
    for _ in range(depth):
        begin = len(tokens)
        tokens += list(range(vocab)) * len(level)
        parents += [node for node in level for _ in range(vocab)]
        level = list(range(begin, len(tokens)))
    if not tokens:
        return tree.empty(1, device)
    ids, parent = torch.tensor([tokens], device=device), torch.tensor([parents], device=device)
    return tree.one_hot_tree(ids, parent, (len(tokens),))
