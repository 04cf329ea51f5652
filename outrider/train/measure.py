"""What counts of a draft: how far the engine gets with it on prompts that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from outrider.build import House
from outrider.engine import Engine
from outrider.heads.follower import Follower
from outrider.heads.independent import Independent
from outrider.heads.target import make_head_target
from outrider.noise import mix_int
from outrider.params import SamplingParams
from outrider.plan import FixedPlanner
from outrider.propose.base import Proposer, Setup
from outrider.propose.heads import HeadProposer
from outrider.schedule import Scheduler
from outrider.stats import Stats
from outrider.target import Lender
from outrider.types import Draw, Request
from outrider.verify import EXACT


class Gauge:
    """Runs a target with whatever draft is handed to it."""

    def __init__(self, house: House, prompts: Sequence[tuple[int, ...]], *, k: int, tokens: int, seed: int) -> None:
        self._house, self._prompts, self._k, self._tokens, self._seed = house, prompts, k, tokens, seed

    def measure(self, module: Follower | Independent) -> dict[str, Any]:
        """tau and the acceptance by position, greedy and at temperature 1."""
        return {f"temperature {t:g}": _figures(self._run(module, t)) for t in (0.0, 1.0)}

    def _run(self, module: Follower | Independent, temperature: float) -> Stats:
        house, rule = self._house, EXACT["block"]
        params = SamplingParams(temperature=temperature, max_tokens=self._tokens)
        engine = Engine(
            target=house.target,
            proposer=self._proposer(module, rule.draw),
            verifier=rule,
            planner=FixedPlanner(self._k),
            scheduler=Scheduler(slots=house.target.slots, chunk=512, context=house.context),
        )
        for i, prompt in enumerate(self._prompts):
            limit = min(self._tokens, house.context - len(prompt) - self._k)
            seed = mix_int(self._seed, i + 1)
            engine.add(Request(id=i, prompt=prompt, params=params, seed=seed, end_ids=house.end_ids, limit=limit))
        while engine.busy():
            engine.step()
        return engine.stats

    def _proposer(self, module: Follower | Independent, draw: Draw) -> Proposer:
        house = self._house
        setup = Setup(
            target=house.target,
            vocab=house.vocab,
            slots=house.target.slots,
            context=house.context,
            device=house.device,
            dtype=house.dtype,
            draw=draw,
            tokenizer=house.tokenizer,
        )
        assert isinstance(house.target, Lender)
        still = deepcopy(module).to(house.dtype).requires_grad_(False).eval()
        head = make_head_target(still, house.target.lend(), slots=house.target.slots, context=house.context)
        return HeadProposer(setup, head)


def _figures(stats: Stats) -> dict[str, Any]:
    return {"tau": round(stats.tau, 4), "acceptance": [round(rate, 4) for rate in stats.acceptance]}
