"""Lookahead decoding: the target itself generates n-grams that are drafted later (Fu et al. 2024).

Window tokens are predictions of tokens that come a few positions later. The target scores them in the same pass as the
draft tokens. Its choices after them, a step of Jacobi iteration, form n-grams. A pool keeps the n-grams. When the
sequence reaches the first token of an n-gram, its other tokens are drafted.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch

from outrider.core import tree
from outrider.core.proposer import ProposerSetup, parse_count
from outrider.core.types import Batch, Draft, Needs, Request, Round, SequenceState
from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.tree_builder import TreeBuilder, build_draft
from outrider.errors import OutriderError

_PRIOR = 0.4  # acceptance of a draft token from the pool before any has been verified
MAX_POOL_TOKENS = 1 << 15  # first tokens for which the pool has n-grams
_WINDOW_PRIOR = 0.2  # accepted draft tokens per window token, before any were counted
_WINDOW_PRIOR_WEIGHT = 64.0  # of _WINDOW_PRIOR, in window tokens
_DECAY = 0.995  # of the counts, with each round
_MAX_SIZES = (256, 32, 64)  # of W, N and G: the work of a round on the host grows with each of them

Ngram = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """W, N and G of the paper."""

    window: int = 10  # columns of window tokens
    size: int = 3  # tokens of an n-gram; a column has one less
    guesses: int = 8  # n-grams kept for a first token


class _NgramPool:
    """The n-grams of one sequence by their first token, latest first."""

    def __init__(self, most: int) -> None:
        """Keep at most `most` n-grams for each first token."""
        self._most = most
        self._ngrams: dict[int, list[Ngram]] = {}  # the rest of each n-gram, by first token

    def add(self, ngram: Ngram) -> None:
        first = ngram[0]
        rest = ngram[1:]
        others = [other for other in self._ngrams.pop(first, ()) if other != rest]
        self._ngrams[first] = [rest, *others[: self._most - 1]]
        if len(self._ngrams) > MAX_POOL_TOKENS:
            for oldest in list(islice(self._ngrams, MAX_POOL_TOKENS // 4)):
                del self._ngrams[oldest]

    def after(self, token: int) -> list[Ngram]:
        """Return the n-grams that begin with a token, without it."""
        return self._ngrams.get(token, [])


@dataclass(slots=True)
class _SequenceWindow:
    """The pool and the window of one sequence.

    A column has the predicted token of a position and the tokens that may follow it.
    """

    pool: _NgramPool
    rng: random.Random
    columns: list[Ngram] = field(default_factory=list)

    def resize(self, width: int, size: int, tokens: Sequence[int]) -> None:
        """Set the number of columns. New columns have `size` random tokens of the sequence."""
        del self.columns[width:]
        while len(self.columns) < width:
            self.columns.append(tuple(self.rng.choices(tokens, k=size)))

    def paths(self) -> list[Ngram]:
        """Return for each column the tokens from the root to its last window token."""
        first_tokens = tuple(column[0] for column in self.columns)
        return [first_tokens[:position] + column for position, column in enumerate(self.columns)]

    def move(self, predicted: Sequence[int | None], tokens: Sequence[int], emitted: int) -> None:
        """Make a step of Jacobi iteration, then drop the columns of emitted positions.

        Args:
            predicted: the target's choice after each column; None if the column was not scored.
            tokens: the sequence, from which a missing choice is drawn at random.
            emitted: number of emitted tokens.
        """
        moved = []
        for column, token in zip(self.columns, predicted, strict=True):
            if token is None:
                token = self.rng.choice(tokens)
            else:
                self.pool.add((*column, token))
            moved.append((*column[1:], token))
        self.columns = moved[emitted - 1 :]


def lookahead_proposer(argument: str, setup: ProposerSetup) -> LookaheadProposer:
    """Make `lookahead` or `lookahead:WxNxG`."""
    return LookaheadProposer(setup, parse_lookahead_size(argument))


def parse_lookahead_size(argument: str) -> Sizes:
    """Parse the sizes of `lookahead:WxNxG`. Without an argument, return the default sizes.

    Raises:
        OutriderError: the argument does not have this form, or a size is out of range.
    """
    if not argument:
        return Sizes()
    sizes = [parse_count(size) or 0 for size in argument.split("x")]
    too_large = any(size > most for size, most in zip(sizes, _MAX_SIZES, strict=False))
    if len(sizes) != 3 or min(sizes) < 1 or sizes[1] < 2 or too_large:
        raise OutriderError(
            f"lookahead:{argument} does not name valid sizes; write lookahead:10x3x8 for a window"
            " of 10 columns, n-grams of 3 tokens (2 at least), and 8 n-grams kept for a first"
            f" token; {'x'.join(map(str, _MAX_SIZES))} at most"
        )
    return Sizes(window=sizes[0], size=sizes[1], guesses=sizes[2])


class LookaheadProposer:
    """Drafts n-grams of the pool, and adds window tokens that generate new ones.

    A window token is hardly ever accepted itself, but every accepted draft token was once generated by window tokens.
    So the acceptance probability of a window token is the number of accepted draft tokens per window token so far. A
    planner trims window tokens by it like any draft tokens. If it leaves window tokens out, the remaining ones earn
    more, until the planner includes more of them again.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, sizes: Sizes | None = None) -> None:
        """Use a window of `sizes`. With a small budget it has fewer columns: half of the budget is for the window."""
        self._device = setup.device
        self._sizes = sizes or Sizes()
        self._windows: dict[int, _SequenceWindow] = {}  # by slot
        self._acceptance = AcceptanceEstimator()
        self._num_accepted = 0.0  # decayed count of accepted draft tokens
        self._num_window_tokens = 0.0  # decayed count of window tokens that were scored
        # By slot: draft tokens from the pool and their kinds, in this round.
        self._drafted: dict[int, tuple[TreeBuilder, list[Hashable]]] = {}
        self._trees: dict[int, TreeBuilder] = {}  # by slot: the same with the window tokens

    def admit(self, slot: int, request: Request) -> None:
        self._windows[slot] = _SequenceWindow(_NgramPool(self._sizes.guesses), random.Random(request.seed))

    def propose(self, batch: Batch) -> Draft:
        self._drafted = {}
        self._trees = {}
        builders = [self._draft_tree(seq, budget) for seq, budget in zip(batch.seqs, batch.draft_budget, strict=True)]
        return build_draft(builders, self._device)

    def commit(self, round: Round) -> None:
        self._num_accepted *= _DECAY
        self._num_window_tokens *= _DECAY
        scored = _scored_trees(round)
        for b, (seq, emitted) in enumerate(zip(round.batch.seqs, round.emitted, strict=True)):
            if not emitted or seq.slot not in self._drafted:
                continue
            self._acceptance.learn(*self._drafted[seq.slot], emitted)
            self._num_accepted += len(self._trees[seq.slot].path(emitted))
            window = self._windows[seq.slot]
            predicted = _predictions(window.paths(), scored[b])
            pairs = zip(window.columns, predicted, strict=True)
            self._num_window_tokens += sum(len(column) for column, token in pairs if token is not None)
            window.move(predicted, seq.token_ids, len(emitted))

    def release(self, slot: int) -> None:
        self._windows.pop(slot, None)

    def _draft_tree(self, seq: SequenceState, budget: int) -> TreeBuilder:
        window = self._windows[seq.slot]
        column_size = self._sizes.size - 1
        pool_tree, kinds = self._pool_tree(window.pool.after(seq.token_ids[-1]) if budget else ())
        width = min(self._sizes.window, max(budget - len(kinds), budget // 2) // column_size)
        pool_budget = budget - width * column_size
        pool_tree = TreeBuilder(
            pool_tree.tokens[:pool_budget], pool_tree.parent[:pool_budget], pool_tree.accept_prob[:pool_budget]
        )
        self._drafted[seq.slot] = pool_tree, kinds[:pool_budget]
        window.resize(width, column_size, seq.token_ids)
        self._trees[seq.slot] = self._with_window(pool_tree, window.paths())
        return self._trees[seq.slot]

    def _pool_tree(self, ngrams: Sequence[Ngram]) -> tuple[TreeBuilder, list[Hashable]]:
        """Return the tree of n-grams and the kinds of its nodes: their depth, and the number of later n-grams."""
        builder = TreeBuilder()
        kinds: list[Hashable] = []
        for age, ngram in enumerate(ngrams):
            accept_prob: list[float] = []
            for depth in range(len(ngram)):
                parent_prob = accept_prob[-1] if accept_prob else 1.0
                accept_prob.append(parent_prob * self._acceptance.accept_prob((depth, age), _PRIOR))
            num_new = _add_path(builder, ngram, accept_prob)
            kinds += [(depth, age) for depth in range(len(ngram) - num_new, len(ngram))]
        ordered, order = _likeliest_first(builder)
        return ordered, tree.pick(kinds, order)

    def _with_window(self, pool_tree: TreeBuilder, paths: Sequence[Ngram]) -> TreeBuilder:
        """Return the tree with the window tokens added."""
        builder = TreeBuilder(pool_tree.tokens[:], pool_tree.parent[:], pool_tree.accept_prob[:])
        accept_prob = self._window_accept_prob()
        for path in paths:
            _add_path(builder, path, [accept_prob] * len(path))
        return _likeliest_first(builder)[0]

    def _window_accept_prob(self) -> float:
        """Return the number of accepted draft tokens per window token."""
        accepted = self._num_accepted + _WINDOW_PRIOR_WEIGHT * _WINDOW_PRIOR
        return min(accepted / (self._num_window_tokens + _WINDOW_PRIOR_WEIGHT), 1.0)


def _add_path(builder: TreeBuilder, path: Sequence[int], accept_prob: Sequence[float]) -> int:
    """Add a path below the root. Return the number of nodes that were not there yet."""
    known = {pair: node for node, pair in enumerate(zip(builder.parent, builder.tokens, strict=True))}
    size_before = len(builder.tokens)
    node = -1
    for token, prob in zip(path, accept_prob, strict=True):
        child = known.get((node, token))
        if child is None:
            parent_prob = builder.accept_prob[node] if node >= 0 else 1.0
            child = builder.add(token, node, min(prob, parent_prob))
        node = child
    return len(builder.tokens) - size_before


def _likeliest_first(builder: TreeBuilder) -> tuple[TreeBuilder, list[int]]:
    """Return the tree with likelier nodes first, and the old index of each node."""
    # Parents stay before their children, because they came first and the sort is stable.
    order = sorted(range(len(builder.tokens)), key=lambda node: -builder.accept_prob[node])
    return builder.select(order), order


class _ScoredTree(NamedTuple):
    """The verified tree of a sequence, and the target's choices."""

    best: list[int]  # likeliest token at the root and after each node
    tokens: list[int]
    parents: list[int]


def _scored_trees(round: Round) -> list[_ScoredTree]:
    """Return the verified trees of all sequences, with one copy from the device."""
    best = round.scores.best if round.scores.best is not None else round.scores.logits.argmax(-1)
    size = round.draft.size
    host = torch.cat([best, round.draft.tokens, round.draft.parent], 1).tolist()
    trees = []
    for values, width in zip(host, round.draft.width, strict=True):
        tokens = values[1 + size : 1 + size + width]
        parents = values[1 + 2 * size : 1 + 2 * size + width]
        trees.append(_ScoredTree(values[: 1 + width], tokens, parents))
    return trees


def _predictions(paths: Sequence[Ngram], scored: _ScoredTree) -> list[int | None]:
    """Return the target's choice after each path; None if the path was not scored."""
    children: dict[tuple[int, int], int] = {}
    for node, pair in enumerate(zip(scored.parents, scored.tokens, strict=True)):
        children.setdefault(pair, node)
    predictions: list[int | None] = []
    for path in paths:
        last: int | None = -1
        for token in path:
            last = None if last is None else children.get((last, token))
        predictions.append(None if last is None else scored.best[1 + last])
    return predictions
