"""The measurements that fit into a limited time: how long the outputs are, and which variants run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.params import AUTO
from outrider.lab.common.trial import MIN_BATCHES, WARMUP_TOKENS, Trial, Variant

PLANNED = 0.8  # share of a time limit that is planned: proposers may be slower than plain decoding
_SHORT = 32  # tokens of an output; variants are left out before outputs are made shorter


class Budget(NamedTuple):
    """The limits of a measurement."""

    max_tokens: int  # of an output
    variants: int  # of each batch size and temperature, with plain decoding


class RunTime(NamedTuple):
    """How long plain decoding of a batch of prompts takes."""

    prefill: float  # seconds
    token: float  # seconds of a token of each sequence

    @classmethod
    def of(cls, trial: Trial) -> RunTime:
        """Return the times that a run has shown."""
        decoding = trial.seconds - trial.prefill_seconds
        rounds = max(trial.tokens // trial.variant.batch - 1, 1)
        return cls(prefill=trial.prefill_seconds, token=decoding / rounds)

    def run(self, tokens: int) -> float:
        """Return the seconds of a run with this many output tokens."""
        return self.prefill + tokens * self.token


def plan_budget(time: RunTime, *, seconds: float, variants: int, max_tokens: int) -> Budget:
    """Return the longest outputs with which all variants run on two batches of prompts in time.

    If outputs of 32 tokens take too long, variants are left out: at least one proposer stays.

    Args:
        time: of plain decoding. Proposers are assumed to take as long.
        seconds: the time for one batch size and temperature, warm-up included.
        variants: their number, with plain decoding.
        max_tokens: the longest output.
    """
    if math.isinf(seconds):
        return Budget(max_tokens, variants)
    warmup = time.run(WARMUP_TOKENS)
    per_run = (seconds / variants - warmup) / MIN_BATCHES
    fitting = int((per_run - time.prefill) / max(time.token, 1e-9))
    shortest = min(_SHORT, max_tokens)
    if fitting >= shortest:
        return Budget(min(fitting, max_tokens), variants)
    per_variant = warmup + MIN_BATCHES * time.run(shortest)
    return Budget(shortest, min(max(int(seconds / max(per_variant, 1e-9)), 2), variants))


def most_promising(variants: Sequence[Variant], count: int) -> list[Variant]:
    """Return the first `count` variants in a fair order, as they are ordered in `variants`.

    Plain decoding comes first, then each proposer with k auto, then each with the first fixed k, and so on.
    """
    turns: dict[tuple[str, str | None], int] = {}
    order = {}
    for variant in variants:
        draft = (variant.proposer, variant.draft_quantize)
        turns[draft] = turns.get(draft, 0) + 1
        order[variant] = -1 if variant.plain else 0 if variant.k == AUTO else turns[draft]
    chosen = set(sorted(variants, key=order.__getitem__)[:count])
    return [variant for variant in variants if variant in chosen]
