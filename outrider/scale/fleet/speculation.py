"""How many tokens a simulated replica drafts: none, a fixed number, or by load."""

import random
from collections.abc import Callable

from outrider.drafting.plan.pass_cost import CostModel
from outrider.drafting.plan.speedup import expected_tau
from outrider.errors import OutriderError
from outrider.scale.estimate.pair import Acceptance

Policy = Callable[[int, float], int]  # draft tokens for so many sequences with so many cached tokens each
_CACHED_STEP = 128  # cached tokens that change the choice


def draw(acceptance: Acceptance, k: int, rng: random.Random) -> int:
    """Return how many of k draft tokens are accepted."""
    for accepted, rate in enumerate(acceptance.first(k)):
        if rng.random() >= rate:
            return accepted
    return k


def off(_seqs: int, _cached: float) -> int:
    """Draft nothing."""
    return 0


def fixed(k: int) -> Policy:
    """Return a policy that always drafts k tokens."""
    return lambda _seqs, _cached: k


def by_load(costs: CostModel, acceptance: Acceptance, *, max_k: int = 8) -> Policy:
    """Return the policy that drafts as many tokens as give the most tokens/s: E[tau(k)] / (propose + verify).

    This is the equation of the planner (`outrider.drafting.plan.cost_planner`), without its trials
    and without its choice for single sequences.
    """
    chosen: dict[tuple[int, int], int] = {}

    def speed(k: int, seqs: int, cached: float) -> float:
        seconds = costs.propose(seqs, k, cached=cached) + costs.verify(seqs, k, cached=cached)
        return expected_tau(acceptance.first(k)) / seconds

    def policy(seqs: int, cached: float) -> int:
        step = int(cached) // _CACHED_STEP
        key = (seqs, step)
        if key not in chosen:
            chosen[key] = max(range(max_k + 1), key=lambda k: speed(k, seqs, step * _CACHED_STEP))
        return chosen[key]

    return policy


def parse_policy(text: str, costs: CostModel, acceptance: Acceptance) -> Policy:
    """Return the policy of "off", "fixed:K" or "load". Raises OutriderError if the text is none of them."""
    name, _, number = text.partition(":")
    if text == "off":
        return off
    if text == "load":
        return by_load(costs, acceptance)
    if name == "fixed" and number.isdigit() and 0 < int(number) <= 64:
        return fixed(int(number))
    raise OutriderError(f"--speculation is {text!r}; use off, load, or fixed:K such as fixed:4")
