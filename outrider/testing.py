"""The conformance suite: hold a proposer, a cache or a verifier to the law of its protocol.

Each check drives an implementation through a fuzzed life of admit, propose, commit and release, and raises
`ConformanceError` with the law that was broken. What passes can be plugged in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from outrider import tree
from outrider.params import SamplingParams
from outrider.propose.base import Proposer, Setup
from outrider.target import Target
from outrider.toy import ToyTarget, joint_law
from outrider.types import Batch, Draft, Draw, Law, Request, Round, Row, Scores

__all__ = ["ConformanceError", "ToyTarget", "check_cache", "check_proposer", "joint_law", "random_tree", "toy_setup"]


class ConformanceError(AssertionError):
    """An implementation breaks the law of its protocol; the message names the law."""


def toy_setup(target: ToyTarget, *, slots: int = 16, draw: Draw = Draw.SAMPLE) -> Setup:
    """The setup of a proposer that guesses for `target`."""
    return Setup(
        vocab=target.vocab,
        slots=slots,
        context=target.context,
        device=target.device,
        dtype=torch.float32,
        draw=draw,
        tokenizer=None,
    )


def check_proposer(make: Callable[[Setup], Proposer], *, trials: int = 20, seed: int = 0) -> None:
    """Hold the proposers that `make` makes to the law of `Proposer`.

    Its drafts must be well formed and within budget, every law they claim possible, and what it proposes for a text
    must not depend on how the text came about, on the other rows of the batch, or on who had the slot before.

    Args:
        make: from a setup of a toy target (vocabulary 6, context 256) to a fresh proposer.
        trials: fuzzed lives.
        seed: of the fuzz.

    Raises:
        ConformanceError: the first law that is broken.
    """
    chance = random.Random(seed)
    for trial in range(trials):
        target = ToyTarget(seed=trial, spread=3.0)
        setup = toy_setup(target, draw=chance.choice(list(Draw)))
        lives = [_Life.fresh(target, make(setup), chance) for _ in range(3)]
        params = SamplingParams(temperature=chance.choice([0.0, 0.8]))
        text = _text(target, chance.randint(30, 60), chance)
        length = chance.randint(20, len(text) - 8)
        budget = chance.randint(1, 7)
        alone = lives[0].propose_after(text, length, params, slots=[3], budget=budget)
        again = lives[1].propose_after(text, length, params, slots=[3], budget=budget)
        _expect_equal(alone[0], again[0], "its proposal depends on how the text came about, not on the text alone")
        lives[2].live(_text(target, 40, chance), 30, params, slots=[3, 1])
        crowd = lives[2].propose_after(text, length, params, slots=[0, 3, 1], budget=budget)
        _expect_equal(alone[0], crowd[1], "its proposal depends on other rows, or on who had the slot before")


def check_cache(
    make: Callable[[], Target], *, trials: int = 6, seed: int = 0, tolerance: float = 1e-4, trees: bool = True
) -> None:
    """Hold the caches of the targets that `make` makes to the law of `Cache`.

    After any commits of random trees and paths, in several slots, scoring equals that of a fresh target which reads
    the committed text at once.

    Raises:
        ConformanceError: logits differ by more than `tolerance` (relative to their norm).
    """
    chance = random.Random(seed)
    for _ in range(trials):
        target = make()
        rows = [_row([chance.randrange(target.vocab) for _ in range(chance.randint(2, 9))], slot) for slot in (0, 1, 3)]
        for row in rows:
            row.cached = target.cache.admit(row.slot, row.text)
        for _ in range(chance.randint(3, 6)):
            running = sorted(chance.sample(rows, chance.randint(1, 3)), key=lambda row: row.slot)
            _advance(target, running, chance, trees)
        for row in rows:
            _expect_scores(target, make(), row, tolerance)
            target.cache.release(row.slot)


def random_tree(rows: Sequence[int], vocab: int, chance: random.Random, *, chain: bool = False) -> Draft:
    """A draft of `rows[b]` one-hot nodes in row b, shaped at random, siblings distinct where the vocabulary allows."""
    size = max(rows)
    parents = [[i - 1 if chain else chance.randint(-1, i - 1) for i in range(size)] for _ in rows]
    tokens = torch.tensor([[chance.randrange(vocab) for _ in range(size)] for _ in rows], dtype=torch.int64)
    return Draft(
        tokens=tokens,
        parent=torch.tensor(parents, dtype=torch.int64),
        count=torch.tensor(list(rows)),
        law=torch.full_like(tokens, Law.ONE_HOT),
        q=None,
        width=tuple(rows),
        chain=chain,
    )


@dataclass(frozen=True, slots=True)
class _Life:
    """A proposer beside a toy target that commits given texts, with fuzzed budgets."""

    target: ToyTarget
    proposer: Proposer
    chance: random.Random
    ids: Iterable[int]

    @classmethod
    def fresh(cls, target: ToyTarget, proposer: Proposer, chance: random.Random) -> _Life:
        return cls(target, proposer, chance, count())

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

    def _admit(self, text: Sequence[int], params: SamplingParams, slots: Sequence[int]) -> list[Row]:
        rows = [_row(list(text[:5]), slot, params) for slot in sorted(slots)]
        for row in rows:
            self.target.cache.admit(row.slot, row.text)
            self.proposer.admit(row.slot, row.request)
        return rows

    def _release(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.target.cache.release(row.slot)
            self.proposer.release(row.slot)

    def _commit_until(self, rows: Sequence[Row], text: Sequence[int], length: int) -> None:
        while any(len(row.text) < length for row in rows):
            running = [row for row in rows if len(row.text) < length]
            running = running if len(running) == 1 or self.chance.random() < 0.5 else running[:-1]
            spend = [self.chance.randint(0, min(6, length - len(row.text) - 1)) for row in running]
            batch = self._batch(running, spend)
            self._settle(batch, self._checked(batch), text)

    def _batch(self, rows: Sequence[Row], budget: Sequence[int]) -> Batch:
        """A prompt is fed in two pieces, everything else at once."""
        feeds = []
        for row in rows:
            missing = row.text[row.cached :]
            feeds.append(tuple(missing[:3] if len(missing) == 5 else missing))
        batch = Batch(rows=tuple(rows), start=tuple(r.cached for r in rows), feed=tuple(feeds), budget=tuple(budget))
        spend = tuple(b if emits else 0 for b, emits in zip(budget, batch.emits, strict=True))
        return replace(batch, budget=spend)

    def _checked(self, batch: Batch) -> Draft:
        draft = self.proposer.propose(batch)
        _check_draft(draft, batch, self.target.vocab)
        return draft

    def _settle(self, batch: Batch, draft: Draft, text: Sequence[int]) -> None:
        """Accept what agrees with `text`, and tell everybody."""
        scores = self.target.score(batch, draft)
        paths, emitted = [], []
        for b, row in enumerate(batch.rows):
            path: list[int] = []
            at = -1
            for node in range(draft.width[b]):
                wanted = text[len(row.text) + len(path)]
                if int(draft.parent[b, node]) == at and int(draft.tokens[b, node]) == wanted:
                    path.append(node)
                    at = node
            paths.append(tuple(path))
            emits = batch.emits[b]
            emitted.append(tuple(text[len(row.text) : len(row.text) + len(path) + 1]) if emits else ())
        round = _round(batch, draft, scores, paths, emitted)
        self.target.cache.commit(round)
        self.proposer.commit(round)
        _append(round)


def _check_draft(draft: Draft, batch: Batch, vocab: int) -> None:
    rows, size = len(batch.rows), draft.size
    _expect(draft.tokens.shape == draft.parent.shape == draft.law.shape == (rows, size), "its tensors must be [B, N]")
    _expect(all(w <= b for w, b in zip(draft.width, batch.budget, strict=True)), "it overspends batch.budget")
    _expect(bool((draft.count <= torch.tensor(draft.width)).all()), "count exceeds width")
    live = tree.live(draft)
    order = torch.arange(size)
    _expect(bool(((draft.parent < order) & (draft.parent >= -1) | ~live).all()), "parents must precede children")
    _expect(not draft.chain or bool(((draft.parent == order - 1) | ~live).all()), "it says chain and is a tree")
    _expect(bool(((draft.tokens >= 0) & (draft.tokens < vocab) | ~live).all()), "tokens must be ids of the target")
    sampled = live & (draft.law != Law.ONE_HOT)
    _expect(draft.q is not None or not bool(sampled.any()), "sampled nodes need q")
    if draft.q is not None:
        mass = draft.q.gather(-1, draft.tokens[..., None])[..., 0]
        _expect(bool((mass[sampled] > 0).all()), "a sampled node's q must give its token some mass")
        _expect(bool(((draft.q.sum(-1) - 1).abs()[sampled] < 1e-4).all()), "q must sum to 1")
        _expect(bool((draft.q[live & (draft.law == Law.ONE_HOT)] == 0).all()), "q of a one-hot node must be zero")


def _nodes(draft: Draft, b: int) -> tuple[list[tuple[int, int, int]], torch.Tensor | None]:
    width = draft.width[b]
    fields = (draft.tokens[b, :width], draft.parent[b, :width], draft.law[b, :width])
    nodes = list(zip(*(field.tolist() for field in fields), strict=True))
    q = None if draft.q is None else draft.q[b, :width] * (draft.law[b, :width] != Law.ONE_HOT)[:, None]
    return nodes, q


def _expect_equal(
    one: tuple[list[tuple[int, int, int]], torch.Tensor | None],
    two: tuple[list[tuple[int, int, int]], torch.Tensor | None],
    law: str,
) -> None:
    _expect(one[0] == two[0], f"{law}: {one[0]} and {two[0]}")
    if one[1] is not None and two[1] is not None:
        _expect(torch.allclose(one[1], two[1], atol=1e-5), law)


def _expect(good: bool, law: str) -> None:
    if not good:
        raise ConformanceError(law)


def _text(target: ToyTarget, length: int, chance: random.Random) -> list[int]:
    """A text that the target might write, so that guesses come true now and then."""
    text = [chance.randrange(target.vocab) for _ in range(2)]
    while len(text) < length:
        text += chance.choices(range(target.vocab), target.table[text[-2], text[-1]].softmax(-1).tolist())
    return text


def _row(text: list[int], slot: int, params: SamplingParams | None = None) -> Row:
    request = Request(
        id=slot, prompt=tuple(text), params=params or SamplingParams(), seed=7, end_ids=frozenset(), limit=10**6
    )
    return Row(request=request, slot=slot, text=text)


def _round(
    batch: Batch, draft: Draft, scores: Scores, paths: Sequence[tuple[int, ...]], emitted: Sequence[tuple[int, ...]]
) -> Round:
    zeros = tuple((0.0,) * len(tokens) for tokens in emitted)
    failed = (False,) * len(batch.rows)
    return Round(
        batch=batch,
        draft=draft,
        scores=scores,
        path=tuple(paths),
        emitted=tuple(emitted),
        sampled_logprob=zeros,
        failed=failed,
    )


def _append(round: Round) -> None:
    for b, row in enumerate(round.batch.rows):
        row.cached = round.batch.start[b] + len(round.batch.feed[b]) + len(round.path[b])
        row.text += round.emitted[b]


def _advance(target: Target, rows: Sequence[Row], chance: random.Random, trees: bool) -> None:
    """One round of random guesses, of which a random path is kept."""
    feeds = [row.text[row.cached :] for row in rows]
    feeds = [feed[: chance.randint(1, len(feed))] for feed in feeds]
    batch = Batch(
        rows=tuple(rows),
        start=tuple(row.cached for row in rows),
        feed=tuple(tuple(feed) for feed in feeds),
        budget=(5,) * len(rows),
    )
    widths = [chance.randint(0, 5) if emits else 0 for emits in batch.emits]
    draft = random_tree(widths, target.vocab, chance, chain=not trees or chance.random() < 0.3)
    draft = replace(draft, tokens=draft.tokens.to(target.device), parent=draft.parent.to(target.device))
    scores = target.score(batch, draft)
    paths, emitted = [], []
    for b, emits in enumerate(batch.emits):
        leaf = chance.randint(-1, widths[b] - 1)
        path: list[int] = []
        while leaf >= 0:
            path.insert(0, leaf)
            leaf = int(draft.parent[b, leaf])
        bonus = chance.randrange(target.vocab)
        paths.append(tuple(path))
        emitted.append((*(int(draft.tokens[b, node]) for node in path), bonus) if emits else ())
    round = _round(batch, draft, scores, paths, emitted)
    target.cache.commit(round)
    _append(round)


def _expect_scores(target: Target, fresh: Target, row: Row, tolerance: float) -> None:
    draft = tree.empty(1, target.device)
    missing = Batch(rows=(row,), start=(row.cached,), feed=(tuple(row.text[row.cached :]),), budget=(0,))
    ours = target.score(missing, draft).logits[0, 0]
    target.cache.commit(_round(missing, draft, Scores(logits=ours), [()], [()]))
    fresh.cache.admit(row.slot, row.text)
    whole = Batch(rows=(row,), start=(0,), feed=(tuple(row.text),), budget=(0,))
    theirs = fresh.score(whole, draft).logits[0, 0]
    error = float((ours - theirs).norm() / theirs.norm())
    _expect(error < tolerance, f"after commit, scoring differs from a fresh prefill by {error:.2g} of the logits' norm")
