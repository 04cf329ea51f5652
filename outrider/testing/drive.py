"""Helpers of the conformance suite: random drafts, rounds built by hand, and runs of a proposer with a toy target."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.proposer import Proposer
from outrider.core.types import Batch, Draft, DraftBudget, DraftKind, Request, Round, Scores, SequenceState
from outrider.testing.toy_target import ToyTarget

_PROMPT_TOKENS = 5  # length of a prompt of `FuzzedRun`
_FIRST_CHUNK = 3  # tokens of a prompt in its first round


class ConformanceError(AssertionError):
    """An implementation violates its protocol. The message says which requirement."""


def expect(condition: bool, message: str) -> None:
    """Check a requirement of a protocol.

    Raises:
        ConformanceError: `condition` is False. The text is `message`.
    """
    if not condition:
        raise ConformanceError(message)


def random_tree(rows: Sequence[int], vocab: int, rng: random.Random, *, chain: bool = False) -> Draft:
    """Return a draft of random shape and tokens, with `rows[b]` one-hot nodes for sequence b.

    Args:
        rows: the number of nodes of each sequence.
        vocab: the vocabulary size.
        rng: the random number generator.
        chain: make chains instead of trees.
    """
    size = max(rows)
    nodes = range(size * len(rows))
    tokens = torch.tensor([rng.randrange(vocab) for _ in nodes], dtype=torch.int64).view(len(rows), size)
    if chain:
        return tree.chain(tokens, tuple(rows))
    parents = torch.tensor([rng.randint(-1, node % size - 1) for node in nodes], dtype=torch.int64)
    return tree.one_hot_tree(tokens, parents.view(len(rows), size), tuple(rows))


@dataclass(frozen=True, slots=True)
class FuzzedRun:
    """Runs a proposer with a toy target. It commits given tokens in rounds of random batches and draft budgets."""

    target: ToyTarget
    proposer: Proposer
    rng: random.Random

    def propose_after(
        self, text: Sequence[int], length: int, params: SamplingParams, *, slots: Sequence[int], budget: int
    ) -> list[tuple[list[tuple[int, int, int]], torch.Tensor | None]]:
        """Commit `text[:length]` in each slot, and return what the proposer then drafts there.

        Returns:
            For each slot its nodes, as (token, parent, kind), and their q [N, V]; None if the draft has no q.
        """
        seqs = self._admit(text, params, slots)
        self._commit_until(seqs, text, length)
        batch = self._batch(seqs, [budget] * len(seqs))
        draft = self._propose(batch)
        self._commit_round(batch, draft, text)
        self._release(seqs)
        return [_nodes(draft, b) for b in range(len(seqs))]

    def commit_text(self, text: Sequence[int], length: int, params: SamplingParams, *, slots: Sequence[int]) -> None:
        """Commit `text[:length]` in each slot, and release the slots."""
        seqs = self._admit(text, params, slots)
        self._commit_until(seqs, text, length)
        self._release(seqs)

    def _admit(self, text: Sequence[int], params: SamplingParams, slots: Sequence[int]) -> list[SequenceState]:
        seqs = [make_seq(list(text[:_PROMPT_TOKENS]), slot, params) for slot in sorted(slots)]
        for seq in seqs:
            self.target.cache.admit(seq.slot, seq.token_ids)
            self.proposer.admit(seq.slot, seq.request)
        return seqs

    def _release(self, seqs: Sequence[SequenceState]) -> None:
        for seq in seqs:
            self.target.cache.release(seq.slot)
            self.proposer.release(seq.slot)

    def _commit_until(self, seqs: Sequence[SequenceState], text: Sequence[int], length: int) -> None:
        """Run rounds until each sequence has `length` tokens."""
        while any(len(seq.token_ids) < length for seq in seqs):
            running = [seq for seq in seqs if len(seq.token_ids) < length]
            running = running if len(running) == 1 or self.rng.random() < 0.5 else running[:-1]
            budget = [self.rng.randint(0, min(6, length - len(seq.token_ids) - 1)) for seq in running]
            batch = self._batch(running, budget)
            self._commit_round(batch, self._propose(batch), text)

    def _batch(self, seqs: Sequence[SequenceState], budget: Sequence[int]) -> Batch:
        """Return a batch with these draft budgets. A prompt is fed in two rounds, everything else at once."""
        feeds = []
        for seq in seqs:
            missing = seq.token_ids[seq.num_cached_tokens :]
            feeds.append(tuple(missing[:_FIRST_CHUNK] if len(missing) == _PROMPT_TOKENS else missing))
        batch = Batch(
            seqs=tuple(seqs),
            start=tuple(seq.num_cached_tokens for seq in seqs),
            feed=tuple(feeds),
            budget=DraftBudget(tuple(budget)),
        )
        allowed = tuple(count if emits else 0 for count, emits in zip(budget, batch.emits, strict=True))
        return batch.limited(allowed)

    def _propose(self, batch: Batch) -> Draft:
        """Return the draft of the proposer, after checking it."""
        draft = self.proposer.propose(batch)
        check_draft(draft, batch, self.target.vocab)
        return draft

    def _commit_round(self, batch: Batch, draft: Draft, text: Sequence[int]) -> None:
        """Accept the draft tokens that agree with `text`, and commit the round to the target and the proposer."""
        scores = self.target.score(batch, draft)
        paths = []
        emitted = []
        for b, seq in enumerate(batch.seqs):
            begin = len(seq.token_ids)
            path: list[int] = []
            last = -1
            for node in range(draft.width[b]):
                expected = text[begin + len(path)]
                if int(draft.parent[b, node]) == last and int(draft.tokens[b, node]) == expected:
                    path.append(node)
                    last = node
            paths.append(tuple(path))
            emitted.append(tuple(text[begin : begin + len(path) + 1]) if batch.emits[b] else ())
        round = make_round(batch, draft, scores, paths, emitted)
        self.target.cache.commit(round)
        self.proposer.commit(round)
        append(round)


def check_draft(draft: Draft, batch: Batch, vocab: int) -> None:
    """Check the requirements on every draft: shapes, order of nodes, budget, token ids, probabilities, and q [B, N, V].

    Raises:
        ConformanceError: a requirement is violated. The message says which one.
    """
    batch_size, size = len(batch.seqs), draft.size
    shape = (batch_size, size)
    expect(draft.tokens.shape == draft.parent.shape == draft.kind.shape == shape, "its tensors must be [B, N]")
    expect(
        all(width <= budget for width, budget in zip(draft.width, batch.draft_budget, strict=True)),
        "its draft exceeds batch.draft_budget",
    )
    expect(bool((draft.count <= torch.tensor(draft.width)).all()), "count must not exceed width")
    valid = tree.valid_nodes(draft)
    order = torch.arange(size)
    is_before = (draft.parent < order) & (draft.parent >= -1)
    expect(bool((is_before | ~valid).all()), "parents must precede children")
    is_chain = bool(((draft.parent == order - 1) | ~valid).all())
    expect(not draft.chain or is_chain, "chain is True, but a draft is a tree")
    expect(bool(((draft.tokens >= 0) & (draft.tokens < vocab) | ~valid).all()), "tokens must be ids of the target")
    if draft.accept_prob is not None:
        expect(tuple(map(len, draft.accept_prob)) == draft.width, "accept_prob must be [B][width]")
        rising = any(a < b for probs in draft.accept_prob for a, b in pairwise(probs))
        in_range = all(0 <= prob <= 1 for probs in draft.accept_prob for prob in probs)
        expect(not rising and in_range, "accept_prob must be from 0 to 1, and must not rise from node to node")
    sampled = valid & (draft.kind != DraftKind.ONE_HOT)
    expect(draft.q is not None or not bool(sampled.any()), "sampled nodes need q")
    if draft.q is not None:
        q = draft.q.padded()
        token_prob = q.gather(-1, draft.tokens[..., None])[..., 0]
        expect(bool((token_prob[sampled] > 0).all()), "q of a sampled node must be above 0 for its token")
        expect(bool(((q.sum(-1) - 1).abs()[sampled] < 1e-4).all()), "q must sum to 1")
        expect(bool((q[valid & (draft.kind == DraftKind.ONE_HOT)] == 0).all()), "q of a one-hot node must be zero")


def random_text(target: ToyTarget, length: int, rng: random.Random) -> list[int]:
    """Return random tokens from the target's distribution: it accepts some draft tokens."""
    text = [rng.randrange(target.vocab) for _ in range(2)]
    while len(text) < length:
        text += rng.choices(range(target.vocab), target.table[text[-2], text[-1]].softmax(-1).tolist())
    return text


def make_seq(text: list[int], slot: int, params: SamplingParams | None = None) -> SequenceState:
    """Return a sequence in `slot` with the prompt `text`. It never ends, and it is greedy without `params`."""
    request = Request(
        id=slot,
        prompt_token_ids=tuple(text),
        params=params or SamplingParams(),
        seed=7,
        end_ids=frozenset(),
        max_tokens=10**6,
    )
    return SequenceState(request=request, slot=slot, token_ids=text)


def make_round(
    batch: Batch, draft: Draft, scores: Scores, paths: Sequence[tuple[int, ...]], emitted: Sequence[tuple[int, ...]]
) -> Round:
    """Return the round that accepts the nodes `paths` [B] and emits the tokens `emitted` [B]."""
    zeros = tuple((0.0,) * len(tokens) for tokens in emitted)
    failed = (False,) * len(batch.seqs)
    return Round(
        batch=batch,
        draft=draft,
        scores=scores,
        path=tuple(paths),
        emitted=tuple(emitted),
        sampled_logprob=zeros,
        failed=failed,
    )


def append(round: Round) -> None:
    """Append the emitted tokens to the sequences, as the scheduler does."""
    for b, seq in enumerate(round.batch.seqs):
        seq.num_cached_tokens = round.batch.start[b] + len(round.batch.feed[b]) + len(round.path[b])
        seq.token_ids += round.emitted[b]


def _nodes(draft: Draft, b: int) -> tuple[list[tuple[int, int, int]], torch.Tensor | None]:
    """Return the nodes of sequence b as (token, parent, kind), and q [N, V], which is 0 for one-hot nodes."""
    width = draft.width[b]
    kind = draft.kind[b, :width]
    fields = (draft.tokens[b, :width], draft.parent[b, :width], kind)
    nodes = list(zip(*(field.tolist() for field in fields), strict=True))
    if draft.q is None:
        return nodes, None
    return nodes, draft.q.padded()[b, :width] * (kind != DraftKind.ONE_HOT)[:, None]
