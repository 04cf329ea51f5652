"""What the conformance suite drives implementations with: texts, trees, and lives of admit, propose and commit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Draft, DraftKind, Request, Round, Scores, SequenceState
from outrider.propose.base import Proposer
from outrider.testing.toy_target import ToyTarget


class ConformanceError(AssertionError):
    """An implementation breaks the law of its protocol; the message names the law."""


def expect(good: bool, law: str) -> None:
    """Hold an implementation to a law of its protocol.

    Raises:
        ConformanceError: it is broken; the message is `law`.
    """
    if not good:
        raise ConformanceError(law)


def random_tree(rows: Sequence[int], vocab: int, chance: random.Random, *, chain: bool = False) -> Draft:
    """A draft of `rows[b]` one-hot nodes in row b, of random shape and tokens."""
    size = max(rows)
    tokens = torch.tensor([[chance.randrange(vocab) for _ in range(size)] for _ in rows], dtype=torch.int64)
    if chain:
        return tree.chain(tokens, tuple(rows))
    parents = [[chance.randint(-1, node - 1) for node in range(size)] for _ in rows]
    return tree.one_hot_tree(tokens, torch.tensor(parents, dtype=torch.int64), tuple(rows))


@dataclass(frozen=True, slots=True)
class FuzzedRun:
    """A proposer beside a toy target that commits given texts, with fuzzed budgets."""

    target: ToyTarget
    proposer: Proposer
    chance: random.Random

    @classmethod
    def fresh(cls, target: ToyTarget, proposer: Proposer, chance: random.Random) -> FuzzedRun:
        """A life of which no text is committed yet."""
        return cls(target, proposer, chance)

    def propose_after(
        self, text: Sequence[int], length: int, params: SamplingParams, *, slots: Sequence[int], budget: int
    ) -> list[tuple[list[tuple[int, int, int]], torch.Tensor | None]]:
        """What it proposes for each slot once `text[:length]` is committed there."""
        rows = self._admit(text, params, slots)
        self._commit_until(rows, text, length)
        batch = self._batch(rows, [budget] * len(rows))
        draft = self._checked(batch)
        self._settle(batch, draft, text)
        self._release(rows)
        return [_nodes(draft, b) for b in range(len(rows))]

    def live(self, text: Sequence[int], length: int, params: SamplingParams, *, slots: Sequence[int]) -> None:
        """Commit a text in some slots, and leave."""
        rows = self._admit(text, params, slots)
        self._commit_until(rows, text, length)
        self._release(rows)

    def _admit(self, text: Sequence[int], params: SamplingParams, slots: Sequence[int]) -> list[SequenceState]:
        rows = [make_row(list(text[:5]), slot, params) for slot in sorted(slots)]
        for row in rows:
            self.target.cache.admit(row.slot, row.token_ids)
            self.proposer.admit(row.slot, row.request)
        return rows

    def _release(self, rows: Sequence[SequenceState]) -> None:
        for row in rows:
            self.target.cache.release(row.slot)
            self.proposer.release(row.slot)

    def _commit_until(self, rows: Sequence[SequenceState], text: Sequence[int], length: int) -> None:
        while any(len(row.token_ids) < length for row in rows):
            running = [row for row in rows if len(row.token_ids) < length]
            running = running if len(running) == 1 or self.chance.random() < 0.5 else running[:-1]
            spend = [self.chance.randint(0, min(6, length - len(row.token_ids) - 1)) for row in running]
            batch = self._batch(running, spend)
            self._settle(batch, self._checked(batch), text)

    def _batch(self, rows: Sequence[SequenceState], budget: Sequence[int]) -> Batch:
        """A prompt is fed in two pieces, everything else at once."""
        feeds = []
        for row in rows:
            missing = row.token_ids[row.num_cached_tokens :]
            feeds.append(tuple(missing[:3] if len(missing) == 5 else missing))
        batch = Batch(
            seqs=tuple(rows),
            start=tuple(r.num_cached_tokens for r in rows),
            feed=tuple(feeds),
            draft_budget=tuple(budget),
        )
        spend = tuple(b if emits else 0 for b, emits in zip(budget, batch.emits, strict=True))
        return replace(batch, draft_budget=spend)

    def _checked(self, batch: Batch) -> Draft:
        draft = self.proposer.propose(batch)
        check_draft(draft, batch, self.target.vocab)
        return draft

    def _settle(self, batch: Batch, draft: Draft, text: Sequence[int]) -> None:
        """Accept what agrees with `text`, and tell everybody."""
        scores = self.target.score(batch, draft)
        paths, emitted = [], []
        for b, row in enumerate(batch.seqs):
            path: list[int] = []
            at = -1
            for node in range(draft.width[b]):
                wanted = text[len(row.token_ids) + len(path)]
                if int(draft.parent[b, node]) == at and int(draft.tokens[b, node]) == wanted:
                    path.append(node)
                    at = node
            paths.append(tuple(path))
            emits = batch.emits[b]
            emitted.append(tuple(text[len(row.token_ids) : len(row.token_ids) + len(path) + 1]) if emits else ())
        round = make_round(batch, draft, scores, paths, emitted)
        self.target.cache.commit(round)
        self.proposer.commit(round)
        append(round)


def check_draft(draft: Draft, batch: Batch, vocab: int) -> None:
    """What every proposer owes to `batch`: shapes, order of nodes, budget, ids, falling chances, and q [B, N, V].

    Raises:
        ConformanceError: one of them is broken; the message names it.
    """
    rows, size = len(batch.seqs), draft.size
    expect(draft.tokens.shape == draft.parent.shape == draft.kind.shape == (rows, size), "its tensors must be [B, N]")
    expect(all(w <= b for w, b in zip(draft.width, batch.draft_budget, strict=True)), "it overspends batch.budget")
    expect(bool((draft.count <= torch.tensor(draft.width)).all()), "count exceeds width")
    live = tree.valid_nodes(draft)
    order = torch.arange(size)
    expect(bool(((draft.parent < order) & (draft.parent >= -1) | ~live).all()), "parents must precede children")
    expect(not draft.chain or bool(((draft.parent == order - 1) | ~live).all()), "it says chain and is a tree")
    expect(bool(((draft.tokens >= 0) & (draft.tokens < vocab) | ~live).all()), "tokens must be ids of the target")
    if draft.accept_prob is not None:
        expect(tuple(map(len, draft.accept_prob)) == draft.width, "chance must be [B][width]")
        rising = any(a < b for row in draft.accept_prob for a, b in pairwise(row))
        expect(
            not rising and all(0 <= c <= 1 for row in draft.accept_prob for c in row),
            "chances must fall, within 0 to 1",
        )
    sampled = live & (draft.kind != DraftKind.ONE_HOT)
    expect(draft.q is not None or not bool(sampled.any()), "sampled nodes need q")
    if draft.q is not None:
        q = draft.q.padded()
        mass = q.gather(-1, draft.tokens[..., None])[..., 0]
        expect(bool((mass[sampled] > 0).all()), "a sampled node's q must give its token some mass")
        expect(bool(((q.sum(-1) - 1).abs()[sampled] < 1e-4).all()), "q must sum to 1")
        expect(bool((q[live & (draft.kind == DraftKind.ONE_HOT)] == 0).all()), "q of a one-hot node must be zero")


def random_text(target: ToyTarget, length: int, chance: random.Random) -> list[int]:
    """A text that the target might write, so that guesses come true now and then."""
    text = [chance.randrange(target.vocab) for _ in range(2)]
    while len(text) < length:
        text += chance.choices(range(target.vocab), target.table[text[-2], text[-1]].softmax(-1).tolist())
    return text


def make_row(text: list[int], slot: int, params: SamplingParams | None = None) -> SequenceState:
    """A row in `slot` whose prompt is `text`, without an end; greedy unless `params` say otherwise."""
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
    """The round that accepted the nodes `paths` [B] and emitted these tokens [B]."""
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
    """Commit to the rows what the round emitted, as the engine does."""
    for b, row in enumerate(round.batch.seqs):
        row.num_cached_tokens = round.batch.start[b] + len(round.batch.feed[b]) + len(round.path[b])
        row.token_ids += round.emitted[b]


def _nodes(draft: Draft, b: int) -> tuple[list[tuple[int, int, int]], torch.Tensor | None]:
    width = draft.width[b]
    fields = (draft.tokens[b, :width], draft.parent[b, :width], draft.kind[b, :width])
    nodes = list(zip(*(field.tolist() for field in fields), strict=True))
    q = None if draft.q is None else draft.q.padded()[b, :width] * (draft.kind[b, :width] != DraftKind.ONE_HOT)[:, None]
    return nodes, q
