"""Statistics of an engine: all rounds, the rounds as the planner sees them, and each alternative proposer."""

from copy import deepcopy

from outrider.core.bound import Bound
from outrider.core.stats import StatsAccumulator
from outrider.core.types import Round
from outrider.engine.constraints import ConstrainedDraft
from outrider.engine.stopwatch import RoundSeconds


class Accounting:
    """Counts rounds, tokens and seconds."""

    def __init__(self, *, alternatives: int, exact: bool, bound: Bound | None = None) -> None:
        self.total = StatsAccumulator(exact=exact, bound=bound)
        # Without the tokens that grammars force, because the planner needs the statistics of the proposer alone. They
        # are the same until a grammar changes a draft.
        self.proposed = self.total
        # For each alternative, the rounds in which a sequence had draft tokens.
        self.by_alternative = tuple(StatsAccumulator(exact=exact, bound=bound) for _ in range(alternatives))

    def add(self, constrained: ConstrainedDraft, round: Round, seconds: RoundSeconds, *, experts: float) -> None:
        """Count one round. `experts` are the distinct experts of the target's pass (see `Stats.experts`)."""
        passes = []
        prompt_tokens = 0
        draft_tokens = 0
        for seq, emitted, width in zip(round.batch.seqs, round.emitted, round.draft.width, strict=True):
            if not emitted:
                continue
            if len(seq.rounds) == 1:  # the first pass after the prefill; a preempted sequence already has passes
                prompt_tokens += len(seq.request.prompt_token_ids)
            passes.append(seq.rounds[-1])
            draft_tokens += width
        if constrained.original and self.proposed is self.total:
            self.proposed = deepcopy(self.total)
        if self.proposed is not self.total:
            proposed, proposed_tokens = constrained.unforced(round, passes, draft_tokens)
            self.proposed.add(proposed, drafted=proposed_tokens, prompt=prompt_tokens)
            self.proposed.add_round(*seconds, experts=experts)
        self.total.add(passes, drafted=draft_tokens, prompt=prompt_tokens)
        self.total.add_round(*seconds, experts=experts)
        if draft_tokens:
            self._add_alternatives(constrained, round)

    def _add_alternatives(self, constrained: ConstrainedDraft, round: Round) -> None:
        """Count the pass of each sequence for the alternative that drafted for it."""
        for b, alternative in enumerate(round.batch.alternatives):
            if not round.emitted[b]:
                continue
            counts, width = constrained.proposed_pass(round, b)
            if width:
                self.by_alternative[alternative].add([counts], drafted=width)
