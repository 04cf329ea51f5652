"""The round. `Engine.step` is all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from outrider import tree
from outrider.cache.base import CacheUse, fitting
from outrider.errors import OutriderError
from outrider.noise import PositionNoise
from outrider.plan import Planner
from outrider.propose.base import Proposer
from outrider.sampling import Knobs, sound, warp, warp_packed
from outrider.schedule import Scheduler
from outrider.stats import Stats
from outrider.target import Target
from outrider.text import TextStream
from outrider.types import Batch, Draft, Request, Round, Row, Scores, TokenLogprobs, Verdict
from outrider.verify import Verifier, follow


class Engine:
    """Runs rounds of propose, score, verify and commit over rows that come and go."""

    def __init__(
        self, *, target: Target, proposer: Proposer, verifier: Verifier, planner: Planner, scheduler: Scheduler
    ) -> None:
        self.stats = Stats(exact=verifier.exact)
        self._target, self._proposer, self._verifier = target, proposer, verifier
        self._planner, self._scheduler = planner, scheduler
        self._knobs: Knobs | None = None
        self._noise: PositionNoise | None = None  # of the same rows

    def add(self, request: Request, stream: TextStream | None = None) -> None:
        """Queue a request."""
        self._scheduler.add(request, stream)

    @torch.inference_mode()
    def abort(self, id: int) -> None:
        """Take a request back, wherever it is."""
        if row := self._scheduler.abort(id):
            self._release(row.slot)

    def cache_use(self) -> CacheUse:
        """How full the target's cache is, what it has spared, and how many rows have given way for others."""
        return replace(self._target.cache.use(), preempted=self._scheduler.preempted)

    def busy(self) -> bool:
        """Whether another step would do anything."""
        return self._scheduler.busy()

    @torch.inference_mode()
    def step(self) -> tuple[Row, ...]:
        """Run one round; returns the rows that took part, those that are done marked with their `finish`."""
        began = perf_counter()
        for row in self._scheduler.admit(self._target.cache):
            # To a proposer, what a row had written before it gave way is prompt.
            self._proposer.admit(row.slot, replace(row.request, prompt=tuple(row.text)))
        batch = self._planner.plan(self._next(), self.stats)
        batch = self._within(batch)
        planned = perf_counter()
        draft = self._proposer.propose(batch)
        proposed = perf_counter()
        self._check(batch, draft)
        draft = self._planner.trim(batch, draft)
        round, target = self._verified(batch, draft)
        if draft.size and any(round.failed):  # perhaps of a guess, which plain decoding would never have met
            round, again = self._verified(batch, tree.empty(len(batch.rows), self._target.device))
            target += again
        self._target.cache.commit(round)
        self._proposer.commit(round)
        _report(round)
        for row in self._scheduler.commit(round):
            self._release(row.slot)
        host = perf_counter() - proposed - target + planned - began
        self._count(round, propose=proposed - planned, target=target, host=host)
        return batch.rows

    def _next(self) -> Batch:
        """The rows that run now; as many give way as must for the others to have memory."""
        while True:
            batch = self._scheduler.next()
            if self._target.cache.fits(_ends(batch)):
                return batch
            self._release(self._scheduler.preempt())

    def _within(self, batch: Batch) -> Batch:
        """No guesses for which there is no memory: nobody gives way to a guess."""
        ends = _ends(batch)
        wanted = {slot: end + most for (slot, end), most in zip(ends.items(), batch.budget, strict=True)}
        able = fitting(self._target.cache, ends, wanted)
        if len(able) == len(ends):
            return batch
        able_rows = zip(batch.rows, batch.budget, strict=True)
        return replace(batch, budget=tuple(most if row.slot in able else 0 for row, most in able_rows))

    def _verified(self, batch: Batch, draft: Draft) -> tuple[Round, float]:
        """Score, warp, verify; and the seconds of the target's pass."""
        began = perf_counter()
        scores = self._target.score(batch, draft)
        scored = perf_counter()
        knobs = self._knobs_of(batch)
        if knobs.bare:  # every exact rule says the same of a one-hot p, so p need not be written down
            return _follow(batch, draft, scores), scored - began
        noise = self._noise_of(batch, knobs)
        if scores.packed is None:
            verdict = self._verifier.rule(draft, warp(scores.logits, knobs, draft), noise)
        else:
            verdict = self._verifier.judge(draft, warp_packed(scores.packed, knobs, draft), noise)
        return _settle(batch, draft, scores, verdict), scored - began

    def _check(self, batch: Batch, draft: Draft) -> None:
        """Hold a proposer to what the rest of the round relies on."""
        if len(draft.width) != len(batch.rows) or any(w > b for w, b in zip(draft.width, batch.budget, strict=True)):
            raise OutriderError(
                f"the proposer made {draft.width} guesses where {batch.budget} were allowed; keep to batch.budget"
            )
        if not draft.chain and not self._verifier.trees:
            raise OutriderError(f"verifier {self._verifier.name} takes chains only; use siblings, traversal or walk")

    def _knobs_of(self, batch: Batch) -> Knobs:
        if self._knobs is None or self._knobs.rows != batch.rows:
            self._knobs = Knobs.of(batch.rows, self._target.vocab, self._target.device)
            self._noise = PositionNoise(self._knobs.seed, self._knobs.seed)
        return self._knobs

    def _noise_of(self, batch: Batch, knobs: Knobs) -> PositionNoise:
        assert self._noise is not None
        return self._noise.at(tree.upload([len(row.text) for row in batch.rows], knobs.seed.device))

    def _release(self, slot: int) -> None:
        self._target.cache.release(slot)
        self._proposer.release(slot)

    def _count(self, round: Round, *, propose: float, target: float, host: float) -> None:
        passes = [row.passes[-1] for row, tokens in zip(round.batch.rows, round.emitted, strict=True) if tokens]
        fed = sum(len(feed) for feed, tokens in zip(round.batch.feed, round.emitted, strict=True) if not tokens)
        nodes = sum(width for width, tokens in zip(round.draft.width, round.emitted, strict=True) if tokens)
        counted = Stats.of_passes(passes, drafted=nodes, prompt=fed, exact=self._verifier.exact)
        self.stats += replace(counted, rounds=1, propose_seconds=propose, target_seconds=target, host_seconds=host)


def _ends(batch: Batch) -> dict[int, int]:
    """By slot, where each row's feed ends."""
    rows = zip(batch.rows, batch.start, batch.feed, strict=True)
    return {row.slot: start + len(feed) for row, start, feed in rows}


def _follow(batch: Batch, draft: Draft, scores: Scores) -> Round:
    """`_settle` where every row takes the likeliest token."""
    best = scores.best
    if best is None:
        best = torch.where(sound(scores.logits), scores.logits.argmax(-1), -1)
    found = follow(draft, best)
    kept = [pair if emits else ((), ()) for emits, pair in zip(batch.emits, found, strict=True)]
    return Round(
        batch=batch,
        draft=draft,
        scores=scores,
        path=tuple(path for path, _ in kept),
        emitted=tuple(emitted for _, emitted in kept),
        sampled_logprob=tuple((0.0,) * len(emitted) for _, emitted in kept),
        failed=tuple(not emitted for _, emitted in found),
    )


def _settle(batch: Batch, draft: Draft, scores: Scores, verdict: Verdict) -> Round:
    """What the host must know of a round."""
    good = sound(scores.logits) if scores.best is None else scores.best >= 0
    read = _read if tree.near(draft.tokens.device) else _read_at_once
    paths, emitted, logprobs, failed = [], [], [], []
    rows = zip(*read(draft, verdict, good.all(1)), strict=True)
    for (accepted, bonus, fine, nodes, tokens, chances), emits in zip(rows, batch.emits, strict=True):
        kept = accepted if emits and fine else 0
        paths.append(tuple(nodes[:kept]))
        emitted.append((*(tokens[node] for node in nodes[:kept]), bonus) if emits and fine else ())
        logprobs.append(tuple(chances[: len(emitted[-1])]))
        failed.append(not fine)
    return Round(
        batch=batch,
        draft=draft,
        scores=scores,
        path=tuple(paths),
        emitted=tuple(emitted),
        sampled_logprob=tuple(logprobs),
        failed=tuple(failed),
    )


def _read(draft: Draft, verdict: Verdict, good: torch.Tensor) -> tuple[list[Any], ...]:
    """By row: accepted, bonus, whether the logits were numbers, path, the draft's tokens, log-probabilities."""
    parts = (verdict.accepted, verdict.bonus, good, verdict.path, draft.tokens, verdict.logprob)
    return tuple(part.tolist() for part in parts)


def _read_at_once(draft: Draft, verdict: Verdict, good: torch.Tensor) -> tuple[list[Any], ...]:
    """`_read` in one copy from the device."""
    # Ids and counts are far below 2**53, so float64 carries them exactly beside the log-probabilities.
    single = torch.stack([verdict.accepted, verdict.bonus, good], 1)
    parts = (single, verdict.path, draft.tokens, verdict.logprob)
    copied = torch.cat([part.double() for part in parts], 1).tolist()
    ends = (3, 3 + draft.size, 3 + 2 * draft.size)
    numbers = [[int(number) for number in row[: ends[2]]] for row in copied]
    singles = ([row[i] for row in numbers] for i in range(3))
    path, tokens = ([row[begin:end] for row in numbers] for begin, end in pairwise(ends))
    return (*singles, path, tokens, [row[ends[2] :] for row in copied])


def _report(round: Round) -> None:
    """Log-probabilities for the rows that asked, from the model's own softmax."""
    for b, row in enumerate(round.batch.rows):
        wanted = row.request.params.logprobs
        if wanted is None or not round.emitted[b]:
            continue
        nodes = [0, *(node + 1 for node in round.path[b])]
        law = round.scores.logits[b, nodes].log_softmax(-1)
        best = law.topk(min(wanted, law.shape[-1]))
        chosen = law.gather(1, torch.tensor(round.emitted[b], device=law.device)[:, None])[:, 0].tolist()
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        row.logprobs += _entries(round.emitted[b], chosen, round.sampled_logprob[b], list(top))


def _entries(
    tokens: Sequence[int],
    chosen: Sequence[float],
    sampled: Sequence[float],
    top: Sequence[tuple[list[int], list[float]]],
) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token=token, logprob=own, sampled_logprob=drawn, top=tuple(zip(ids, values, strict=True)))
        for token, own, drawn, (ids, values) in zip(tokens, chosen, sampled, top, strict=True)
    ]
