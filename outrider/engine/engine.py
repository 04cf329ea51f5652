"""The round. `Engine.step` is all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from outrider.cache.base import CacheUse, fitting
from outrider.core import tree
from outrider.core.noise import PositionNoise
from outrider.core.stats import Stats, Tally
from outrider.core.text import TextStream
from outrider.core.types import Batch, Draft, Finish, Request, Round, Row, Scores, TokenLogprobs, Verdict
from outrider.engine.constraints import FORCED, Guided, Masks, guide
from outrider.engine.scheduler import Scheduler
from outrider.errors import OutriderError
from outrider.models.base import Target
from outrider.native.rules import fastest
from outrider.plan.planner import Planner
from outrider.propose.base import Proposer, check_budget
from outrider.verify.rules import EXACT, Verifier, follow
from outrider.verify.sampling import Knobs, Shaper, shape, sound, warp, warp_packed
from outrider.verify.verdict import rowwise


class Engine:
    """Runs rounds of propose, score, verify and commit over rows that come and go."""

    def __init__(
        self,
        *,
        target: Target,
        proposer: Proposer,
        verifier: Verifier,
        planner: Planner,
        scheduler: Scheduler,
        shape: Shaper = shape,
    ) -> None:
        exact = verifier.exact
        # Of all rounds; of the same without what grammars forced, which is what the planner is told; and of passes with
        # guesses, by who made them.
        self._tally, self._own = Tally(exact=exact), Tally(exact=exact)
        self._arms = tuple(Tally(exact=exact) for _ in range(proposer.needs.arms))
        self._target, self._proposer, self._verifier = target, proposer, verifier
        self._planner, self._scheduler, self._shape = planner, scheduler, shape
        self.watch: Callable[[Round], None] | None = None  # told of each round, for those who show what was guessed
        self._knobs: Knobs | None = None
        self._noise: PositionNoise | None = None  # of the same rows
        self._rules = {verifier.name: verifier}  # those that rows have asked for by now
        self._open: Batch | None = None  # what runs in this round
        self._refused: list[Row] = []  # that ended in it before they began
        self._committing = False  # whether anything was kept of it yet

    @property
    def stats(self) -> Stats:
        """Sums over all rounds so far."""
        return self._tally.total

    @property
    def arms(self) -> tuple[Stats, ...]:
        """The same of passes with guesses alone, by which of the proposer's alternatives made them."""
        return tuple(arm.total for arm in self._arms)

    def add(self, request: Request, stream: TextStream | None = None) -> Row:
        """Queue a request, and return its row, which whoever steps the engine carries on."""
        return self._scheduler.add(request, stream)

    @torch.inference_mode()
    def abort(self, id: int) -> None:
        """Take a request back, wherever it is."""
        if row := self._scheduler.abort(id):
            self._release(row.slot)

    def cache_use(self) -> CacheUse:
        """How full the target's cache is, what it has spared, and how many rows have given way for others."""
        return replace(self._target.cache.use(), preempted=self._scheduler.preempted)

    def reads(self) -> bool:
        """Whether the next round reads prompts, and so takes longer than others."""
        return self._scheduler.reads()

    def busy(self) -> bool:
        """Whether another step would do anything."""
        return self._scheduler.busy()

    @torch.inference_mode()
    def step(self) -> tuple[Row, ...]:
        """Run one round, if there is anything to do.

        Returns:
            The rows that took part, those that are done marked with their `finish`.
        """
        began = perf_counter()
        self._open, self._committing, self._refused = None, False, []
        for row in self._scheduler.admit(self._target.cache):
            if row.finish:
                self._refused.append(row)
            else:  # to a proposer, what a row had written before it gave way is prompt
                self._proposer.admit(row.slot, replace(row.request, prompt=tuple(row.text)))
        batch = self._open = self._next()
        if not batch.rows:
            return tuple(self._refused)
        batch = self._within(self._planner.plan(batch, self._own))
        planned = perf_counter()
        draft = self._proposer.propose(batch)
        proposed = perf_counter()
        self._check(batch, draft)
        draft = self._planner.trim(batch, draft)
        guided = guide(batch, draft, self._target.vocab)
        round, target = self._verified(batch, guided)
        if round.draft.size and any(round.failed):  # perhaps of a guess, which plain decoding would never have met
            none = tree.empty(len(batch.rows), self._target.device)
            guided = guide(replace(batch, room=()), none, self._target.vocab)
            round, again = self._verified(batch, guided)
            target += again
        self._commit(round)
        host = perf_counter() - proposed - target + planned - began
        self._count(guided, round, propose=proposed - planned, target=target, host=host)
        self._scheduler.took(batch, perf_counter() - began)
        return (*self._refused, *batch.rows)

    @torch.inference_mode()
    def recover(self, error: Exception) -> tuple[Row, ...]:
        """Go on after `step` raised `error`, at the cost of no row but the one that it was raised for.

        Where nothing was kept yet, each row takes the round again by itself and without guesses. One for which that
        raises, too, ends with the error, and so do all rows where the round was being committed.

        Returns:
            The rows that took part, as `step` does.

        Raises:
            Exception: `error`, where no round had begun.
        """
        batch, committing, self._open = self._open, self._committing, None
        if batch is None:
            raise error
        for b, row in enumerate(batch.rows):
            if committing:
                self._end(row, error)
                continue
            try:
                self._alone(batch, b)
            except Exception as own:
                self._end(row, own)
        return (*self._refused, *batch.rows)

    def _alone(self, batch: Batch, b: int) -> None:
        """What row b takes from a round, without guesses and without the others."""
        single = Batch(rows=batch.rows[b : b + 1], start=(batch.start[b],), feed=(batch.feed[b],), budget=(0,))
        began = perf_counter()
        draft = self._proposer.propose(single)
        proposed = perf_counter()
        guided = guide(single, draft, self._target.vocab)
        round, target = self._verified(single, guided)
        self._commit(round)
        self._count(guided, round, propose=proposed - began, target=target, host=perf_counter() - proposed - target)

    def _end(self, row: Row, error: Exception) -> None:
        self._scheduler.abort(row.request.id)
        row.finish, row.error = Finish.ERROR, f"the engine failed: {error}"
        self._release(row.slot)

    def _commit(self, round: Round) -> None:
        self._committing = True
        self._target.cache.commit(round)
        self._proposer.commit(round)
        _report(round)
        if self.watch:
            self.watch(round)
        for row in self._scheduler.commit(round):
            self._release(row.slot)

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
        rooms = batch.room or (0,) * len(batch.rows)
        most = {
            row.slot: min(room, budget + FORCED) if row.matcher else budget
            for row, room, budget in zip(batch.rows, rooms, batch.budget, strict=True)
        }
        able = fitting(self._target.cache, ends, {slot: end + most[slot] for slot, end in ends.items()})
        if len(able) == len(ends):
            return batch
        slots = [row.slot for row in batch.rows]
        budget, room = (
            tuple(count if slot in able else 0 for slot, count in zip(slots, counts, strict=True))
            for counts in (batch.budget, rooms)
        )
        return replace(batch, budget=budget, room=room)

    def _verified(self, batch: Batch, guided: Guided) -> tuple[Round, float]:
        """Score, warp, verify; and the seconds of the target's pass."""
        draft, masks = guided.draft, guided.masks
        began = perf_counter()
        scores = self._target.score(batch, draft)
        scored = perf_counter()
        knobs = self._knobs_of(batch)
        if knobs.bare:  # every exact rule says the same of a one-hot p, so p need not be written down
            return guided.told(_follow(batch, draft, scores, masks)), scored - began
        noise = self._noise_of(batch, knobs)
        names = [row.request.params.verifier or self._verifier.name for row in batch.rows]
        if (packed := scores.packed) is None:
            logits = scores.logits if masks is None else masks.apply(scores.logits)
            p = warp(logits, knobs, draft, shape=self._shape)
            verdicts = {name: self._rule(name).rule(draft, p, noise) for name in set(names)}
        else:
            packed = packed if masks is None else masks.apply_packed(packed)
            laws = warp_packed(packed, knobs, draft, shape=self._shape)
            verdicts = {name: self._rule(name).judge(draft, laws, noise) for name in set(names)}
        return guided.told(_settle(batch, draft, scores, rowwise(verdicts, names))), scored - began

    def _rule(self, name: str) -> Verifier:
        if name not in self._rules:
            self._rules[name] = fastest(EXACT[name], self._target.device)
        return self._rules[name]

    def _check(self, batch: Batch, draft: Draft) -> None:
        check_budget(batch, draft)
        if not draft.chain and not self._verifier.trees:
            raise OutriderError(
                f"verifier {self._verifier.name} takes chains only; use walk, coupled, siblings or traversal"
            )

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

    def _count(self, guided: Guided, round: Round, *, propose: float, target: float, host: float) -> None:
        passes, fed, nodes = [], 0, 0
        rows = zip(round.batch.rows, round.batch.feed, round.emitted, round.draft.width, strict=True)
        for row, feed, emitted, width in rows:
            if emitted:
                passes.append(row.passes[-1])
                nodes += width
            else:
                fed += len(feed)
        own, owned = guided.unforced(round, passes, nodes)
        self._tally.add(passes, drafted=nodes, prompt=fed)
        self._own.add(own, drafted=owned, prompt=fed)
        for tally in (self._tally, self._own):
            tally.took(propose=propose, target=target, host=host)
        if nodes:
            self._count_arms(guided, round)

    def _count_arms(self, guided: Guided, round: Round) -> None:
        for b, arm in enumerate(round.batch.arms):
            if round.emitted[b]:
                triple, width = guided.own_pass(round, b)
                if width:
                    self._arms[arm].add([triple], drafted=width)


def _ends(batch: Batch) -> dict[int, int]:
    """By slot, where each row's feed ends."""
    rows = zip(batch.rows, batch.start, batch.feed, strict=True)
    return {row.slot: start + len(feed) for row, start, feed in rows}


def _follow(batch: Batch, draft: Draft, scores: Scores, masks: Masks | None) -> Round:
    """`_settle` where every row takes the likeliest token."""
    best: torch.Tensor | Sequence[Sequence[int]] | None
    if masks is not None:
        best = masks.best(scores)
    elif (best := scores.host) is None and (best := scores.best) is None:
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
    read = _read if tree.near(draft.tokens.device) else _read_at_once
    paths, emitted, logprobs, failed = [], [], [], []
    rows = zip(*read(draft, verdict, scores), strict=True)
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


def _read(draft: Draft, verdict: Verdict, scores: Scores) -> tuple[list[Any], ...]:
    """By row: accepted, bonus, whether the logits were numbers, path, the draft's tokens, log-probabilities."""
    good = _good(scores).tolist() if scores.host is None else [min(row) >= 0 for row in scores.host]
    accepted, bonus, path, logprob = (
        part.tolist() for part in (verdict.accepted, verdict.bonus, verdict.path, verdict.logprob)
    )
    return accepted, bonus, good, path, draft.listed(), logprob


def _good(scores: Scores) -> torch.Tensor:
    """[B] bool: rows whose logits are numbers."""
    return (sound(scores.logits) if scores.best is None else scores.best >= 0).all(1)


def _read_at_once(draft: Draft, verdict: Verdict, scores: Scores) -> tuple[list[Any], ...]:
    """`_read` in one copy from the device."""
    # Ids and counts are far below 2**53, so float64 carries them exactly beside the log-probabilities.
    single = torch.stack([verdict.accepted, verdict.bonus, _good(scores)], 1)
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
