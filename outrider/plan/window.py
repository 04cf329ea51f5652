"""Some rounds under one decision of a planner, and what they have shown."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest

from outrider.core.stats import Stats
from outrider.core.types import Batch, Draw, SequenceState
from outrider.plan.proposer_stats import Outcome, RoundLoad
from outrider.verify.rules import EXACT

FIXED = 4  # guesses where a seed must reproduce the text, or a request names who guesses
_SPAN, _PLAIN = 4, 32  # rounds that a decision stands, and one to guess nothing
_CHANGED = 8  # the same from when rows come or go: what pays may have changed


@dataclass(slots=True)
class PlanWindow:
    """Some rounds alike, under one decision: to decide anew in each would cost the host more than it brings."""

    load: RoundLoad
    arm: int = -1  # none
    few: int = 0  # rows that may guess, for a trial; 0 = all
    began: int = 0  # rounds before it
    until: int = 0  # rounds after which there is to be another decision
    rounds: int = 0
    guessing: int = 0  # rows that were allowed guesses and could have them, summed over its rounds
    unread: int = 0  # rows that were, and had none because their texts were still being read
    guesses: int = 0  # that were verified
    depth: int = 0  # of each round's deepest guess, summed
    rows: tuple[SequenceState, ...] = ()  # that it was decided for
    plain: bool = False  # nobody guesses
    reading: float = 0.0  # seconds that it should take a draft model to read texts that were new to it
    mixed: bool = False  # some rows chose their proposer themselves; of the others, passes and guesses before:
    free: dict[SequenceState, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, load: RoundLoad, arm: int, few: int, rounds: int) -> PlanWindow:
        """After so many rounds, under a new decision, which stands for a while if there was anything to decide."""
        stands = (_SPAN if arm >= 0 else _PLAIN) if load.seqs else 1
        return cls(load, arm, few, rounds, rounds + stands)

    def after(self, load: RoundLoad) -> PlanWindow:
        """The next one under the same decision to guess nothing."""
        rounds = self.began + self.rounds
        return PlanWindow(load, began=rounds, until=min(self.until, rounds + _CHANGED))

    def look(self) -> None:
        """Let nobody guess for a round, whatever was decided: what that takes is not seen while others do."""
        self.plain, self.until = True, self.began + 1

    def aside(self, batch: Batch, budget: tuple[int, ...]) -> tuple[int, ...]:
        """Guesses for those who chose their proposer, whatever it is worth; what the others do is counted apart."""
        out = []
        for row, own, most in zip(batch.seqs, budget, batch.draft_budget, strict=True):
            if row.request.alternative is None:
                self.free.setdefault(row, (len(row.rounds), row.num_draft_tokens))
                self.guessing += bool(own)
                out.append(own)
            else:
                out.append(most if row.request.params.k is not None else min(FIXED, most))
        return tuple(out)

    def idles(self, batch: Batch, rounds: int) -> bool:
        """Whether nothing is guessed in the next round either: all that a planner at rest has to look at."""
        return (
            self.rests(rounds)
            and batch.seqs == self.rows
            and len(batch.seqs) + batch.num_waiting == self.load.soon
            and sum(map(len, batch.feed)) == len(batch.seqs)
            and not self.load.feed
        )

    def rests(self, rounds: int) -> bool:
        """Whether nothing is to be guessed yet, whoever comes or goes."""
        return self.arm < 0 and not self.mixed and self._stands(rounds)

    def goes_on(self, load: RoundLoad, rounds: int) -> bool:
        """Whether the next round, after so many in all, may be part of it."""
        alike = not self.few and not self.load.feed and not load.feed and self.load.like(load)
        return alike and self._stands(rounds)

    def _stands(self, rounds: int) -> bool:
        """Whether its decision does after so many rounds, and nobody else's rounds came between."""
        return rounds == self.began + self.rounds < self.until

    def outcome(self, before: Stats, after: Stats) -> Outcome:
        idle = self.load.seqs * self.rounds - self.guessing  # whoever may not guess emits one token
        if self.free:
            passes = [triple for row, (made, _) in self.free.items() for triple in row.rounds[made:]]
            drafted = sum(row.num_draft_tokens - before for row, (_, before) in self.free.items())
            own, before = Stats.of_passes(passes, drafted=drafted), Stats(draft_seconds=before.draft_seconds)
            idle, after = own.passes - self.guessing, replace(own, draft_seconds=after.draft_seconds)
        return Outcome(
            rounds=self.rounds,
            seqs=self.guessing,
            output_tokens=after.output_tokens - before.output_tokens - idle,
            nodes=after.draft_tokens - before.draft_tokens,
            depth=self.depth,
            reached=_less(after.reached, before.reached),
            accepted=_less(after.accepted, before.accepted),
            draft_seconds=max(after.draft_seconds - before.draft_seconds - self.reading, 0.0),
        )


def repeats(row: SequenceState, replay: bool) -> bool:
    """Whether its user expects to see the text again, and guesses have a part in it: always so, with `replay`."""
    asked = row.request.params
    if asked.seed is None or not asked.temperature:
        return False
    return replay if asked.verifier is None else EXACT[asked.verifier].draw is Draw.SAMPLE


def _less(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip_longest(after, before, fillvalue=0))
