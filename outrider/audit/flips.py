"""The flip test: how often rounding swaps near-equal tokens in the precision that users run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from outrider.audit.pair import Outputs, Pair, first_difference
from outrider.audit.replay import LOGITS
from outrider.audit.statistics import wilson
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Request
from outrider.verify.rules import Verifier

# One token and several are scored by different kernels, whose results are rounded at every layer. A flip needs both
# runs to be wrong about the same two tokens, so where a computed logit is off by at most e, the two differ by at most
# 2 e. Rounding the logit alone costs half the format's epsilon times its size, and the layers before it a few times as
# much: e is put at 2 epsilon times the largest logit. For logits of 8 in bfloat16 that makes 0.25 logits.
NEAR = 4.0  # tolerance in epsilons of the format times the largest logit; at least `LOGITS` in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A position where two runs continue the same text differently."""

    prompt: int  # from 0
    position: int  # of the output token, from 0
    text: tuple[int, ...]  # the common text
    plain_token: int
    other_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipReport:
    """The flips of a run against plain decoding."""

    flips: tuple[Flip, ...]
    tokens: int  # compared tokens
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedOutputs:
    """The flips in the users' precision. Their margins are measured in float32 later."""

    speculative: FlipReport
    plain_batched: FlipReport  # for comparison: plain decoding in a batch against plain decoding alone
    dtype: torch.dtype
    kernels: str


def find_flips(pair: Pair, verifier: Verifier, *, k: int, tokens: int) -> ObservedOutputs:
    """Generate greedy texts with speculation and with plain decoding, and find the flips.

    Args:
        pair: the pair, in the users' precision.
        verifier: the verifier that users run.
        k: draft length.
        tokens: output tokens per text.
    """
    requests = pair.requests(SamplingParams(max_tokens=tokens, seed=0))
    plain = pair.plain(requests, alone=True).tokens
    return ObservedOutputs(
        speculative=_follow(requests, plain, partial(pair.speculative, verifier=verifier, k=k)),
        plain_batched=_follow(requests, plain, partial(pair.plain, alone=False)),
        dtype=pair.dtype,
        kernels=pair.kernels,
    )


def explain_flips(exact: Pair, observed: ObservedOutputs) -> dict[str, Any]:
    """Measure the margin of every flip in float32. A flip that is not a near-tie fails the test."""
    details = [_measure(exact, flip, observed.dtype) for flip in observed.speculative.flips]
    yardstick = [_measure(exact, flip, observed.dtype) for flip in observed.plain_batched.flips]
    tokens = observed.speculative.tokens
    bounds = wilson(len(details), tokens)
    return {
        "passed": all(detail["near_tie"] for detail in details),
        "dtype": str(observed.dtype).removeprefix("torch."),
        "kernels": observed.kernels,
        "tokens": tokens,
        "flips": len(details),
        "flips_per_1000": 1e3 * len(details) / tokens,
        "flips_per_1000_95": [1e3 * bounds.low, 1e3 * bounds.high],
        "largest_margin": max((detail["margin"] for detail in details), default=0.0),
        "plain_batched_flips_per_1000": 1e3 * len(yardstick) / observed.plain_batched.tokens,
        "plain_batched_largest_margin": max((detail["margin"] for detail in yardstick), default=0.0),
        "tau": observed.speculative.stats.tau,
        "details": details,
    }


def _follow(
    requests: Sequence[Request], plain: Sequence[Sequence[int]], answer: Callable[[Sequence[Request]], Outputs]
) -> FlipReport:
    """Compare along the plain texts. After a flip, the other run continues from the plain text."""
    flips: list[Flip] = []
    stats = Stats()
    begin = dict.fromkeys(range(len(plain)), 0)  # by prompt: the first token to compare
    while begin:
        read = {i: (*requests[i].prompt_token_ids, *plain[i][:at]) for i, at in begin.items()}
        rest = [
            replace(requests[i], prompt_token_ids=read[i], max_tokens=len(plain[i]) - at) for i, at in begin.items()
        ]
        answers = answer(rest)
        stats += answers.stats
        found = [
            Flip(
                prompt=i,
                position=at + off,
                text=(*read[i], *text[:off]),
                plain_token=plain[i][at + off],
                other_token=text[off],
            )
            for (i, at), text in zip(begin.items(), answers.tokens, strict=True)
            if (off := first_difference(plain[i][at:], text)) is not None
        ]
        flips += found
        begin = {flip.prompt: flip.position + 1 for flip in found if flip.position + 1 < len(plain[flip.prompt])}
    return FlipReport(flips=tuple(flips), tokens=sum(map(len, plain)), stats=stats)


def _measure(exact: Pair, flip: Flip, dtype: torch.dtype) -> dict[str, Any]:
    logits = exact.logits(flip.text)
    margin = abs(float(logits[flip.plain_token] - logits[flip.other_token]))
    tolerance = max(NEAR * torch.finfo(dtype).eps * float(logits.abs().max()), LOGITS)
    return {
        "prompt": flip.prompt,
        "position": flip.position,
        "plain_token": flip.plain_token,
        "other_token": flip.other_token,
        "margin": margin,
        "tolerance": tolerance,
        "near_tie": margin <= tolerance,
    }
