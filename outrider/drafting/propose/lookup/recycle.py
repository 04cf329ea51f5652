"""Token recycling: draft tokens that the target's earlier logits found likely (Luo et al. 2024).

A pass scores every draft token, accepted or not, and so shows for free what may follow it. This is
stored under the last tokens of the draft token's path, and a tree grows from it, likeliest node
first. The paper's table has single tokens, fills a fixed tree, and is kept between requests. This
one prefers longer suffixes, also uses the prompt, uses the successors of similar tokens for unknown
ones, and learns acceptance probabilities. Sequences share only these probabilities.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from math import exp
from typing import NamedTuple

import torch

from outrider.core import tree
from outrider.core.proposer import ProposerSetup
from outrider.core.types import Batch, Draft, Needs, Request, Round, SequenceState
from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.tree_builder import TreeBuilder, build_draft

_NUM_SUCCESSORS = 8  # kept for a suffix
_MAX_SUFFIX = 4  # tokens
_SUFFIX_SIZES = range(_MAX_SUFFIX, 0, -1)
# Sources of successors: 1 to _MAX_SUFFIX are the sizes of matching suffixes.
_FREQUENT = 0  # the most frequent tokens of the output
_SIMILAR = _MAX_SUFFIX + 1  # what followed a similar token
_SOURCE_PRIORS = (0.2, 0.4, 0.6, 0.8, 0.85, 0.6)  # prior acceptance of the likeliest successor, by source
_LOGIT_STEP = 1.5  # difference of logits between two levels
_EVEN_LEVEL = 4  # level of a token that is as likely as its strongest rival; there are as many above and below
_PROMPT_LEVEL = 2 * _EVEN_LEVEL + 1  # level of a token from the prompt, which has no logits
_KINDS_PER_SOURCE = _NUM_SUCCESSORS * (_PROMPT_LEVEL + 1)
MAX_SUFFIXES = 1 << 16  # stored for a sequence


class _Successors(NamedTuple):  # dozens are made in a round, and a frozen dataclass takes four times as long to make
    """Tokens that may follow a suffix, likeliest first."""

    tokens: Sequence[int]
    logits: Sequence[float] | None  # None: tokens from the prompt, latest first

    def kind(self, source: int, rank: int) -> int:
        """Return the kind of a draft token: its source, its rank, and its logit in comparison with its rival."""
        if self.logits is None:
            level = _PROMPT_LEVEL
        else:
            steps = (self.logits[rank] - self.logits[not rank]) / _LOGIT_STEP
            level = _EVEN_LEVEL + round(max(min(steps, _EVEN_LEVEL), -_EVEN_LEVEL))
        return source * _KINDS_PER_SOURCE + level * _NUM_SUCCESSORS + rank


class _SuccessorTable:
    """The suffixes of one sequence, and the tokens that may follow each."""

    def __init__(self, num_prompt_tokens: int) -> None:
        """Add the first `num_prompt_tokens` tokens as they are. The successors of later tokens come from logits."""
        self._num_prompt_tokens = num_prompt_tokens
        self._next_position = 1
        self._successors: dict[tuple[int, ...], _Successors] = {}
        self._output_counts: Counter[int] = Counter()
        self._frequent: _Successors | None = None  # cache of `_most_frequent`, until more is emitted

    def add_prompt(self, tokens: Sequence[int], end: int) -> None:
        """Add the tokens of the prompt before position `end`."""
        stop = min(end, self._num_prompt_tokens)
        for position in range(self._next_position, stop):
            token = tokens[position]
            for start in reversed(range(max(position - _MAX_SUFFIX, 0), position)):
                suffix = tuple(tokens[start:position])
                known = self._successors.get(suffix)
                others = [other for other in known.tokens if other != token] if known else []
                self._successors[suffix] = _Successors([token, *others[: _NUM_SUCCESSORS - 1]], None)
        self._next_position = max(self._next_position, stop)

    def add_output(self, tokens: Sequence[int]) -> None:
        """Count tokens that the sequence has emitted."""
        self._output_counts.update(tokens)
        self._frequent = None

    def put(self, suffix: tuple[int, ...], successors: _Successors) -> None:
        """Store the successors under the last token of the suffix, under its last two tokens, and so on."""
        for size in range(1, len(suffix) + 1):
            self._successors[suffix[-size:]] = successors
        if len(self._successors) > MAX_SUFFIXES:
            for oldest in list(islice(self._successors, MAX_SUFFIXES // 4)):
                del self._successors[oldest]

    def candidates(self, suffix: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yield tokens that may follow a suffix and their kinds, likely ones first."""
        size, successors = self._longest_match(suffix)
        sources = [(size, successors)]
        if size < 2:
            sources.append((_SIMILAR, self._similar(suffix)))
        if not size:
            sources.append((_FREQUENT, self._most_frequent()))
        yielded: set[int] = set()
        for source, known in sources:
            if known is None:
                continue
            for rank, token in enumerate(known.tokens):
                if token not in yielded:
                    yielded.add(token)
                    yield token, known.kind(source, rank)

    def _longest_match(self, suffix: tuple[int, ...]) -> tuple[int, _Successors | None]:
        """Return the size of the longest known suffix, and its successors."""
        for size in _SUFFIX_SIZES:
            successors = self._successors.get(suffix[-size:])
            if successors is not None:
                return min(size, len(suffix)), successors
        return 0, None

    def _similar(self, suffix: tuple[int, ...]) -> _Successors | None:
        """Return what may follow another token in place of the last one: the likeliest that was scored at this place.

        That token was a draft token in the last pass. It was scored although it was not accepted.
        """
        _, rivals = self._longest_match(suffix[:-1])
        before = suffix[-_MAX_SUFFIX:-1]
        for token in rivals.tokens if rivals else ():
            successors = self._successors.get((*before, token))
            if successors is not None and token != suffix[-1]:
                return successors
        return None

    def _most_frequent(self) -> _Successors:
        if self._frequent is None:
            tokens = [token for token, _ in self._output_counts.most_common(_NUM_SUCCESSORS)]
            self._frequent = _Successors(tokens, None)
        return self._frequent


class RecycleProposer:
    """Grows a tree, likeliest node first, from what the target's logits have shown after the same suffixes.

    A prompt is added in the rounds in which the target prefills it, so that a long prompt does not
    delay sequences that decode.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup) -> None:
        self._device = setup.device
        self._tables: dict[int, _SuccessorTable] = {}  # by slot
        self._acceptance = AcceptanceEstimator()
        self._accept_probs: dict[int, float] = {}  # cache of `_accept_prob`, until more is learned
        self._drafted: dict[int, tuple[TreeBuilder, list[Hashable]]] = {}  # by slot: tree and kinds of this round

    def admit(self, slot: int, request: Request) -> None:
        self._tables[slot] = _SuccessorTable(len(request.prompt_token_ids))

    def propose(self, batch: Batch) -> Draft:
        self._drafted = {}
        for seq, start, feed in zip(batch.seqs, batch.start, batch.feed, strict=True):
            self._tables[seq.slot].add_prompt(seq.token_ids, start + len(feed))
        builders = [
            self._draft_tree(seq, budget, batch.budget.min_path_prob)
            for seq, budget in zip(batch.seqs, batch.draft_budget, strict=True)
        ]
        return build_draft(builders, self._device)

    def commit(self, round: Round) -> None:
        for seq, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if seq.slot in self._drafted:
                self._acceptance.learn(*self._drafted[seq.slot], emitted)
            self._tables[seq.slot].add_output(emitted)
        self._accept_probs = {}
        self._store_successors(round)

    def release(self, slot: int) -> None:
        self._tables.pop(slot, None)

    def _draft_tree(self, seq: SequenceState, budget: int, min_path_prob: float) -> TreeBuilder:
        builder = TreeBuilder()
        kinds: list[Hashable] = []
        self._drafted[seq.slot] = builder, kinds
        if not budget:
            return builder
        table = self._tables[seq.slot]
        order = count()
        # The best remaining candidate below each node: minus its probability, order, token, kind, and parent.
        queue: list[tuple[float, int, int, int, _Parent]] = []

        def push_next(parent: _Parent, most: float) -> None:
            token, kind = next(parent.candidates, (-1, -1))
            if kind >= 0:
                accept_prob = min(parent.accept_prob * self._accept_prob(kind), most)
                heappush(queue, (-accept_prob, next(order), token, kind, parent))

        suffix = tuple(seq.token_ids[-_MAX_SUFFIX - 1 :])
        push_next(_Parent(-1, 1.0, suffix, table.candidates(suffix)), 1.0)
        while queue and len(kinds) < budget and -queue[0][0] >= min_path_prob:
            negative_prob, _, token, kind, parent = heappop(queue)
            accept_prob = -negative_prob
            node = builder.add(token, parent.node, accept_prob)
            kinds.append(kind)
            push_next(parent, accept_prob)
            if len(kinds) < budget:
                suffix = (*parent.suffix[-_MAX_SUFFIX:], token)
                push_next(_Parent(node, accept_prob, suffix, table.candidates(suffix)), accept_prob)
        return builder

    def _accept_prob(self, kind: int) -> float:
        """Return the probability that a draft token of this kind is accepted if its parent is."""
        accept_prob = self._accept_probs.get(kind)
        if accept_prob is None:
            accept_prob = self._accept_probs[kind] = self._acceptance.accept_prob(kind, _prior(kind))
        return accept_prob

    def _store_successors(self, round: Round) -> None:
        """Store what may follow each scored node. Needs one copy from the device."""
        size = 1 + round.draft.size
        seqs = [b for b, emitted in enumerate(round.emitted) if emitted]
        nodes = [b * size + node for b in seqs for node in range(1 + round.draft.width[b])]
        if not nodes:
            return
        logits = round.scores.logits.flatten(0, 1)
        if len(nodes) < len(logits):
            logits = logits[tree.upload(nodes, logits.device)]
        best, ids = logits.topk(min(_NUM_SUCCESSORS, logits.shape[1]))
        # Ids are far below 2**24, so float32 holds them exactly.
        tensors = (best, ids, round.draft.tokens, round.draft.parent)
        host = iter(torch.cat([tensor.flatten() for tensor in tensors]).tolist())
        best_logits, float_ids, float_tokens, float_parents = (list(islice(host, part.numel())) for part in tensors)
        successors = list(map(int, float_ids))
        tokens = list(map(int, float_tokens))
        parents = list(map(int, float_parents))
        num_successors = ids.shape[1]
        begins = iter(range(0, len(best_logits), num_successors))
        for b in seqs:
            seq = round.batch.seqs[b]
            first = b * (size - 1)
            suffixes = [tuple(seq.token_ids[-_MAX_SUFFIX:])]
            for node in range(first, first + round.draft.width[b]):
                suffixes.append((*suffixes[parents[node] + 1][1 - _MAX_SUFFIX :], tokens[node]))
            for suffix, begin in zip(suffixes, begins, strict=False):
                end = begin + num_successors
                self._tables[seq.slot].put(suffix, _Successors(successors[begin:end], best_logits[begin:end]))


class _Parent(NamedTuple):
    """A node of a growing tree that may get more children."""

    node: int
    accept_prob: float
    suffix: tuple[int, ...]
    candidates: Iterator[tuple[int, int]]  # tokens and kinds that have not been tried yet


def _prior(kind: int) -> float:
    source, level_and_rank = divmod(kind, _KINDS_PER_SOURCE)
    level, rank = divmod(level_and_rank, _NUM_SUCCESSORS)
    if level == _PROMPT_LEVEL:
        return _SOURCE_PRIORS[source] / (1 + rank)
    return _SOURCE_PRIORS[source] / (1 + exp((_EVEN_LEVEL - level) * _LOGIT_STEP))
