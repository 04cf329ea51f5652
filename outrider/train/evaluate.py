"""What counts of a draft: how far the engine gets with it on prompts that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Request
from outrider.engine.build import EngineParts, assemble
from outrider.plan.planner import FixedPlanner
from outrider.propose.base import Proposer
from outrider.train.model.trainee import DraftTrainee
from outrider.verify.rules import EXACT

_RULE = EXACT["block"]  # the one that a draft's chains are verified by where nobody says


class Evaluator:
    """Runs a target with whatever draft is handed to it."""

    def __init__(
        self, parts: EngineParts, prompts: Sequence[tuple[int, ...]], *, k: int, tokens: int, seed: int
    ) -> None:
        self._parts, self._prompts, self._k, self._tokens, self._seed = parts, prompts, k, tokens, seed

    def measure(self, pupil: DraftTrainee) -> dict[str, Any]:
        """tau and the acceptance by position, greedy and at temperature 1."""
        proposer = pupil.proposer(replace(self._parts.setup, draw=_RULE.draw))
        return {f"temperature {t:g}": _figures(self._run(proposer, t)) for t in (0.0, 1.0)}

    def _run(self, proposer: Proposer, temperature: float) -> Stats:
        parts = self._parts
        params = SamplingParams(temperature=temperature, max_tokens=self._tokens)
        engine = assemble(parts.loaded, proposer=proposer, verifier=_RULE, planner=FixedPlanner(self._k))
        for i, prompt in enumerate(self._prompts):
            limit = min(self._tokens, parts.context - len(prompt))
            seed = derive_seed(self._seed, i + 1)
            engine.add(
                Request(
                    id=i, prompt_token_ids=prompt, params=params, seed=seed, end_ids=parts.end_ids, max_tokens=limit
                )
            )
        while engine.busy():
            engine.step()
        return engine.stats


def _figures(stats: Stats) -> dict[str, Any]:
    return {"tau": round(stats.tau, 4), "acceptance": [round(rate, 4) for rate in stats.acceptance]}
