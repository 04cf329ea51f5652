"""The equations of speculative decoding: expected tau, speedup, and the limits of bandwidth and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from outrider.errors import OutriderError


def expected_tau(acceptance: Sequence[float]) -> float:
    """Return E[tau] = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k (Leviathan et al. 2023, sec. 3.1, one rate per position).

    Args:
        acceptance: a_i in [0, 1], the probability that draft token i is accepted if all before it
            are.

    Returns:
        Tokens per pass, including the bonus token; 1 without draft tokens.

    Raises:
        OutriderError: a rate is outside [0, 1].
    """
    for rate in acceptance:
        if not 0 <= rate <= 1:
            raise OutriderError(f"an acceptance rate is {rate}; use a share from 0 to 1")
    return 1.0 + sum(map(float, accumulate(acceptance, mul)))


def speedup(tau: float, *, k: int, draft: float, verify: float = 1.0, host: float = 0.0) -> float:
    """Return S = E[tau] / (k c + v + h) (Leviathan et al. 2023, theorem 3.8, which has v = 1 and h = 0).

    Args:
        tau: expected tokens per pass.
        k: draft tokens per round.
        draft: c, the time of one draft token. The unit of all costs is the time of a plain round.
        verify: v, the time of a pass over k draft tokens and the last committed token.
        host: h, the time of a round outside of the passes.

    Returns:
        Tokens/s divided by the tokens/s of plain decoding.

    Raises:
        OutriderError: a cost is below 0, or all are 0.
    """
    for name, value in {"k": k, "draft": draft, "verify": verify, "host": host}.items():
        _check_cost(name, value)
    if not (cost := k * draft + verify + host):
        raise OutriderError("the cost of a round is 0; give draft, verify or host above 0")
    return tau / cost


def decode_limit(bytes_per_pass: float, bandwidth: float) -> float:
    """Return bandwidth / bytes, because a pass reads every weight once (the roofline of Williams et al. 2009).

    Args:
        bytes_per_pass: bytes of weights that one pass of the target reads.
        bandwidth: memory bandwidth in bytes/s.

    Returns:
        Maximum passes per second. At batch size 1, this is the tokens/s of plain decoding.

    Raises:
        OutriderError: a quantity is not above 0.
    """
    if bytes_per_pass <= 0 or bandwidth <= 0:
        raise OutriderError(f"bytes_per_pass is {bytes_per_pass} and bandwidth {bandwidth}; both must be above 0")
    return bandwidth / bytes_per_pass


def roof(*, bytes_per_pass: float, flops_per_pass: float, bandwidth: float, gemm: float) -> float:
    """Return min(bandwidth / bytes, gemm / flops), the roofline of Williams et al. 2009.

    Args:
        bytes_per_pass: bytes of weights and KV cache that one pass of the target reads.
        flops_per_pass: FLOPs of one pass, two for each weight and token.
        bandwidth: memory bandwidth in bytes/s.
        gemm: FLOP/s of a large matrix product.

    Returns:
        Maximum passes per second.

    Raises:
        OutriderError: a quantity is not above 0.
    """
    if flops_per_pass <= 0 or gemm <= 0:
        raise OutriderError(f"flops_per_pass is {flops_per_pass} and gemm {gemm}; both must be above 0")
    return min(decode_limit(bytes_per_pass, bandwidth), gemm / flops_per_pass)


def sequences_instead(*, draft_weights: float, draft_cache: float, row_cache: float) -> float:
    """Return n = (W_d + K_d) / K_t, the memory of a draft model in sequences.

    Without the draft model, n more sequences could run at once in the same memory.

    Args:
        draft_weights: W_d, bytes of the draft's weights.
        draft_cache: K_d, bytes of the draft's KV cache, of all sequences.
        row_cache: K_t, bytes of the target's KV cache of one sequence with a full context.

    Raises:
        OutriderError: a quantity is below 0, or row_cache is 0.
    """
    for name, value in {"draft_weights": draft_weights, "draft_cache": draft_cache, "row_cache": row_cache}.items():
        _check_cost(name, value)
    if not row_cache:
        raise OutriderError("row_cache is 0; give the bytes of the target's KV cache of one sequence")
    return (draft_weights + draft_cache) / row_cache


def _check_cost(name: str, value: float) -> None:
    if not value >= 0:
        raise OutriderError(f"{name} is {value}; use a number of at least 0")
