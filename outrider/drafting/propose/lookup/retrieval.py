"""Draft what followed the longest suffix of the text in a datastore of other texts (REST, He et al. 2023)."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, count
from typing import NamedTuple

from outrider.core.proposer import ProposerSetup, parse_count
from outrider.core.types import Batch, Draft, Needs, Request, Round
from outrider.drafting.propose.acceptance import MIN_ACCEPT_PROB, AcceptanceEstimator
from outrider.drafting.propose.lookup.datastore import LONGEST, SORTED, Datastore, fingerprint, vocabulary
from outrider.drafting.propose.tree_builder import TreeBuilder, build_draft
from outrider.errors import OutriderError

SHORTEST = 2  # tokens of a suffix; a single token predicts too little
_PRIOR_COUNT = 40  # occurrences added to the denominator of the prior, divided by the square of the matched length
_MAX_SAMPLES = 128  # occurrences that a lookup considers
_MAX_DEPTH = SORTED - LONGEST  # draft tokens; up to there, occurrences with equal continuations are adjacent
_MAX_COUNT_BITS = 4  # larger counts share the acceptance statistics of counts with this many binary digits
_SHARE_LEVELS = 8


class _Candidate(NamedTuple):
    """A draft token that may be added, and the occurrences that contain it. The likeliest one is the smallest."""

    negative_prob: float  # minus the acceptance probability
    order: int  # among equally likely candidates, the earlier one is smaller
    token: int
    parent: int  # node
    depth: int  # 1 for a child of the root
    occurrences: range  # of the samples
    kind: Hashable


class RetrievalProposer:
    """Looks up the longest known suffix of a sequence, and drafts what most often followed it.

    The continuations of the occurrences form a trie, whose likeliest nodes are the draft. The acceptance probability of
    a node is learned by kind: the length of the match, the number of occurrences, and the share of them that contain
    the node. All sequences share the datastore. It never changes, so no text passes from one sequence to another.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, store: Datastore, *, shortest: int = SHORTEST) -> None:
        """Look up suffixes of `LONGEST` down to `shortest` tokens."""
        assert 1 <= shortest <= LONGEST
        self._device = setup.device
        self._store = store
        self._shortest = shortest
        self._vocab = min(setup.vocab, store.separator)  # larger ids are never drafted
        self._acceptance = AcceptanceEstimator()
        self._order = count()
        self._drafted: dict[int, tuple[TreeBuilder, list[Hashable]]] = {}  # by slot: tree and kinds of this round

    def admit(self, slot: int, request: Request) -> None:
        pass

    def propose(self, batch: Batch) -> Draft:
        pairs = zip(batch.seqs, batch.draft_budget, strict=True)
        self._drafted = {seq.slot: self._draft_tree(seq.token_ids, budget) for seq, budget in pairs}
        return build_draft([builder for builder, _ in self._drafted.values()], self._device)

    def commit(self, round: Round) -> None:
        for seq, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if seq.slot in self._drafted:
                self._acceptance.learn(*self._drafted[seq.slot], emitted)

    def release(self, slot: int) -> None:
        self._drafted.pop(slot, None)

    def _draft_tree(self, tokens: Sequence[int], budget: int) -> tuple[TreeBuilder, list[Hashable]]:
        """Return the likeliest nodes of the trie, likeliest first, and their kinds."""
        builder = TreeBuilder()
        kinds: list[Hashable] = []
        match = self._store.find(tokens, shortest=self._shortest, longest=LONGEST) if budget else None
        if not match:
            return builder, kinds
        following = self._store.following(match, samples=_MAX_SAMPLES, depth=min(budget, _MAX_DEPTH))
        root = _Candidate(-1.0, 0, -1, -1, 0, range(len(following[0])), None)
        queue = [root]
        while queue and len(builder.tokens) < budget:
            candidate = heappop(queue)
            node = -1
            if candidate is not root:
                node = builder.add(candidate.token, candidate.parent, -candidate.negative_prob)
                kinds.append(candidate.kind)
            if candidate.depth < len(following):
                for child in self._children(candidate, node, match.size, following[candidate.depth], budget):
                    heappush(queue, child)
        return builder, kinds

    def _children(
        self, parent: _Candidate, node: int, match_size: int, next_tokens: list[int], most: int
    ) -> Iterator[_Candidate]:
        """Yield the `most` most frequent children of a candidate, which has become `node`.

        Args:
            node: its node in the tree.
            match_size: tokens of the matching suffix.
            next_tokens: [S] the token of each sample at the depth of the children.
            most: number of children.
        """
        total = len(parent.occurrences)
        matched = min(match_size + parent.depth, LONGEST)
        count_bits = min(total.bit_length(), _MAX_COUNT_BITS)
        # Samples are sorted by their continuations, so equal tokens are adjacent.
        counts = Counter(next_tokens[parent.occurrences.start : parent.occurrences.stop])
        starts = accumulate(counts.values(), initial=parent.occurrences.start)
        groups = sorted(zip(counts.items(), starts, strict=False), key=lambda group: -group[0][1])
        for (token, token_count), start in groups[:most]:  # the most frequent tokens
            if token < self._vocab:
                kind = (matched, count_bits, token_count * _SHARE_LEVELS // total)
                prior = token_count / (total + _PRIOR_COUNT / matched**2)
                accept_prob = self._acceptance.accept_prob(kind, prior)
                negative_prob = parent.negative_prob * accept_prob
                if negative_prob <= -MIN_ACCEPT_PROB:
                    occurrences = range(start, start + token_count)
                    order = next(self._order)
                    yield _Candidate(negative_prob, order, token, node, parent.depth + 1, occurrences, kind)


def retrieval_proposer(argument: str, setup: ProposerSetup) -> RetrievalProposer:
    """Make `retrieval:DIR`, or `retrieval:DIR:MIN` for suffixes of MIN tokens or more.

    Raises:
        OutriderError: the folder is not a datastore of the target's tokens, or MIN is out of range.
    """
    store, folder, shortest = open_datastore(argument)
    if store.header.tokenizer != fingerprint(setup.tokenizer):
        raise OutriderError(
            f"the datastore in {folder} was made with another tokenizer than the target's ({store.header.vocab} and"
            f" {vocabulary(setup.tokenizer)} ids); build it again with outrider index, and name this target there"
        )
    return RetrievalProposer(setup, store, shortest=shortest)


class OpenedDatastore(NamedTuple):
    """The parsed argument of `retrieval`."""

    store: Datastore
    folder: str
    shortest: int  # tokens of the shortest suffix to look up


def open_datastore(argument: str) -> OpenedDatastore:
    """Parse the argument of `retrieval:DIR[:MIN]` and open the datastore.

    Raises:
        OutriderError: the folder is not a datastore, or MIN is out of range.
    """
    folder, _, number = argument.rpartition(":")
    if not folder or not number.isdecimal():
        folder = argument
        number = ""
    if not folder:
        raise OutriderError("retrieval needs the folder of a datastore; write retrieval:DIR")
    shortest = (parse_count(number) or 0) if number else SHORTEST
    if not 1 <= shortest <= LONGEST:
        raise OutriderError(f"retrieval cannot look up suffixes of {shortest} tokens; use 1 to {LONGEST}")
    return OpenedDatastore(Datastore.open(folder), folder, shortest)
