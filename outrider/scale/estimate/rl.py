"""Estimate how much faster generation shortens a step of reinforcement learning.

A step generates rollouts and does other work: rewards, log-probabilities, training, and the transfer of the weights. R
is the share of the generation in a step without speculation, and a is the speedup of the generation.
"""

import math

from outrider.errors import OutriderError


def step_speedup(share: float, speedup: float, *, overlap: float = 0.0) -> float:
    """Return the speedup of a step.

    Without overlap it is 1 / (R / a + 1 - R) (Amdahl 1967). In asynchronous training other work
    runs while the rollouts of a later step are generated. Only the generation that exceeds it
    counts, with and without speculation: the step takes max(0, R / a - o) + 1 - R.

    Args:
        share: R, in [0, 1].
        speedup: a, above 0. Below 1, the step becomes slower.
        overlap: o, the time during which generation is hidden, as a share of a step without overlap and speculation.

    Raises:
        OutriderError: a number is out of range.
    """
    if not 0 <= share <= 1:
        raise OutriderError(f"the generation's share of a step is {share}; use a share from 0 to 1, such as 0.7")
    if not 0 < speedup < math.inf:
        raise OutriderError(f"the speedup of the generation is {speedup}; use a number above 0")
    if not 0 <= overlap <= 1 - share + 1e-9:
        raise OutriderError(
            f"the overlap is {overlap}, and only {1 - share:.3g} of a step is not generation; use at most that"
        )

    def seconds(generation: float) -> float:
        return max(0.0, generation - overlap) + 1 - share

    faster = seconds(share / speedup)
    return seconds(share) / faster if faster else math.inf


def step_limit(share: float, *, overlap: float = 0.0) -> float:
    """Return the speedup of a step whose generation takes no time: no speculation gains more."""
    return step_speedup(share, 1e300, overlap=overlap)
