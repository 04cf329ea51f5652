"""What a planner knows of one proposer: how many tokens its rounds brought, and at what cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from outrider.core.types import Batch
from outrider.plan.pass_cost import Clock, CostModel

# The first estimate: so many guesses seen, of which so many were kept. Of the first guess there is soon a better one;
# how guesses after it fare is seen only by trying.
_FIRST_TRUST, _FIRST_HOPE = 1.0, 0.6
_TRUST, _HOPE = 4.0, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLoad:
    """What a round carries besides guesses."""

    seqs: int  # that decode
    soon: int  # rows that decode once all prompts are read
    feed: int  # columns of prompts, beyond one for each row that decodes
    cached: float  # tokens that a row has cached, on average
    left: float  # tokens that a row can still emit

    @classmethod
    def of(cls, batch: Batch) -> RoundLoad:
        emits = batch.emits
        rows = sum(emits)
        return cls(
            seqs=rows,
            soon=len(batch.seqs) + batch.num_waiting,
            feed=sum(map(len, batch.feed)) - rows,
            cached=sum(batch.start) / len(batch.start),
            left=1 + sum(batch.draft_budget) / max(rows, 1),
        )

    def like(self, other: RoundLoad) -> bool:
        """Whether as many rows decode and wait."""
        return self.seqs == other.seqs and self.soon == other.soon


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What some rounds have shown, summed up."""

    rounds: int
    seqs: int  # that guessed
    output_tokens: int  # tokens, of all rows
    nodes: int  # guesses that were verified, of all rows
    reached: tuple[int, ...]  # as in `Stats`, of these rounds alone
    accepted: tuple[int, ...]
    depth: int  # of the deepest guess that was drafted in each
    draft_seconds: float  # seconds, without those in which texts were read for the first time


class ProposerStats:
    """The record of one alternative: acceptance by position, and tokens, guesses and drafting time of recent rounds."""

    def __init__(self, costs: CostModel, *, most: int) -> None:
        """Of a proposer whose rounds cost `costs`, where a row has up to `most` guesses."""
        self.costs, self.most = costs, most
        self.says = False  # whether its last draft came with chances
        # Rounds unused, and passes left of a trial; the first is due at once.
        self.idle, self.trial = PATIENCE, 0
        self.few = FEW  # rows of the trial
        self.brought = 0.0  # seconds that its rounds have saved in all
        # Decayed counts: guesses whose ancestors were all kept, by position.
        self._met = [_FIRST_TRUST, *[_TRUST] * (min(most, _BLIND) - 1)]
        self._kept = [_FIRST_TRUST * _FIRST_HOPE, *[_TRUST * _HOPE] * (min(most, _BLIND) - 1)]
        self._means = _Means()
        self._late = _Means()  # since the last trial began
        self._pace = 1.0  # the same for each guess that was allowed

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position, as far as it is known: of the guesses whose ancestors were all kept, the share kept."""
        return tuple(kept / met for kept, met in zip(self._kept, self._met, strict=True))

    @property
    def nodes(self) -> float:
        """Guesses verified in a pass, lately."""
        return self._means.nodes

    @property
    def known(self) -> bool:
        """Whether enough rounds stand behind its means."""
        return self._means.seen >= _ENOUGH

    @property
    def is_new(self) -> bool:
        """Whether few guesses have been seen."""
        return self._met[0] < _LEARNED_BY

    def gain(self, rows: int, cached: float, clock: Clock) -> float:
        """Expected tokens a second over those of plain decoding; `clock` knows what the target's passes take.

        A few good passes by chance, or a text before that was easier, are each not enough: the means of all passes and
        those since the last trial must agree. While few guesses have been seen, the best k by position counts as well.
        """
        if self.says and self.known:
            plain, unit = clock.verify(rows, 0, cached=cached), self._unit(rows, cached)
            both = [means for means in (self._means, self._late) if means.seen >= _ENOUGH]
            spent = (clock.verify(rows, means.nodes, cached=cached) + means.drafted * unit for means in both)
            found = min(means.tau * plain / seconds for means, seconds in zip(both, spent, strict=True))
            # The first guesses go as far as a confidence that has learned little lets them; fewer might pay.
            return max(found, self.best(rows, cached, clock)[1]) if self.is_new else found
        return self.best(rows, cached, clock)[1]

    def best(self, rows: int, cached: float, clock: Clock) -> tuple[int, float]:
        """The one k for all rows that promises most, by position, and its gain."""
        plain = clock.verify(rows, 0, cached=cached)
        unit = self._unit(rows, cached)
        fixed, each = (self._means.drafted * unit, 0.0) if self.costs.draft is None else (0.0, self._pace * unit)
        best, tau, chance = (0, 1.0), 1.0, 1.0
        for k, rate in enumerate(self.acceptance, 1):
            chance *= rate
            if chance < _SLIGHT:
                break
            tau += chance
            verify = clock.verify(rows, k, cached=cached)
            gain = tau * plain / (verify + fixed + k * each)
            if gain > best[1]:
                best = k, gain
        return best

    def optimistic_gain(self, rows: int, cached: float, clock: Clock) -> float:
        """The gain if the first guesses were always kept: where even that is nothing, trying teaches nothing."""
        plain, step = clock.verify(rows, 0, cached=cached), self._draft(rows, cached)
        return max((1 + k) * plain / (clock.verify(rows, k, cached=cached) + k * step) for k in (1, 2, 4))

    def draft_seconds(self, rows: int, cached: float) -> float:
        """What one more guess of each of so many rows costs in drafting, for each."""
        return self._pace * self._draft(rows, cached) / rows

    def reading(self, rows: int, cached: float) -> float:
        """Seconds in which a draft model reads the texts of so many rows, of so many tokens each."""
        draft, feed = self.costs.draft, rows * max(cached - 1, 0.0)
        return 0.0 if draft is None else draft(rows, rows=rows, cached=cached / 2, feed=feed)

    def learn(self, seen: Outcome, cached: float) -> None:
        """From rounds of its own."""
        for i, met, kept in zip(range(len(self._met)), seen.reached, seen.accepted, strict=False):
            fade = _MEMORY**met
            self._met[i] = self._met[i] * fade + met
            self._kept[i] = self._kept[i] * fade + kept
        # A guess takes a pass; and a round in which a draft model still reads a new text says little of the next one.
        depth = seen.depth / seen.rounds
        least, most = (depth, 1 + depth * max(self._pace, 1.0) * 2) if self.costs.draft else (0.0, inf)
        unit = self._unit(max(round(seen.seqs / seen.rounds), 1), cached)
        drafted = min(max(seen.draft_seconds / seen.rounds / unit, least), most)
        for means in (self._means, self._late):
            means.learn(seen, drafted)
        self._pace += seen.rounds * _PACE * (drafted / max(depth, 1.0) - self._pace)

    def try_again(self, *, strange: bool = False) -> None:
        """Judge anew by a few rows; what was seen before says less where it was seen of other, `strange` texts."""
        self.trial, self.few, self._late = TRIAL, FEW, _Means()
        self._means.seen = min(self._means.seen, _PRIOR_STRANGE if strange else _PRIOR)

    def widen(self, rows: int) -> bool:
        """Go on with a trial that went well, if far more rows than had a part in it would have to be read."""
        if self.costs.draft is None or rows <= _WIDER * self.few:
            return False
        self.few *= _WIDER
        self.trial = _ROUNDS * self.few
        return True

    def state(self) -> dict[str, Any]:
        """What has been learned, fit for JSON; costs are not part of it."""
        own = {name.strip("_"): getattr(self, name) for name in _LEARNED}
        return own | {name: getattr(self._means, name) for name in _Means.__slots__}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; raises KeyError, TypeError or ValueError for anything else."""
        read = {name: state[name.strip("_")] for name in _LEARNED}
        means = _Means(**{name: state[name] for name in _Means.__slots__})
        if any(type(value) is not type(getattr(self, name)) for name, value in read.items()):
            raise TypeError("of other kinds")
        rates = list(zip(read["_met"], read["_kept"], strict=True))
        numbers = [number for pair in rates for number in pair]
        numbers += [read["idle"], read["_pace"], *asdict(means).values()]
        if not all(type(number) in (int, float) and 0 <= number <= _ABSURD for number in numbers):
            raise ValueError("not numbers that rounds can have shown")
        if len(rates) != len(self._met) or not all(kept <= met and met for met, kept in rates):
            raise ValueError("acceptance of other positions")
        self._means = means
        for name, value in read.items():
            setattr(self, name, value)

    def _draft(self, rows: int, cached: float) -> float:
        return 0.0 if self.costs.draft is None else self.costs.draft(rows, rows=rows, cached=cached)

    def _unit(self, rows: int, cached: float) -> float:
        """Seconds: a pass of the draft model, or one for each row."""
        return self._draft(rows, cached) or float(rows)


@dataclass(slots=True)
class _Means:
    """Decayed means over passes."""

    seen: float = 0.0  # passes behind them
    tau: float = 1 + _HOPE  # tokens a pass
    nodes: float = 1.0  # guesses a pass
    drafted: float = 0.0  # what drafting a round takes: passes of the draft model, or seconds for each row

    def learn(self, new: Outcome, drafted: float) -> None:
        before = self.seen * _FADE**new.seqs
        self.seen = before + new.seqs
        self.tau = (self.tau * before + new.output_tokens) / self.seen
        self.nodes = (self.nodes * before + new.nodes) / self.seen
        self.drafted = (self.drafted * before + drafted * new.seqs) / self.seen


_LEARNED = ("says", "idle", "_met", "_kept", "_pace")
_ABSURD = 1e15  # no count of rounds and no mean comes so far, and what is made of it does not overflow
_SLIGHT = 0.01  # chance of a guess that is not worth a thought
_BLIND = 16  # guesses at most where nobody says how good they are
_MEMORY = 0.98  # weight of a guess seen one guess earlier
_FADE, _ENOUGH = 0.97, 3.0  # weight of a pass seen one pass earlier; passes that make a mean
_LEARNED_BY = 39.0  # first guesses, by their faded weights: some 75
_PRIOR, _PRIOR_STRANGE = 8.0, 2.0  # passes that what was known before a trial counts as
_PACE = 0.05  # of the drafting time of a guess
PATIENCE = 32  # rounds unused before a trial
FEW, TRIAL = 2, 8  # rows and passes of a trial
_WIDER, _ROUNDS = 4, 4  # how many times the rows have a part in the next, and its rounds
