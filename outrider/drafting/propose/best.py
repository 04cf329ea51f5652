"""Combine proposers: `best` uses the draft with the highest expected value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from outrider.core import tree
from outrider.core.proposer import Proposer, ProposerSetup, must_reproduce
from outrider.core.types import Batch, Draft, Round
from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.combine import PRIOR, Combination, Drafted, choose_drafts
from outrider.drafting.propose.leaves import draft_model

_DECAY = 0.97  # of the means of a part, per round
_PRIOR_TOKENS = 4.0  # weight of the prior that estimates are right, in draft tokens
_MIN_ROUNDS = 3.0  # rounds from which the means of a part are used


class Best(Combination):
    """Uses the draft with the highest expected value, for each sequence.

    The value of a draft is the number of draft tokens that will be accepted, minus the price of drafting and verifying
    all of them. A price is a number of output tokens: as many as the same time is worth. It comes from the planner (see
    `DraftBudget.min_path_prob`), and is 0 with a fixed k.

    The parts draft one after another. A later part drafts for a sequence only if its expected value
    exceeds that of the current draft, so put the parts that take no time first:

    - The value of the current draft follows from its estimated acceptance. A part is used where its estimates are high,
      and such estimates are too high on average. So they are corrected by the acceptance of the drafts that were used.
    - The value of a draft that a later part has not made yet is the mean of its recent drafts.

    A sampled draft is always used, because dropping it for its value would bias the output.

    If a text must be reproducible, the first part that is a draft model is used: what a lookup drafts and promises may
    depend on other requests. Without such a part, the first part with a draft is used.
    """

    def __init__(self, setup: ProposerSetup, parts: Sequence[Proposer]) -> None:
        super().__init__(setup, parts)
        self._records = [_Record() for _ in parts]
        self._has_model = [draft_model(part) is not None for part in parts]
        self._reproducible = self._has_model.index(True) if any(self._has_model) else 0  # first part for such texts
        self._acceptance = AcceptanceEstimator()  # by part and depth, for parts that give no estimate
        self._pending: list[Drafted] = []  # of this round
        self._used: list[int] = []  # [B] part whose draft is used in this round; -1: no draft
        self._width: tuple[int, ...] = ()  # [B] draft tokens before the planner cuts the draft
        self._estimates: list[Sequence[float]] = []  # [B] acceptance probabilities of the used draft; (): not estimated

    def propose(self, batch: Batch) -> Draft:
        self._pending = []
        num_seqs = len(batch.seqs)
        self._used = [-1] * num_seqs
        self._estimates = [()] * num_seqs
        result = tree.empty(num_seqs, self._setup.device)
        if not any(batch.draft_budget):
            for part in self.parts:  # they may read prompts
                part.propose(batch)
            self._width = result.width
            return result
        draw = self._setup.draw
        first_parts = [self._reproducible if must_reproduce(seq, draw) else 0 for seq in batch.seqs]
        values = [-inf] * num_seqs  # of the current drafts
        later = inf  # highest expected value of the parts that have not drafted yet
        for i, part in enumerate(self.parts):
            triples = zip(batch.draft_budget, values, first_parts, strict=True)
            budget = tuple(count if value < later and i >= first else 0 for count, value, first in triples)
            draft = part.propose(batch.limited(budget))
            if draft.size:
                result = self._choose(i, draft, result, values, batch)
            later = max((self._expected_value(later, batch) for later in range(i + 1, len(self.parts))), default=-inf)
        self._width = result.width
        return result

    def _choose(self, part: int, draft: Draft, before: Draft, values: list[float], batch: Batch) -> Draft:
        """Return the drafts of a part where it has one, and those `before` elsewhere. Update the `values` [B]."""
        if draft.accept_prob is None and draft.q is None:
            draft = replace(draft, accept_prob=self._estimate(part, draft))
        draft = replace(draft, source=self._source(part, draft))
        estimates = draft.accept_prob if draft.accept_prob is not None and draft.q is None else [()] * len(values)
        for b, width in enumerate(draft.width):
            if width:
                self._used[b] = part
                self._estimates[b] = estimates[b]
                values[b] = self._value(part, estimates[b], batch, b)
        return choose_drafts(before, draft, [used != part for used in self._used])

    def commit(self, round: Round) -> None:
        for b, builder, kinds in self._pending:
            self._acceptance.learn(builder, kinds, round.emitted[b])
        for b, (used, emitted) in enumerate(zip(self._used, round.emitted, strict=True)):
            if used >= 0 and emitted:
                verified = round.draft.width[b]
                estimated = sum(self._estimates[b][:verified])
                self._records[used].learn(len(emitted) - 1, estimated, drafted=self._width[b], verified=verified)
        super().commit(round)

    def _expected_value(self, part: int, batch: Batch) -> float:
        """Return the expected value of the next draft of a part. It is infinite until the part has drafted."""
        record = self._records[part]
        if record.rounds < _MIN_ROUNDS:
            return inf
        budget = batch.budget
        price = 0.0
        if self._has_model[part] and budget.min_draft_probs:
            seqs = max(sum(map(bool, budget.tokens)), 1)
            price = budget.min_draft_probs[min(seqs, len(budget.min_draft_probs)) - 1] - budget.min_path_prob
        return record.accepted - record.verified * budget.min_path_prob - record.drafted * price

    def _value(self, part: int, estimates: Sequence[float], batch: Batch, b: int) -> float:
        """Return the value of the draft of sequence b. Its tokens are drafted already, so only verification costs."""
        if not estimates or must_reproduce(batch.seqs[b], self._setup.draw):  # no estimates: the draft is sampled
            return inf
        factor = self._records[part].factor
        return sum(max(factor * prob - batch.budget.min_path_prob, 0.0) for prob in estimates)

    def _estimate(self, part: int, draft: Draft) -> tuple[tuple[float, ...], ...]:
        """Return `Draft.accept_prob` for a part that does not estimate it, from the acceptance at each depth."""
        estimates = []
        for b, (tokens, parents, width) in enumerate(
            zip(draft.host_tokens(), draft.parent.tolist(), draft.width, strict=True)
        ):
            builder, kinds = self._acceptance.by_depth(part, tokens[:width], parents[:width], prior=PRIOR)
            self._pending.append(Drafted(b, builder, kinds))
            estimates.append(tuple(accumulate(builder.accept_prob, min)))
        return tuple(estimates)


@dataclass(slots=True)
class _Record:
    """Decayed means of the drafts of a part that were used."""

    rounds: float = 0.0
    accepted: float = 0.0  # draft tokens
    estimated: float = 0.0  # draft tokens that should have been accepted, by their estimated probabilities
    drafted: float = 0.0
    verified: float = 0.0  # draft tokens that the planner kept

    @property
    def factor(self) -> float:
        """The accepted tokens relative to the estimated ones."""
        return (self.rounds * self.accepted + _PRIOR_TOKENS) / (self.rounds * self.estimated + _PRIOR_TOKENS)

    def learn(self, accepted: int, estimated: float, *, drafted: int, verified: int) -> None:
        before = self.rounds * _DECAY
        self.rounds = before + 1
        self.accepted = (self.accepted * before + accepted) / self.rounds
        self.estimated = (self.estimated * before + estimated) / self.rounds
        self.drafted = (self.drafted * before + drafted) / self.rounds
        self.verified = (self.verified * before + verified) / self.rounds
