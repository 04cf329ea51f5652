"""The flip test: count how often rounding swaps near-equal tokens, in the precision that users run."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Request
from outrider.lab.audit.pair import Outputs, Pair, first_difference
from outrider.lab.audit.replay import LOGITS
from outrider.lab.audit.statistics import Interval, wilson
from outrider.models.torch.checkpoint import Precision
from outrider.verify.rules import Verifier

# Passes over one token and over several use different kernels, and every layer rounds. If a computed logit is off by at
# most e, two runs can swap tokens whose logits differ by at most 2 e. Rounding the logit alone costs half an epsilon of
# the format times the logit, and the layers before it a few times as much. So e is 2 epsilon times the largest logit.
# For logits of 8 in bfloat16, the tolerance is 0.25.
NEAR = 4.0  # tolerance in epsilons of the format times the largest logit; at least `LOGITS`


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A position at which two runs continue the same tokens differently."""

    prompt: int  # from 0
    position: int  # of the output token, from 0
    plain_token: int
    other_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFlip(Flip):
    """A flip whose margin is not measured yet."""

    text: tuple[int, ...]  # the common tokens, including the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipReport:
    """The flips of a run against plain decoding."""

    flips: tuple[ObservedFlip, ...]
    tokens: int  # compared tokens
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedOutputs:
    """The flips in the users' precision. Their margins are measured in float32 later."""

    speculative: FlipReport
    plain_batched: FlipReport  # for comparison: plain decoding in a batch against plain decoding alone
    precision: Precision
    kernels: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFlip(Flip):
    """A flip, as in the JSON document."""

    margin: float  # gap of the two tokens in logits, in float32
    tolerance: float  # the largest margin that rounding explains
    near_tie: bool  # whether rounding explains it


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipResult:
    """The result of the flip test."""

    precision: Precision
    kernels: str
    tokens: int  # compared tokens
    flips: tuple[MeasuredFlip, ...]
    flips_per_1000_95: Interval
    plain_batched_flips_per_1000: float
    plain_batched_largest_margin: float
    tau: float

    @property
    def passed(self) -> bool:
        """Whether rounding explains every flip."""
        return all(flip.near_tie for flip in self.flips)

    @property
    def flips_per_1000(self) -> float:
        return 1e3 * len(self.flips) / self.tokens

    @property
    def largest_margin(self) -> float:
        """The largest margin in logits; 0 without flips."""
        return _largest_margin(self.flips)

    def as_dict(self) -> dict[str, Any]:
        """Return the section of the JSON document."""
        return {
            "passed": self.passed,
            **self.precision.as_dict(),
            "kernels": self.kernels,
            "tokens": self.tokens,
            "flips": len(self.flips),
            "flips_per_1000": self.flips_per_1000,
            "flips_per_1000_95": [self.flips_per_1000_95.low, self.flips_per_1000_95.high],
            "largest_margin": self.largest_margin,
            "plain_batched_flips_per_1000": self.plain_batched_flips_per_1000,
            "plain_batched_largest_margin": self.plain_batched_largest_margin,
            "tau": self.tau,
            "details": list(map(asdict, self.flips)),
        }


def find_flips(pair: Pair, verifier: Verifier, *, k: int, tokens: int) -> ObservedOutputs:
    """Return the flips between greedy outputs of plain decoding, and those with speculation or in a batch.

    Args:
        pair: the pair, in the users' precision.
        verifier: the verifier that users run.
        k: draft length.
        tokens: output tokens per prompt.
    """
    requests = pair.requests(SamplingParams(max_tokens=tokens, seed=0))
    plain = pair.plain(requests, alone=True).tokens
    return ObservedOutputs(
        speculative=_follow(requests, plain, partial(pair.speculative, verifier=verifier, k=k)),
        plain_batched=_follow(requests, plain, partial(pair.plain, alone=False)),
        precision=pair.precision,
        kernels=pair.kernels,
    )


def explain_flips(exact: Pair, observed: ObservedOutputs) -> FlipResult:
    """Return every flip with its margin in float32. A flip that is not a near-tie fails the test."""
    flips = [_measure(exact, flip, observed.precision.dtype) for flip in observed.speculative.flips]
    plain_flips = [_measure(exact, flip, observed.precision.dtype) for flip in observed.plain_batched.flips]
    tokens = observed.speculative.tokens
    bounds = wilson(len(flips), tokens)
    return FlipResult(
        precision=observed.precision,
        kernels=observed.kernels,
        tokens=tokens,
        flips=tuple(flips),
        flips_per_1000_95=Interval(low=1e3 * bounds.low, high=1e3 * bounds.high),
        plain_batched_flips_per_1000=1e3 * len(plain_flips) / observed.plain_batched.tokens,
        plain_batched_largest_margin=_largest_margin(plain_flips),
        tau=observed.speculative.stats.tau,
    )


def _follow(
    requests: Sequence[Request], plain: Sequence[Sequence[int]], run: Callable[[Sequence[Request]], Outputs]
) -> FlipReport:
    """Return the flips of another run against plain outputs. After a flip, it continues from the plain tokens."""
    flips: list[ObservedFlip] = []
    stats = Stats()
    begin = dict.fromkeys(range(len(plain)), 0)  # for each prompt, the first output token to compare
    while begin:
        prefixes = {i: (*requests[i].prompt_token_ids, *plain[i][:start]) for i, start in begin.items()}
        continuations = [
            replace(requests[i], prompt_token_ids=prefixes[i], max_tokens=len(plain[i]) - start)
            for i, start in begin.items()
        ]
        outputs = run(continuations)
        stats += outputs.stats
        new = []
        for (i, start), tokens in zip(begin.items(), outputs.tokens, strict=True):
            offset = first_difference(plain[i][start:], tokens)
            if offset is not None:
                flip = ObservedFlip(
                    prompt=i,
                    position=start + offset,
                    text=(*prefixes[i], *tokens[:offset]),
                    plain_token=plain[i][start + offset],
                    other_token=tokens[offset],
                )
                new.append(flip)
        flips += new
        begin = {flip.prompt: flip.position + 1 for flip in new if flip.position + 1 < len(plain[flip.prompt])}
    return FlipReport(flips=tuple(flips), tokens=sum(map(len, plain)), stats=stats)


def _largest_margin(flips: Sequence[MeasuredFlip]) -> float:
    return max((flip.margin for flip in flips), default=0.0)


def _measure(exact: Pair, flip: ObservedFlip, dtype: torch.dtype) -> MeasuredFlip:
    """Return a flip with its margin in float32."""
    logits = exact.logits(flip.text)
    margin = abs(float(logits[flip.plain_token] - logits[flip.other_token]))
    tolerance = max(NEAR * torch.finfo(dtype).eps * float(logits.abs().max()), LOGITS)
    return MeasuredFlip(
        prompt=flip.prompt,
        position=flip.position,
        plain_token=flip.plain_token,
        other_token=flip.other_token,
        margin=margin,
        tolerance=tolerance,
        near_tie=margin <= tolerance,
    )
