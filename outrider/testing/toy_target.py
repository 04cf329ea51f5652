"""A tiny target for tests. Its distribution is a table over the last two tokens."""

from collections.abc import Mapping, Sequence

import torch

from outrider.core import tree
from outrider.core.cache import Layout, UnboundedCache, lay_out
from outrider.core.params import SamplingParams
from outrider.core.target import Target, draft_by_scores
from outrider.core.types import Batch, Draft, DraftBudget, DraftChains, Round, Scores, SequenceState, StopRule
from outrider.verify.sampling import SamplingTensors, apply_sampling


class ToyCache(UnboundedCache):
    """A cache that stores the tokens themselves. It gets them only from feeds and commits."""

    def __init__(self, slots: int) -> None:
        self.text: list[list[int]] = [[] for _ in range(slots)]  # committed tokens by slot

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self.text[slot] = []
        return 0

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return lay_out(batch, draft, first, torch.device("cpu"))

    def commit(self, round: Round) -> None:
        tokens = round.draft.tokens.tolist()
        for b, (seq, feed, path) in enumerate(zip(round.batch.seqs, round.batch.feed, round.path, strict=True)):
            assert len(self.text[seq.slot]) == round.batch.start[b], "the feed does not continue the cached tokens"
            self.text[seq.slot] += [*feed, *(tokens[b][node] for node in path)]

    def release(self, slot: int) -> None:
        self.text[slot] = []

    def length(self, slot: int) -> int:
        return len(self.text[slot])

    def bytes(self) -> int:
        return 8 * sum(map(len, self.text))


class ToyTarget:
    """A `Target` whose logits are a random table over the last two tokens.

    It uses the tokens of its own cache, never those of the sequences. So a wrong feed or a wrong
    commit changes its logits.
    """

    def __init__(
        self, *, vocab: int = 6, slots: int = 16, context: int = 256, seed: int = 0, spread: float = 1.5
    ) -> None:
        """Sample the logits from `seed`, with standard deviation `spread`."""
        self.vocab = vocab
        self.slots = slots
        self.context = context
        self.device = torch.device("cpu")
        self.version = 0
        self.kernels = "table"
        self.cache = ToyCache(slots)
        self.table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * spread

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        parents = draft.parent.tolist()
        tokens = draft.tokens.clamp(0, self.vocab - 1).tolist()
        size = draft.size
        last_two = []  # [B, 1 + N, 2] the last two tokens at each node
        for b, (seq, feed) in enumerate(zip(batch.seqs, batch.feed, strict=True)):
            pairs = [tuple([0, 0, *self.cache.text[seq.slot][-2:], *feed][-2:])]
            for node in range(size):
                pairs.append((pairs[parents[b][node] + 1][1], tokens[b][node]))
            last_two.append(pairs[max(first + 1, 0) :])
        index = torch.tensor(last_two)
        return Scores(logits=self.table[index[..., 0], index[..., 1]])

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return draft_by_scores(self, batch, vocab, stop_rule)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        assert not layers, "a toy target has no layers"

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.table = weights["table"]
        self.version = version

    def bytes(self) -> int:
        return self.table.nbytes


def joint_distribution(target: Target, prompt: Sequence[int], params: SamplingParams, length: int) -> torch.Tensor:
    """Return the exact joint distribution [V, ..., V] of the first `length` tokens after `prompt`, without speculation.

    It scores the tree of all V + V^2 + ... prefixes in one pass and multiplies the probabilities along each path.
    """
    seq = SequenceState.of(prompt, params=params)
    draft = _all_prefixes(target.vocab, length - 1, target.device)
    target.cache.admit(0, prompt)
    batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(prompt),), budget=DraftBudget((draft.size,)))
    logits = target.score(batch, draft).logits
    target.cache.release(0)
    p = apply_sampling(logits, SamplingTensors.of((seq,), target.vocab, target.device), draft)[0].double()
    joint = p[:1]
    begin = 1
    for depth in range(1, length):
        nodes = target.vocab**depth
        joint = joint.reshape(-1, 1) * p[begin : begin + nodes]
        begin += nodes
    return joint.reshape((target.vocab,) * length)


def _all_prefixes(vocab: int, depth: int, device: torch.device) -> Draft:
    """Return the full tree of `depth` levels, in order of level and then of token id."""
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
    return tree.one_hot_tree(
        torch.tensor([tokens], device=device), torch.tensor([parents], device=device), (len(tokens),)
    )
