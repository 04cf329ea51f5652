"""How far to speculate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, Protocol, cast

from outrider.core import tree
from outrider.core.stats import Stats, StatsAccumulator
from outrider.core.types import Batch, Draft, SequenceState
from outrider.errors import OutriderError
from outrider.plan.pass_cost import Clock, CostModel
from outrider.plan.proposer_stats import FEW, PATIENCE, TRIAL, ProposerStats, RoundLoad
from outrider.plan.speedup import expected_tau
from outrider.plan.trial_budget import TrialBudget
from outrider.plan.window import FIXED, PlanWindow, repeats


class Planner(Protocol):
    """Shares out guesses.

    Contract: it decides from the committed text, from what rounds before have shown, and from what a draft says of its
    chances; never from a token that it might drop. So the output stays exact. It only lowers `batch.budget`, which is
    what each row could use at most.
    """

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        """The batch with a budget for each row (0 = do not speculate), what a guess must be worth, and who guesses."""

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """The guesses that are worth their place in the pass, now that their chances are known."""


class FixedPlanner:
    """k guesses, always, and what grammars force besides; with k = 0 nothing is guessed at all."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise OutriderError(f"k is {k}; use 0 for plain decoding or a number of guesses above it")
        self._k = k

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        return replace(
            batch, draft_budget=_at_most(self._k, batch), forced_budget=batch.forced_budget if self._k else ()
        )

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return draft


class CostPlanner:
    """Chooses the draft length that promises the most tokens per second.

    It uses measured costs of a round (`CostModel`), corrected by the times of real rounds, and the observed acceptance
    of each alternative of the proposer (`ProposerStats`).

    If a proposer estimates acceptance probabilities, its draft is trimmed where one more token would cost more than it
    brings, over all sequences together. Any other proposer gets one k for all sequences, from the acceptance at each
    position. The planner starts by speculating. If no draft length pays, it decodes plainly, and tries again as often
    as a small share of the time allows.
    """

    def __init__(self, *costs: CostModel, most: int = 32, replay: bool = False) -> None:
        """Plan with the `costs` of each of the proposer's alternatives, up to `most` guesses a row.

        With `replay` a seed that a user gave must lead to the same text again, although what is emitted depends on the
        guesses: a batch with such a row gets the same number of guesses always.
        """
        self._replay = replay
        self.arms = tuple(ProposerStats(each, most=most) for each in costs)
        self._clock = Clock(costs[0])  # the target is the same for all
        self._told = Stats()
        self._span = PlanWindow(RoundLoad(seqs=0, soon=0, feed=0, cached=0, left=0))
        self._k, self._keep, self._worth = 0, 0.0, cast(tuple[float, ...], ())  # what stands for the span
        self._price = 0.0  # seconds that a token is worth: what it takes at the present gain, without prompts
        self._tried, self._heard = set[int](), frozenset[int]()  # requests of the last trial; all of the last guesses
        self._rows: tuple[SequenceState, ...] = ()  # of the last decision
        # Requests whose texts the arm in use has read, and those whose texts it had better not read.
        self._read, self._shut = frozenset[int](), frozenset[int]()
        self._usual = 0.0  # tokens of a completion, lately; 0: none has ended yet
        self._credit = TrialBudget()
        self._unseen = inf  # rounds since one in which nobody guessed
        # Seconds of the rounds that it planned, and what plain decoding would have taken for the same tokens.
        self.spent_seconds = self.plain_seconds = 0.0
        self._found: dict[tuple[int, int, int], tuple[int, float]] = {}  # best k and gain, for some rounds

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        if self._span.idles(batch, stats.rounds):
            self._span.rounds += 1
            return replace(batch, draft_budget=(0,) * len(batch.seqs))
        if any(repeats(row, self._replay) for row in batch.seqs):
            self._span = PlanWindow(RoundLoad.of(batch))
            return replace(batch, draft_budget=_at_most(FIXED, batch))
        load, aside = RoundLoad.of(batch), any(row.request.alternative is not None for row in batch.seqs)
        if not self._span.goes_on(load, stats.rounds) or aside != self._span.mixed:
            self._learn(stats.total)
            for i, arm in enumerate(self.arms):
                arm.idle = 0 if i == self._span.arm else arm.idle + self._span.rounds
            if aside or not self._span.rests(stats.rounds):
                self._decide(batch, load)
            else:
                self._span = self._span.after(load)
            self._span.mixed, self._span.rows = aside, batch.seqs
        self._span.rounds += 1
        budget = _at_most(0 if self._span.plain else self._k, batch)
        if self._shut:
            pairs = zip(batch.seqs, budget, strict=True)
            budget = tuple(0 if row.request.id in self._shut else most for row, most in pairs)
        if self._span.few:
            budget = self._few(batch, budget)
        if self._span.rounds == 1 and self._span.arm >= 0:
            self._begin(batch, budget)
        if aside:
            budget = self._span.aside(batch, budget)
        else:
            self._span.guessing += sum(map(bool, budget))
        return replace(
            batch,
            draft_budget=budget,
            min_path_prob=self._keep,
            min_draft_probs=self._worth,
            alternative=max(self._span.arm, 0),
        )

    def _begin(self, batch: Batch, budget: tuple[int, ...]) -> None:
        """Note whose texts are read now for the first time."""
        able = {row.request.id: start for row, start, most in zip(batch.seqs, batch.start, budget, strict=True) if most}
        arm = self.arms[self._span.arm]
        self._span.reading = sum(arm.reading(1, start) for id, start in able.items() if id not in self._read)
        self._read |= able.keys()

    def _decide(self, batch: Batch, load: RoundLoad) -> None:
        for row in self._rows:
            if row.finish_reason:
                self._usual += (row.num_output_tokens - self._usual) * (_LENGTH if self._usual else 1.0)
        self._rows = batch.seqs
        known = self._read | self._shut
        arm = self._choose(batch, load) if load.seqs else -1
        if arm != self._span.arm:
            self._credit.change()
        if arm >= 0 and not self.arms[arm].trial and self._unread(arm, load, known):
            self.arms[arm].try_again(strange=True)
        few = self.arms[arm].few if arm >= 0 and self.arms[arm].trial else 0
        here = frozenset(row.request.id for row in batch.seqs)
        self._heard = here if arm >= 0 else self._heard
        self._read = self._read & here if arm == self._span.arm else frozenset()
        self._k = self._ask(arm, load) if arm >= 0 else 0
        self._keep, self._worth = self._thresholds(arm, load) if arm >= 0 else (0.0, ())
        self._span = PlanWindow.of(load, arm, few, self._told.rounds)
        if arm >= 0 and not (few or load.feed) and self._unseen * _LOOKING > max(self._gain(arm, load) - 1, _SELDOM):
            self._span.look()  # the more guesses gain, the dearer that is, and the less depends on it

    def _unread(self, arm: int, load: RoundLoad, known: frozenset[int]) -> bool:
        """Whether most texts are new to a draft model that has gone on with others: they may be of another kind."""
        reads = self.arms[arm].costs.draft is not None and load.seqs > FEW
        return reads and arm == self._span.arm and not self._span.few and self._strange(known)

    def _strange(self, known: frozenset[int]) -> bool:
        """Whether most rows are other requests than these, and so perhaps texts of another kind."""
        return sum(row.request.id not in known for row in self._rows) > len(self._rows) / 2

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        span = self._span
        span.depth += max(draft.depth)
        span.guessing -= (unread := 0 if span.mixed else draft.num_prefilling)
        span.unread += unread
        if span.arm >= 0 and any(draft.width):
            self.arms[span.arm].says = draft.accept_prob is not None
        # What was drawn is not cut here: how far would depend on guesses further down the same path. It was cut by its
        # worth while it grew.
        if draft.accept_prob is not None and draft.q is None and any(draft.width):
            draft = tree.cut(draft, self._widths(draft.accept_prob, span.load))
        span.guesses += sum(draft.width)
        return draft

    def state(self) -> dict[str, Any]:
        """What has been learned of the proposer, fit for JSON; what passes take is learned again."""
        return {"arms": [arm.state() for arm in self.arms]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; raises KeyError, TypeError or ValueError for anything else."""
        for arm, learned in zip(self.arms, state["arms"], strict=True):
            arm.restore(learned)

    def _choose(self, batch: Batch, load: RoundLoad) -> int:
        """The arm that promises most, or one that is due for a trial; -1: none pays."""
        few = 0 < self._span.few < load.seqs  # the other rows' texts are unread after a trial
        on = -1 if few else self._span.arm
        gains = [self._gain(arm, load) for arm in range(len(self.arms))]
        best = max(range(len(gains)), key=gains.__getitem__)
        trial = self._trial(load, gains[on] if on >= 0 else 1.0)
        self._shut = frozenset()
        if trial is not None:
            chosen = trial
        else:
            pays = gains[best] >= self._bar(best, on=best == on)
            if pays:
                self._shut = self._dear(best, gains[best], batch, load, on=best == on)
                able = (row.request.id for row, most in zip(batch.seqs, batch.draft_budget, strict=True) if most)
                pays = not self._shut.issuperset(able)
            chosen = best if pays else -1
            if pays and few and best == self._span.arm and self.arms[best].widen(load.seqs):
                trial = best
        self._price = self._clock.verify(load.seqs, 0, cached=load.cached) / (load.seqs * max(gains[chosen], 1.0))
        return chosen

    def _gain(self, arm: int, load: RoundLoad) -> float:
        """Expected; where rows are few only because others still read their prompts, of all of them."""
        return min(self._best(arm, rows, load.cached)[1] for rows in {load.seqs, load.soon})

    def _best(self, arm: int, rows: int, cached: float) -> tuple[int, float]:
        record = self.arms[arm]
        if record.says and record.known:
            return record.most, record.gain(rows, cached, self._clock)
        place = (arm, rows, int(cached) // _GRAIN)
        if place not in self._found:
            self._found[place] = record.best(rows, cached, self._clock)
        return self._found[place]

    def _trial(self, load: RoundLoad, gain: float) -> int | None:
        """The arm that is in the middle of a trial, or one that is due for its first round; `gain` is what it costs."""
        for arm, record in enumerate(self.arms):
            if arm != self._span.arm or self._span.guessing or not self._span.unread:  # to be read shows nothing
                record.trial = max(record.trial - min(record.few, load.seqs), 0)
        running = [arm for arm, record in enumerate(self.arms) if record.trial]
        due = running or [arm for arm in range(len(self.arms)) if self._due(arm, load, gain)]
        if not due:
            return None
        arm = max(due, key=lambda arm: self.arms[arm].idle)
        if not running:
            self.arms[arm].try_again(strange=self._strange(self._heard))
            self._credit.begin()
        return arm

    def _due(self, arm: int, load: RoundLoad, gain: float) -> bool:
        """Whether there is hope, and trials take no more than a small share of the time if this one fails, too."""
        if (record := self.arms[arm]).idle < PATIENCE and not (self._heard and self._strange(self._heard)):
            return False
        hope = record.optimistic_gain(load.soon, load.cached, self._clock)
        few = replace(load, seqs=min(load.seqs, FEW))
        if hope < self._bar(arm, on=False) or not self._repays(arm, hope, few):
            return False
        plain = self._clock.at(load.seqs, rows=load.seqs, cached=load.cached)
        cost = self._trial_seconds(record, load, plain, gain)
        return self._credit.allows(cost, plain=plain, strange=self._strange(self._heard), paid=self._paid)

    @property
    def _paid(self) -> bool:
        """Whether guesses have brought something yet."""
        return any(record.brought > 0 for record in self.arms)

    def _trial_seconds(self, record: ProposerStats, load: RoundLoad, plain: float, gain: float) -> float:
        """What a trial takes that comes to nothing, where a round takes `plain` without guesses, and is to gain so."""
        few = min(load.seqs, FEW)
        wide = self._clock.verify(load.seqs, few * _TRIED / load.seqs, cached=load.cached)
        text = load.cached + load.feed / load.soon  # of which a draft has read what came before its last trial
        unread = text if self._strange(self._heard) else min(text, record.idle)
        guess = few * record.draft_seconds(few, load.cached)
        rounds = TRIAL / few * (wide - plain + _TRIED * guess + plain * max(gain - 1, 0.0))
        return record.reading(few, unread) + rounds

    def _bar(self, arm: int, *, on: bool) -> float:
        """The gain from which an arm is used: one whose guesses are free may as well stay on and be trimmed."""
        record = self.arms[arm]
        if record.costs.draft is None:
            return _FREE if record.says else _WORTHWHILE
        return (_STAYING if record.says else _GUESSING) if on else _WORTHWHILE

    def _few(self, batch: Batch, budget: tuple[int, ...]) -> tuple[int, ...]:
        """A trial takes a few rows alone, and the same ones: a draft model must read their texts first."""
        able = [b for b in range(len(budget)) if budget[b]]
        able.sort(key=lambda b: (batch.seqs[b].request.id not in self._tried, batch.start[b]))
        chosen = set(able[: self._span.few])
        self._tried = {batch.seqs[b].request.id for b in chosen}
        return tuple(most if b in chosen else 0 for b, most in enumerate(budget))

    def _repays(self, arm: int, gain: float, load: RoundLoad) -> bool:
        """Whether it pays although a draft model must read the texts first, and if the gain is half of what it seems.

        What is left of a text is guessed as if it could end with any token.
        """
        reading = self.arms[arm].reading(1, load.cached)
        return not reading or self._wins(gain, load.left, load) > 2 * reading

    def _wins(self, gain: float, left: float, load: RoundLoad) -> float:
        """Seconds that guesses save until a row ends that may emit so many tokens."""
        plain = self._clock.verify(load.seqs, 0, cached=load.cached) / load.seqs
        return min(left, self._usual or left / 4) * plain * (1 - 1 / max(gain, 1.0))

    def _dear(self, arm: int, gain: float, batch: Batch, load: RoundLoad, *, on: bool) -> frozenset[int]:
        """Requests whose texts a draft model has not read, and which win less by guesses than that takes.

        Unless guesses of many rows stand behind the gain, it must pay even if half of it is luck.
        """
        record, read = self.arms[arm], self._read if arm == self._span.arm else ()
        if record.costs.draft is None:
            return frozenset()
        luck, texts = 1 if on else 2, zip(batch.seqs, batch.draft_budget, batch.start, strict=True)
        new = ((row.request.id, most, cached) for row, most, cached in texts if most and row.request.id not in read)
        dear = (id for id, most, cached in new if self._wins(gain, 1 + most, load) < luck * record.reading(1, cached))
        return frozenset(dear)

    def _ask(self, arm: int, load: RoundLoad) -> int:
        """Guesses that each row may have."""
        record = self.arms[arm]
        if record.says:
            return record.most if record.known else min(record.most, 2 * _TRIED)
        if record.trial:
            return min(max(self._best(arm, load.seqs, load.cached)[0], 2), _TRIED)
        k = min(self._best(arm, rows, load.cached)[0] for rows in {load.seqs, load.soon})
        return self._beside(arm, load, k) if load.feed else k

    def _thresholds(self, arm: int, load: RoundLoad) -> tuple[float, tuple[float, ...]]:
        """The chance from which a guess pays for its column, and for a draft pass of 1, 2, ... rows besides."""
        record, price = self.arms[arm], self._price
        if not record.says:
            return 0.0, ()
        keep = self._column(load.seqs * (1 + record.nodes) + load.feed, load) / price
        each = (load.seqs if record.trial else rows for rows in range(1, load.seqs + 1))  # as if all had a part in it
        steps = (record.draft_seconds(rows, load.cached) / price for rows in each)
        return min(keep, 1.0), tuple(keep + step for step in steps)

    def _column(self, columns: float, load: RoundLoad) -> float:
        """Seconds that one more column adds to the target's pass."""
        least = min(load.seqs + load.feed, columns)
        wide, narrow = (self._clock.at(c, rows=load.seqs, cached=load.cached) for c in (max(columns, least + 1), least))
        return max(wide - narrow, 0.0) / max(columns - least, 1.0)

    def _widths(self, chances: tuple[tuple[float, ...], ...], load: RoundLoad) -> tuple[int, ...]:
        """How many guesses of each row bring more than their columns cost, the likeliest of all rows first."""
        order = sorted(((-chance, b) for b, row in enumerate(chances) for chance in row))
        price, begin = self._price, load.seqs + load.feed
        plain = self._clock.at(begin, rows=load.seqs, cached=load.cached)
        most, count, gained = self._clock.extra, 0, 0.0
        for i, (chance, _) in enumerate(order, 1):
            gained -= chance * price
            profit = gained - (self._clock.at(begin + i, rows=load.seqs, cached=load.cached) - plain)
            if profit > most:
                most, count = profit, i
        widths = [0] * len(chances)
        for _, b in order[:count]:
            widths[b] += 1
        return tuple(widths)

    def _beside(self, arm: int, load: RoundLoad, best: int) -> int:
        """How many guesses pay beside prompts that are fed in the same pass.

        The prompts' time must be spent anyway, so it is left out: a guess pays if what it is expected to emit is worth
        more, at the price of tokens without prompts, than what it adds to the pass.
        """
        record, price = self.arms[arm], self._price
        rows, cached = load.seqs, load.cached

        def profit(k: int) -> float:
            spent = self._clock.verify(rows, k, cached=cached, feed=load.feed)
            spent += record.costs.propose(rows, k, cached=cached)
            return price * rows * expected_tau(record.acceptance[:k]) - spent

        return max(range(best + 1), key=profit)

    def _learn(self, stats: Stats) -> None:
        """From what has been added to `stats` in the last span."""
        before, self._told = self._told, stats
        span = self._span
        if not span.rounds or stats.rounds != before.rounds + span.rounds:  # a new engine's, or others' rounds
            return
        took = stats.target_seconds - before.target_seconds + stats.host_seconds - before.host_seconds
        columns = span.load.seqs + span.load.feed + span.guesses / span.rounds
        self._clock.learn(
            columns, max(span.load.seqs, 1), span.load.cached, took / span.rounds, guesses=bool(span.guesses)
        )
        self._unseen = self._unseen + span.rounds if span.guesses else 0
        self._account(
            span, took, stats.draft_seconds - before.draft_seconds, stats.output_tokens - before.output_tokens
        )
        self._found.clear()
        if span.guessing and span.load.seqs:
            self.arms[span.arm].learn(span.outcome(before, stats), span.load.cached)

    def _account(self, span: PlanWindow, took: float, propose: float, emitted: int) -> None:
        """Book rounds that `took` so many seconds besides those of proposing."""
        rows, cached, spent = span.load.seqs, span.load.cached, took + propose
        plain = spent  # prompts take their time, with guesses or without
        if rows:
            each, fed = (self._clock.at(rows + more, rows=rows, cached=cached) for more in (0, span.load.feed))
            plain = each * emitted / rows + (fed - each) * span.rounds
            if span.arm >= 0 and not span.mixed:
                extra = emitted - rows * span.rounds
                wide = self._clock.verify(rows, span.guesses / span.rounds / rows, cached=cached, feed=span.load.feed)
                # By what passes should have taken: they differ from that by more than a few guesses cost.
                brought = each * extra / rows - (wide - fed) * span.rounds - propose
                self._credit.earn(brought)
                self.arms[span.arm].brought += brought
        self._credit.grow(spent, paid=self._paid)
        self.spent_seconds += spent
        self.plain_seconds += plain


def _at_most(k: int, batch: Batch) -> tuple[int, ...]:
    return tuple(min(k, most) for most in batch.draft_budget)


_GRAIN, _LENGTH = 128, 0.1  # cached tokens that make a difference; weight of the last completion's length
_WORTHWHILE = 1.05  # expected speedup below which plain decoding is kept
_STAYING, _GUESSING = 0.95, 1.02  # of a draft model in use: by what it brings, which varies, or by its best k
_FREE = 0.99  # the same of what costs next to nothing, and may begin to pay with the next token
_TRIED = 4  # guesses of a row in a trial where nobody says how good they are
# Of the time, on rounds without guesses to see what they take; and the least gain that is thought of there, or such
# rounds would be all there is where guesses gain nothing.
_LOOKING, _SELDOM = 0.006, 0.05
