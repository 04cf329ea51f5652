"""What to set on a server, from what was measured on it. The functions are pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from outrider.client.metrics import Speculation
from outrider.tune.candidate import WORTHWHILE

_MAX_BATCH = 512  # largest batch in vLLM's table of k by batch size
# Options that start an engine with speculation.
_START: Mapping[str, str] = MappingProxyType(
    {
        "vLLM": "--speculative-config",
        "SGLang": "--speculative-algorithm",
        "llama.cpp": "--spec-type",
        "Outrider": "--proposer",
    }
)
_CLEAR_LOSS = 0.95  # speedup below which a few requests suffice to tell a loss from noise
_POOR = 0.05  # acceptance at the first position below which a draft does not work at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What was measured at one load."""

    concurrency: int  # requests at a time
    tokens_per_s: float  # output tokens of all requests
    plain_tokens_per_s: float | None  # the same without speculation; None: it could not be switched off
    speculation: Speculation | None  # counted during this load; None: no metrics of a known engine

    @property
    def speedup(self) -> float | None:
        """Tokens/s over those without speculation."""
        return self.tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s else None


def best_k(load: Load) -> int | None:
    """Return the number of draft tokens that would be fastest at a load, up to the measured one. None: unknown.

    A round with k draft tokens takes tau / speedup times as long as a plain one. Its additional time is taken to grow
    evenly with k, so that shorter drafts can be compared: speedup(j) = (1 + sum of reach up to j) / (1 + j c / k).
    """
    speculation = load.speculation
    if speculation is None or not speculation.reach or not load.speedup or not speculation.tau:
        return None
    reach = speculation.reach
    additional = max(speculation.tau / load.speedup - 1, 0.0) / len(reach)
    speedups = [(1 + sum(reach[:k])) / (1 + k * additional) for k in range(len(reach) + 1)]
    return max(range(len(speedups)), key=speedups.__getitem__)


def advise(loads: Sequence[Load], engine: str, *, configured: bool | None = None) -> list[str]:
    """Return what was found and what to set, as sentences.

    Args:
        loads: what was measured.
        engine: name of the engine; "" if the server has no metrics of a known one.
        configured: whether the server was started with speculation; None: it does not say.
    """
    speculations = [load.speculation for load in loads if load.speculation is not None]
    if not speculations:
        return ["The server has no metrics of a known engine, so its acceptance is unknown.", *_speed(loads, engine)]
    if not any(each.on for each in speculations):
        return [_idle(engine, configured)]
    on = f"Speculation is on: {engine} verified draft tokens during the measurement."
    return [on, *_acceptance(speculations), *_speed(loads, engine)]


def _idle(engine: str, configured: bool | None) -> str:
    """Say why no draft token was verified."""
    if configured:
        return f"Speculation is on in {engine}, but it verified no draft token: the drafter proposes nothing here."
    fix = f"set it with {_START[engine]}. `outrider tune --target DIR` finds which proposer pays."
    if configured is None:
        return f"{engine} verified no draft token: speculation is off, or the drafter proposes nothing here; {fix}"
    return f"Speculation is off in {engine}; {fix}"


def _acceptance(speculations: Sequence[Speculation]) -> list[str]:
    first = next(each for each in speculations if each.on)
    lines = []
    if first.tau is not None:
        lines.append(f"A pass emits {first.tau:.2f} tokens.")
    if first.reach:
        listed = ", ".join(f"{share:.0%}" for share in first.reach)
        lines.append(f"Accepted by position: {listed} of the drafts.")
        if first.reach[0] < _POOR:
            lines.append(
                "Almost no first draft token is accepted. The draft does not belong to this target, or is loaded as"
                " another kind: compare the model names, and the method (EAGLE and EAGLE-3 are not the same)."
            )
    elif first.acceptance is not None:
        lines.append(f"{first.acceptance:.0%} of the draft tokens are accepted.")
    return lines


def _speed(loads: Sequence[Load], engine: str) -> list[str]:
    measured = [(load.concurrency, load.speedup) for load in loads if load.speedup is not None]
    if not measured:
        return [
            "The gain is unknown, because this server cannot switch speculation off for a request: start a second one"
            " without it and give --baseline URL."
        ]
    listed = ", ".join(f"{speedup:.2f} at {concurrency}" for concurrency, speedup in measured if speedup)
    lines = [f"Tokens/s over those without speculation: {listed} requests at a time."]
    pays = [concurrency for concurrency, speedup in measured if speedup and speedup >= WORTHWHILE]
    ks = {load.concurrency: best_k(load) for load in loads}
    first = loads[0]
    now = len(first.speculation.reach) if first.speculation else 0
    if not pays:
        lines.append(_no_gain([speedup for _, speedup in measured if speedup]))
        return lines
    k = ks[pays[0]]
    if k and now and k < now:
        lines.append(f"Set {k} draft tokens in place of {now}: the later ones cost more than they gain.")
    elif k and now:
        lines.append(f"{now} draft tokens are not too many; measure more, such as {now + 2}.")
    if k and now and engine != "Outrider":
        lines.append(
            "A DFlash or DSpark head is an exception: keep the k of its whole block, because this engine computes a"
            " block of k tokens, and the head accepts less in one of another size than it was trained with."
        )
    losing = [concurrency for concurrency, speedup in measured if speedup and speedup < WORTHWHILE]
    if losing and min(losing) > max(pays):
        lines.append(_stop(engine, min(losing), k or now))
    return lines


def _no_gain(speedups: Sequence[float]) -> str:
    if max(speedups) < _CLEAR_LOSS:
        return "It slows every measured load down: switch it off, or use a better or smaller draft."
    return (
        "It brings no clear gain at any measured load. Measure more with --num-requests before you decide; if the gain"
        " stays small, use a better or smaller draft, or switch speculation off."
    )


def _stop(engine: str, batch: int, k: int) -> str:
    text = f"It does not pay from {batch} requests at a time on"
    if engine == "vLLM" and k:
        table = json.dumps([[1, batch - 1, k], [batch, max(_MAX_BATCH, batch), 0]])
        return f"{text}: add num_speculative_tokens_per_batch_size {table} to --speculative-config."
    if engine == "Outrider":
        return f"{text}: use --k auto, which stops drafting there by itself."
    return f"{text}: route requests above that load to a server without speculation."
