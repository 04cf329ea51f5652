"""Measures tau and the acceptance of a draft on prompts that it is not trained on."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.core.planner import FixedPlanner
from outrider.core.proposer import Proposer
from outrider.core.stats import Stats
from outrider.core.types import Request, SequenceState
from outrider.engine.build import EngineParts, assemble
from outrider.engine.codec import EncodedPrompt
from outrider.engine.drive import drive
from outrider.train.model.trainee import DraftTrainee
from outrider.verify.rules import EXACT

_VERIFIER = EXACT["block"]  # the default verifier of chains


class Evaluator:
    """Runs the engine with a draft in training."""

    def __init__(
        self,
        parts: EngineParts,
        prompts: Sequence[EncodedPrompt],
        categories: Sequence[str],
        *,
        k: int,
        tokens: int,
        seed: int,
    ) -> None:
        """Evaluate on `prompts` of these `categories`.

        Args:
            prompts: what the target continues.
            categories: of each prompt.
            k: draft tokens per round.
            tokens: most output tokens of a prompt.
        """
        self._parts = parts
        self.prompts = prompts
        self._categories = categories
        self._k = k
        self._tokens = tokens
        self._seed = seed

    def measure(self, trainee: DraftTrainee) -> dict[str, Any]:
        """Return tau, also by category, and the acceptance by position, for greedy decoding and for temperature 1."""
        proposer = trainee.proposer(replace(self._parts.setup, draw=_VERIFIER.draw))
        return {f"temperature {t:g}": self._figures(proposer, t) for t in (0.0, 1.0)}

    def _figures(self, proposer: Proposer, temperature: float) -> dict[str, Any]:
        """Answer all prompts, and return the figures."""
        by_category: dict[str, Stats] = {}
        for category, stats in zip(self._categories, self._generate(proposer, temperature), strict=True):
            by_category[category] = by_category.get(category, Stats()) + stats
        total = reduce(add, by_category.values())
        return {
            "tau": round(total.tau, 4),
            "acceptance": [round(rate, 4) for rate in total.acceptance],
            "tau_by_category": {name: round(stats.tau, 4) for name, stats in by_category.items()},
        }

    def _generate(self, proposer: Proposer, temperature: float) -> list[Stats]:
        """Answer all prompts, and return the statistics of each one."""
        parts = self._parts
        params = SamplingParams(temperature=temperature, max_tokens=self._tokens)
        engine = assemble(parts.loaded, proposer=proposer, verifier=_VERIFIER, planner=FixedPlanner(self._k))
        seqs = []
        for i, prompt in enumerate(self.prompts):
            limit = min(self._tokens, parts.context - len(prompt.tokens))
            seed = derive_seed(self._seed, i + 1)
            request = Request(
                id=i,
                prompt_token_ids=prompt.tokens,
                source_token_ids=prompt.source_token_ids,
                params=params,
                seed=seed,
                end_ids=parts.end_ids,
                max_tokens=limit,
            )
            seqs.append(engine.add(request))
        for _ in drive(engine, seqs):
            pass
        return list(map(_passes, seqs))


def _passes(seq: SequenceState) -> Stats:
    prompt = len(seq.request.prompt_token_ids)
    return Stats.of_passes(seq.rounds, drafted=seq.num_draft_tokens, prompt=prompt, exact=_VERIFIER.exact)
