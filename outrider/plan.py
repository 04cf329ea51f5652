"""How far to speculate."""

from __future__ import annotations

from typing import Protocol

from outrider.cost import expected_tau
from outrider.errors import OutriderError
from outrider.passcost import CostModel
from outrider.stats import Stats
from outrider.types import Batch, Draft


class Planner(Protocol):
    """Shares out guesses.

    Law: it decides from the committed text and from what rounds before have shown, never from a token that it might
    drop; so the output stays exact. It only lowers `batch.budget`, which is what each row could use at most.
    """

    def budget(self, batch: Batch, stats: Stats) -> tuple[int, ...]:
        """[B] guesses for each row; 0 = do not speculate."""

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """The guesses that are worth their place in the pass, now that their chances are known."""


class FixedPlanner:
    """k guesses, always."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise OutriderError(f"k is {k}; use 0 for plain decoding or a number of guesses above it")
        self._k = k

    def budget(self, batch: Batch, stats: Stats) -> tuple[int, ...]:
        return tuple(min(self._k, most) for most in batch.budget)

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return draft


class CostPlanner:
    """As many guesses for every row as promise the most tokens a second, by measured costs and observed acceptance.

    It knows the costs of a round (`CostModel`), corrects them by what rounds really take, and learns from each round
    how often the guess at each position is kept. It begins hopeful; when it has stopped speculating it tries again now
    and then, the more seldom the less there is to hope for.
    """

    def __init__(self, costs: CostModel, *, most: int = 12) -> None:
        """Plan with `costs`, up to `most` guesses a row."""
        self._costs, self._most = costs, most
        self._met = [_TRUST] * most  # decayed counts: guesses whose ancestors were all kept, by position
        self._kept = [_TRUST * _HOPE] * most
        self._target_factor, self._draft_factor = 1.0, 1.0  # real seconds over expected ones
        self._told = Stats()
        self._last: tuple[int, int, float, int] | None = None  # rows, k, cached and fed columns of the last round
        self._idle, self._patience = 0, _PATIENCE
        self._found: dict[tuple[int, int], int] = {}  # the best k by rows and cached tokens, for some rounds

    def budget(self, batch: Batch, stats: Stats) -> tuple[int, ...]:
        self._learn(stats)
        rows = sum(batch.emits)
        feed = sum(len(feed) for feed, emits in zip(batch.feed, batch.emits, strict=True) if not emits)
        cached = sum(batch.start) / len(batch.start)
        left = 1 + sum(batch.budget) / max(rows, 1)  # tokens that a row can still emit
        soon = len(batch.rows) + batch.waiting  # rows that decode once all prompts are read
        k = min(self._choose(rows, soon, cached, left), max(batch.budget)) if rows else 0
        k = self._beside(feed, rows, k, cached) if feed and k else k
        self._last = (rows, k, cached, feed)
        return tuple(min(k, most) for most in batch.budget)

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return draft

    def speedup(self, rows: int, k: int, *, cached: float = 0) -> float:
        """Expected tokens a second with k guesses over those with none."""
        tau = expected_tau(self.acceptance[:k])
        return tau * self._seconds(rows, 0, cached, 0) / self._seconds(rows, k, cached, 0)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position, as far as it is known: of the guesses whose ancestors were all kept, the share kept."""
        return tuple(kept / met for kept, met in zip(self._kept, self._met, strict=True))

    def _seconds(self, rows: int, k: int, cached: float, feed: int) -> float:
        verify = self._costs.verify(rows, k, cached=cached, feed=feed)
        return verify * self._target_factor + self._costs.propose(rows, k, cached=cached) * self._draft_factor

    def _choose(self, rows: int, soon: int, cached: float, left: float) -> int:
        """Guesses for `rows` rows that can emit `left` tokens more each, where `soon` rows will decode."""
        k = min(self._best(rows, cached), self._best(soon, cached))
        on = self._last is not None and self._last[1] > 0
        if k and (on or self._pays(self.speedup(rows, k, cached=cached), rows, cached, left)):
            self._idle, self._patience = 0, _PATIENCE
            return k
        self._idle += 1
        # Were the first guesses always kept, would it pay? If not, nothing is to be learnt from trying.
        hope = max((1 + k) * self._seconds(soon, 0, cached, 0) / self._seconds(soon, k, cached, 0) for k in (1, 2))
        if self._idle < self._patience or not self._pays(hope, rows, cached, left):
            return 0
        self._idle, self._patience = 0, min(2 * self._patience, _PATIENCE_MOST)
        return 1

    def _best(self, rows: int, cached: float) -> int:
        place = (rows, int(cached) // _GRAIN)
        if place not in self._found:
            gains = [self.speedup(rows, k, cached=cached) for k in range(self._most + 1)]
            best = max(range(len(gains)), key=gains.__getitem__)
            self._found[place] = best if gains[best] >= _WORTHWHILE else 0
        return self._found[place]

    def _pays(self, gain: float, rows: int, cached: float, left: float) -> bool:
        """Whether it pays although a draft model must read the text first, and most texts end before their limit."""
        if gain < _WORTHWHILE:
            return False
        saved = left / 4 * self._seconds(rows, 0, cached, 0) * (1 - 1 / gain)
        read = 0.0 if self._costs.draft is None else self._costs.draft(rows * cached, rows=rows, cached=cached / 2)
        return saved > read

    def _beside(self, feed: int, rows: int, best: int, cached: float) -> int:
        """How many guesses pay beside prompts that are fed in the same pass.

        The prompts' time must be spent anyway, so it is left out: a guess pays if what it is expected to emit is worth
        more, at the price of tokens without prompts, than what it adds to the pass.
        """
        price = self._seconds(rows, best, cached, 0) / expected_tau(self.acceptance[:best])
        return max(
            range(best + 1),
            key=lambda k: price * expected_tau(self.acceptance[:k]) - self._seconds(rows, k, cached, feed),
        )

    def _learn(self, stats: Stats) -> None:
        """From what has been added to `stats` since the last round."""
        if self._last is None or stats.rounds != self._told.rounds + 1:  # a new engine's, or others' rounds
            self._told = stats
            return
        before, self._told = self._told, stats
        rows, k, cached, feed = self._last
        if k or stats.rounds % _ROUNDS == 0:
            self._found.clear()
        for i in range(min(k, len(stats.reached), self._most)):
            met = stats.reached[i] - (before.reached[i] if i < len(before.reached) else 0)
            kept = stats.accepted[i] - (before.accepted[i] if i < len(before.accepted) else 0)
            fade = _MEMORY**met
            self._met[i] = self._met[i] * fade + met
            self._kept[i] = self._kept[i] * fade + kept
        took = stats.target_seconds - before.target_seconds + stats.host_seconds - before.host_seconds
        self._target_factor = _blend(self._target_factor, took / self._costs.verify(rows, k, cached=cached, feed=feed))
        if expected := self._costs.propose(rows, k, cached=cached):
            took = stats.propose_seconds - before.propose_seconds
            self._draft_factor = _blend(self._draft_factor, took / expected)


def _blend(factor: float, seen: float) -> float:
    """Move a little towards what was seen; an outlier counts as much as twice the factor at most."""
    return factor + _PACE * (min(max(seen, factor / 2), factor * 2) - factor)


_TRUST, _HOPE = 4.0, 0.8  # the first estimate: so many guesses seen, of which so many were kept
_MEMORY = 0.98  # weight of a guess seen one guess earlier
_PACE = 0.05  # of the corrections to the costs
_GRAIN, _ROUNDS = 128, 16  # cached tokens that make a difference; rounds that a choice of 0 stands
_WORTHWHILE = 1.02  # expected speedup below which plain decoding is kept
_PATIENCE, _PATIENCE_MOST = 32, 1024  # rounds without speculation before it is tried again
