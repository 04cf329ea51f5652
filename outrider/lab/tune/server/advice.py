"""Recommend the settings of a server from measurements on it. The functions are pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from outrider.lab.client.metrics import Speculation
from outrider.lab.tune.candidate import WORTHWHILE

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
    """The measurements at one load."""

    concurrency: int  # requests at a time
    tokens_per_s: float  # output tokens of all requests
    plain_tokens_per_s: float | None  # the same without speculation; None: it could not be switched off
    speculation: Speculation | None  # counted during this load; None: no metrics of a known engine

    @property
    def speedup(self) -> float | None:
        """Tokens/s over those without speculation."""
        return self.tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s else None


def best_k(load: Load) -> int | None:
    """Return the number of draft tokens that would be fastest at a load, up to the measured one. None: unknown."""
    speedups = _speedups(load)
    return max(range(len(speedups)), key=speedups.__getitem__) if speedups else None


def _speedups(load: Load) -> list[float]:
    """Return the estimated speedup of each number of draft tokens from 0 to the measured one; [] if it is unknown.

    A round with k draft tokens takes tau / speedup times as long as a plain one. Its additional time is taken to grow
    evenly with k, so that shorter drafts can be compared: speedup(j) = (1 + sum of reach up to j) / (1 + j c / k).
    """
    speculation = load.speculation
    if speculation is None or not speculation.reach or not load.speedup or not speculation.tau:
        return []
    reach = speculation.reach
    additional = max(speculation.tau / load.speedup - 1, 0.0) / len(reach)
    return [(1 + sum(reach[:k])) / (1 + k * additional) for k in range(len(reach) + 1)]


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
    """Return the sentences that say why no draft token was verified."""
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
    measured = sorted((load for load in loads if load.speedup is not None), key=lambda load: load.concurrency)
    if not measured:
        return [
            "The gain is unknown, because this server cannot switch speculation off for a request: start a second one"
            " without it and give --baseline URL."
        ]
    listed = ", ".join(f"{load.speedup:.2f} at {load.concurrency}" for load in measured)
    lines = [f"Tokens/s over those without speculation: {listed} requests at a time."]
    paying = list(filter(_pays, measured))
    losing = [load for load in measured if not _pays(load)]
    if not paying:
        return [*lines, *_no_gain(measured, engine)]
    k = best_k(paying[0])
    now = _length(paying[0])
    if k and k < now:
        lines += [_shorter(k, now), *_whole_blocks(engine)]
    elif k:
        lines += [f"{now} draft tokens are not too many; measure more, such as {now + 2}.", *_whole_blocks(engine)]
    if losing:
        lines.append(_loss(losing) + _switch(engine, measured, k or now))
    return lines


def _pays(load: Load) -> bool:
    return bool(load.speedup and load.speedup >= WORTHWHILE)


def _length(load: Load) -> int:
    """Return the number of draft tokens that is set; 0 if it is unknown."""
    return len(load.speculation.reach) if load.speculation else 0


def _shorter(k: int, now: int) -> str:
    return (
        f"Set {k} draft {'token' if k == 1 else 'tokens'} in place of {now}: the later ones cost more than they gain."
    )


def _whole_blocks(engine: str) -> list[str]:
    if engine == "Outrider":
        return []
    return [
        "A DFlash or DSpark head is an exception: keep the k of its whole block, because this engine computes a block"
        " of k tokens, and the head accepts less in one of another size than it was trained with."
    ]


def _no_gain(measured: Sequence[Load], engine: str) -> list[str]:
    """Return the advice if no load gains: a shorter draft, if one is estimated to gain, or none."""
    lines = [_loss(measured) + "."]
    load = max(measured, key=lambda each: max(_speedups(each), default=0.0))
    k = best_k(load)
    if k and k < _length(load) and _speedups(load)[k] >= WORTHWHILE:
        return [
            *lines,
            f"{_shorter(k, _length(load))} Estimated: {_speedups(load)[k]:.2f} times the tokens/s at"
            f" {load.concurrency} requests at a time. Measure again, and switch speculation off if it still loses.",
            *_whole_blocks(engine),
        ]
    if max(each.speedup or 0.0 for each in measured) < _CLEAR_LOSS:
        return [*lines, "It slows every measured load down: switch it off, or use a better or smaller draft."]
    return [
        *lines,
        "It brings no clear gain at any measured load. Measure more with --num-requests before you decide; if the gain"
        " stays small, use a better or smaller draft, or switch speculation off.",
    ]


def _loss(losing: Sequence[Load]) -> str:
    """Return the words that say at which loads speculation does not pay."""
    verb = "loses" if all((load.speedup or 0.0) < 1 for load in losing) else "does not pay"
    places = ", ".join(f"{load.concurrency} ({load.speedup:.2f} of the tokens/s without it)" for load in losing)
    return f"Speculation {verb} at these requests at a time: {places}"


def _switch(engine: str, measured: Sequence[Load], k: int) -> str:
    """Return how to speculate only at the loads where it pays: the end of the sentence that names the others.

    Args:
        measured: the loads, the smallest first.
        k: draft tokens where it pays; 0: unknown.
    """
    if engine == "vLLM" and k:
        table = json.dumps(_lengths(measured, k))
        return f": add num_speculative_tokens_per_batch_size {table} to --speculative-config."
    if engine == "Outrider":
        return ": use --k auto, which stops drafting there by itself."
    return ": send such loads to a server without speculation."


def _lengths(measured: Sequence[Load], k: int) -> list[list[int]]:
    """Return vLLM's table of draft lengths: first and last batch size, and the length, for each range of loads."""
    ranges: list[list[int]] = []
    for load in measured:
        length = k if _pays(load) else 0
        if ranges and ranges[-1][2] == length:
            continue
        first = load.concurrency if ranges else 1
        if ranges:
            ranges[-1][1] = first - 1
        ranges.append([first, max(_MAX_BATCH, measured[-1].concurrency), length])
    return ranges
