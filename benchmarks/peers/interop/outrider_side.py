"""Outrider's side, counted as vLLM counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from shared import Asked, Completed, Counts, cut

from outrider import LLM, SamplingParams
from outrider.core.stats import Stats, StatsAccumulator
from outrider.core.types import Batch
from outrider.plan.planner import FixedPlanner


class AfterFirst(FixedPlanner):
    """k guesses a round, but none beside the prompt: vLLM makes its first guesses when the first token is there."""

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        most = (room if row.num_output_tokens else 0 for row, room in zip(batch.seqs, batch.draft_budget, strict=True))
        return super().plan(replace(batch, draft_budget=tuple(most)), stats)


def run(llm: LLM, asked: Asked) -> list[Completed]:
    """Complete the prompts.

    vLLM offers k guesses in every round and counts all that the last one kept, though the text may end among them. So
    there is room for k tokens more here, nothing ends a text, and the loop is left after the round in which one ended.
    """
    params = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens + asked.k, ignore_eos=True)
    done = []
    for prompt in asked.prompts:
        before, tokens = llm.stats, list[int]()
        for chunk in llm.stream(prompt, params):
            tokens += chunk.token_ids
            if len(tokens) >= asked.max_tokens or not set(asked.ends).isdisjoint(tokens):
                break
        done.append(Completed(tokens=cut(tokens, asked), counts=_counts(before, llm.stats)))
    return done


def _counts(before: Stats, after: Stats) -> Counts:
    """What lies between two sums."""
    offered, accepted = (
        tuple(b - a for a, b in zip_longest(one, two, fillvalue=0))
        for one, two in ((before.offered, after.offered), (before.accepted, after.accepted))
    )
    return Counts(rounds=offered[0] if offered else 0, accepted=accepted)
