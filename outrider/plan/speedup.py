"""What speculation should gain: the equations behind tau, speedup, depth and the limit that memory sets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from outrider.errors import OutriderError


def expected_tau(acceptance: Sequence[float]) -> float:
    """E[tau] = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k: Leviathan et al. 2023, sec. 3.1, one rate for each position.

    Args:
        acceptance: a_i in [0, 1], the chance that guess i is kept when all before it were.

    Returns:
        Tokens emitted a pass, the bonus included; 1 without guesses.

    Raises:
        OutriderError: a rate is outside [0, 1].
    """
    for rate in acceptance:
        _check_rate(rate)
    return 1.0 + sum(float(kept) for kept in accumulate(acceptance, mul))


def expected_tau_iid(alpha: float, k: int) -> float:
    """E[tau] = (1 - a^(k+1)) / (1 - a): Leviathan et al. 2023, eq. 1.

    Args:
        alpha: acceptance rate in [0, 1], the same at each position.
        k: guesses a round.

    Returns:
        Tokens emitted a pass, from 1 to k + 1.

    Raises:
        OutriderError: alpha is outside [0, 1], or k is below 0.
    """
    _check_rate(alpha)
    _check_cost("k", k)
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def speedup(tau: float, *, k: int, draft: float, verify: float = 1.0, host: float = 0.0) -> float:
    """S = E[tau] / (k c + v + h): Leviathan et al. 2023, theorem 3.8, which has v = 1 and h = 0.

    Args:
        tau: expected tokens a pass.
        k: guesses a round.
        draft: c, the time of one guess. The unit of all three costs is the time of a plain round.
        verify: v, the time of scoring k guesses and the last committed token in one pass.
        host: h, the time of all else in a round.

    Returns:
        Tokens a second over those of plain decoding.

    Raises:
        OutriderError: a cost is below 0, or all are 0.
    """
    for name, value in {"k": k, "draft": draft, "verify": verify, "host": host}.items():
        _check_cost(name, value)
    if not (cost := k * draft + verify + host):
        raise OutriderError("a round that costs nothing has no speedup; give draft, verify or host above 0")
    return tau / cost


def decode_limit(bytes_per_pass: float, bandwidth: float) -> float:
    """passes/s <= bandwidth / bytes: a pass reads every weight once (the roof line, Williams et al. 2009).

    Args:
        bytes_per_pass: bytes of weights that one pass of the target reads.
        bandwidth: bytes a second that the memory delivers.

    Returns:
        Passes a second at most; with one row, tokens a second of plain decoding.

    Raises:
        OutriderError: a quantity is not above 0.
    """
    if bytes_per_pass <= 0 or bandwidth <= 0:
        raise OutriderError(f"bytes_per_pass is {bytes_per_pass} and bandwidth {bandwidth}; both must be above 0")
    return bandwidth / bytes_per_pass


def roof(*, bytes_per_pass: float, flops_per_pass: float, bandwidth: float, gemm: float) -> float:
    """passes/s <= min(bandwidth / bytes, gemm / flops): the roof line of Williams et al. 2009, both of its parts.

    Args:
        bytes_per_pass: bytes of weights and of cache that one pass of the target reads.
        flops_per_pass: floating-point operations of one pass: two for each weight and column.
        bandwidth: bytes a second that the memory delivers.
        gemm: floating-point operations a second of a large matrix product.

    Returns:
        Passes a second at most.

    Raises:
        OutriderError: a quantity is not above 0.
    """
    if flops_per_pass <= 0 or gemm <= 0:
        raise OutriderError(f"flops_per_pass is {flops_per_pass} and gemm {gemm}; both must be above 0")
    return min(decode_limit(bytes_per_pass, bandwidth), gemm / flops_per_pass)


def sequences_instead(*, draft_weights: float, draft_cache: float, row_cache: float) -> float:
    """n = (W_d + K_d) / K_t: what a draft model costs, counted in users.

    Without the draft, n more rows could run at once in the same memory: one more row takes no weights, only its stripe
    of the target's cache.

    Args:
        draft_weights: W_d, bytes of the draft's weights.
        draft_cache: K_d, bytes of the draft's cache, of all rows.
        row_cache: K_t, bytes of the target's cache of one row with its whole context.

    Raises:
        OutriderError: a quantity is below 0, or a row takes nothing.
    """
    for name, value in {"draft_weights": draft_weights, "draft_cache": draft_cache, "row_cache": row_cache}.items():
        _check_cost(name, value)
    if not row_cache:
        raise OutriderError("row_cache is 0; give the bytes that the target's cache takes for one row")
    return (draft_weights + draft_cache) / row_cache


def _check_rate(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise OutriderError(f"an acceptance rate is {rate}; use a share from 0 to 1")


def _check_cost(name: str, value: float) -> None:
    if not value >= 0:
        raise OutriderError(f"{name} is {value}; use a number of at least 0")
