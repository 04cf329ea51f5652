"""Drafting on its own device while the target verifies."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from outrider.drafting.plan.speedup import expected_tau
from outrider.errors import OutriderError


class Overlap(StrEnum):
    """The draft's work while the target verifies."""

    NONE = "none"  # it waits
    CONTINUE = "continue"  # it goes on after its own draft (PEARL, AMUSD)
    GUESS = "guess"  # it drafts for the outcomes that are likely (SSD)


class Round(NamedTuple):
    """The expected tokens and seconds of a round of one sequence."""

    tokens: float
    seconds: float


def serial_round(rates: Sequence[float], *, draft: float, verify: float) -> Round:
    """Return the round that drafts, then verifies: E[tau] tokens in D + V (Leviathan et al. 2023)."""
    return Round(expected_tau(rates), draft + verify)


def continued_round(rates: Sequence[float], *, draft: float, verify: float) -> Round:
    """Return the round of a draft that goes on with its own tokens while the target verifies them.

    h = a_1 ... a_k is the probability that all k tokens are accepted. Then the next k tokens are
    drafted already, and there is no bonus token, because the draft has chosen the token at its
    place. Otherwise the target corrects one token, and the draft starts again:

        tokens = (E[tau] - 1) + (1 - h)
        seconds = max(D, V) + (1 - h) D

    PEARL (Liu et al. 2025, arXiv 2408.11850, "post-verify") and AMUSD (McDanel 2024, arXiv
    2410.17375) overlap so. PEARL also verifies the first token of a new draft early ("pre-verify"),
    which is left out: the result is a lower bound.

    Args:
        rates: a_i, the acceptance rates by position; at least one.
        draft: D, the seconds of k draft tokens.
        verify: V, the seconds of the target's pass and of the round outside of passes.
    """
    *_, all_accepted = accumulate(rates, mul)
    miss = 1 - all_accepted
    return Round(expected_tau(rates) - 1 + miss, max(draft, verify) + miss * draft)


def guessed_round(rates: Sequence[float], *, draft: float, verify: float, hit: float) -> Round:
    """Return the round of a draft that prepares the next draft for the likely outcomes of the verification.

    With probability h the outcome is one of them, and the next draft is ready: E[tau] tokens in max(D, V) + (1 - h) D.
    SSD (2026, arXiv 2603.03251). With h = 1 the gain over a serial round is at most 1 + D / V.

    Raises:
        OutriderError: the share of hits is outside [0, 1].
    """
    if not 0 <= hit <= 1:
        raise OutriderError(f"the share of outcomes that are drafted ahead is {hit}; use a share from 0 to 1")
    return Round(expected_tau(rates), max(draft, verify) + (1 - hit) * draft)


def parse_overlap(text: str) -> tuple[Overlap, float]:
    """Return the kind of overlap and the share of hits of "none", "continue" or "guess:SHARE".

    Raises:
        OutriderError: it is none of them.
    """
    name, _, share = text.partition(":")
    try:
        if name == Overlap.GUESS:
            hit = float(share)
            guessed_round((1.0,), draft=1.0, verify=1.0, hit=hit)  # raises OutriderError for other shares
            return Overlap.GUESS, hit
        if not share:
            return Overlap(name), 0.0
    except ValueError:
        pass
    raise OutriderError(f"--overlap is {text!r}; use none, continue, or guess:SHARE such as guess:0.9")
