"""Draft what followed an earlier occurrence of the last n-gram (prompt lookup: Saxena 2023; Yang et al. 2023)."""

from collections.abc import Hashable, Iterator

from outrider.core import tree
from outrider.core.proposer import ProposerSetup, parse_count
from outrider.core.types import Batch, Draft, Needs, Request, Round
from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.lookup.source_text import source_text
from outrider.drafting.propose.tree_builder import TreeBuilder, build_draft
from outrider.errors import OutriderError

_MAX_NGRAM = 32  # longest n-gram that can be asked for; each length costs time and memory at every token
_MAX_BRANCHES = 3  # continuations in a tree
_MAX_POSITIONS = 5  # positions kept for an n-gram, each followed by a different token
_GAPS = (1, 2, 3)  # tokens at the end of the text that may differ from those after the n-gram
_MAX_NGRAM_BEFORE_GAP = 3  # tokens
_MAX_DEPTH = 4  # deeper draft tokens share their acceptance statistics
_MIN_ACCEPT_PROB = 0.08  # draft tokens with a lower estimated acceptance are left out

# Tokens of the n-gram, tokens of the gap, and number of positions of the n-gram (0 with a gap).
_MatchKind = tuple[int, int, int]


class _Index:
    """The tokens of one sequence, and for each n-gram the positions after its occurrences.

    For each next token only the latest position is kept.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._positions: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token: int) -> None:
        end = len(self._tokens)
        for size in self._sizes:
            if size <= end:
                ngram = tuple(self._tokens[end - size :])
                others = self._positions.get(ngram, ())
                if others:
                    others = [position for position in others if self._tokens[position] != token]
                self._positions[ngram] = [end, *others[: _MAX_POSITIONS - 1]]
        self._tokens.append(token)

    def continuations(self, count: int) -> Iterator[tuple[_MatchKind, float, Iterator[int]]]:
        """Yield possible continuations, better ones first: kind, prior acceptance, and `count` tokens."""
        seen: set[int] = set()
        for gap in (0, *_GAPS):
            for size, positions in self._matches(gap):
                kind = (size, gap, 0 if gap else len(positions))
                prior = size / (size + 1) / (2 if gap else 1)
                for position in positions:
                    start = position + gap
                    if start < len(self._tokens) and start not in seen:
                        seen.add(start)
                        yield kind, prior, self._copy(start, count)

    def _matches(self, gap: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the size and the positions of each known n-gram that ends `gap` tokens before the end."""
        end = len(self._tokens) - gap
        for size in self._sizes:
            if size <= min(end, _MAX_NGRAM_BEFORE_GAP if gap else end):
                positions = self._positions.get(tuple(self._tokens[end - size : end]))
                if positions:
                    yield size, positions

    def _copy(self, start: int, count: int) -> Iterator[int]:
        """Return `count` tokens from `start` on. At its end, the text is continued periodically."""
        period = len(self._tokens) - start
        return (self._tokens[start + i % period] for i in range(count))


class _TreeGrowth:
    """The tree of one sequence while continuations are added, and the kind of each node."""

    def __init__(self, acceptance: AcceptanceEstimator) -> None:
        self._acceptance = acceptance
        self._builder = TreeBuilder()
        self._kinds: list[Hashable] = []
        self._children: dict[tuple[int, int], int] = {}  # by parent and token
        self._num_branches = 0  # continuations that have added nodes

    def add(self, match: _MatchKind, prior: float, tokens: Iterator[int]) -> bool:
        """Add a continuation as far as it is likely to be accepted. Return whether there is room for more."""
        node = -1
        has_branched = False
        accept_prob = 1.0
        for depth, token in enumerate(tokens):
            child = self._children.get((node, token))
            if child is None:
                kind = (match, self._num_branches, has_branched, min(depth, _MAX_DEPTH))
                # The first token of a later branch contradicts an earlier one.
                kind_prior = prior * (0.5 if self._num_branches and not has_branched else 1)
                accept_prob *= self._acceptance.accept_prob(kind, kind_prior)
                if accept_prob < _MIN_ACCEPT_PROB:
                    break
                child = self._builder.add(token, node, accept_prob)
                self._children[node, token] = child
                self._kinds.append(kind)
                has_branched = True
            node = child
            accept_prob = self._builder.accept_prob[child]
        self._num_branches += has_branched
        return self._num_branches < _MAX_BRANCHES

    def best(self, count: int) -> tuple[TreeBuilder, list[Hashable]]:
        """Return the likeliest `count` nodes and their kinds, parents before children."""
        accept_prob = self._builder.accept_prob
        # A parent is never less likely than its children and was added before them, and the sort is stable.
        order = sorted(range(len(self._kinds)), key=lambda node: -accept_prob[node])[:count]
        return self._builder.select(order), tree.pick(self._kinds, order)


class NgramProposer:
    """Copies what followed earlier occurrences of the last n-gram, longest n-gram and latest occurrence first.

    The text is the source of an encoder-decoder target, if there is one, and then the sequence. Up
    to three continuations form a tree. A prompt is indexed in the rounds in which the target
    prefills it, so that a long prompt does not delay sequences that decode.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, *, shortest: int = 1, longest: int = 5) -> None:
        """Look up n-grams of `longest` down to `shortest` tokens."""
        self._device = setup.device
        self._sizes = (shortest, longest)
        self.indexes: dict[int, _Index] = {}  # by slot
        self._offsets: dict[int, int] = {}  # by slot: indexed tokens before those of the sequence
        self._acceptance = AcceptanceEstimator()
        self._drafted: dict[int, tuple[TreeBuilder, list[Hashable]]] = {}  # by slot: tree and kinds of this round

    def admit(self, slot: int, request: Request) -> None:
        index = self.indexes[slot] = _Index(*self._sizes)
        for token in source_text(request):
            index.append(token)
        self._offsets[slot] = len(index)

    def propose(self, batch: Batch) -> Draft:
        self._drafted = {}
        if not any(batch.draft_budget) and sum(map(len, batch.feed)) == len(batch.seqs):
            return tree.empty(len(batch.seqs), self._device)  # the next draft indexes these tokens
        for seq, start, feed in zip(batch.seqs, batch.start, batch.feed, strict=True):
            index = self.indexes[seq.slot]
            for token in seq.token_ids[len(index) - self._offsets[seq.slot] : start + len(feed)]:
                index.append(token)
        pairs = zip(batch.seqs, batch.draft_budget, strict=True)
        return build_draft([self._draft_tree(seq.slot, budget) for seq, budget in pairs], self._device)

    def commit(self, round: Round) -> None:
        for seq, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if seq.slot in self._drafted:
                self._acceptance.learn(*self._drafted[seq.slot], emitted)

    def release(self, slot: int) -> None:
        self.indexes.pop(slot, None)
        self._offsets.pop(slot, None)

    def _draft_tree(self, slot: int, budget: int) -> TreeBuilder:
        if not budget:
            return TreeBuilder()
        growth = _TreeGrowth(self._acceptance)
        for continuation in self.indexes[slot].continuations(budget):
            if not growth.add(*continuation):
                break
        self._drafted[slot] = growth.best(budget)
        return self._drafted[slot][0]


def ngram_proposer(argument: str, setup: ProposerSetup) -> NgramProposer:
    """Make the proposer of `ngram:MIN-MAX`. Raises OutriderError if the argument is not a range."""
    if (ends := parse_ngram_range(argument)) is None:
        return NgramProposer(setup)
    return NgramProposer(setup, shortest=ends[0], longest=ends[1])


def parse_ngram_range(argument: str) -> tuple[int, int] | None:
    """Return the shortest and the longest n-gram of MIN-MAX, in tokens. None: no argument.

    Raises:
        OutriderError: the argument is not a range.
    """
    if not argument:
        return None
    ends = list(map(parse_count, argument.split("-")))
    match ends:
        case [int(shortest), int(longest)] if 1 <= shortest <= longest <= _MAX_NGRAM:
            return shortest, longest
    raise OutriderError(
        f"ngram:{argument} is not a range; write ngram:1-5 for n-grams of 1 to 5 tokens, of {_MAX_NGRAM} at most"
    )
