"""Prefill and decode on separate devices: waiting for a prefill, moving the KV cache, and the ratio of the devices."""

from outrider.errors import OutriderError


def mean_ttft(prefill: float, rate: float) -> float:
    """Return D + R D^2 / (2 (1 - R D)), the mean time to the first token (DistServe, Zhong et al. 2024, eq. 1).

    Prompts of one length arrive at random at one device that only prefills (an M/D/1 queue).

    Args:
        prefill: D, the seconds of a prefill.
        rate: R, prompts per second.

    Raises:
        OutriderError: the prompts arrive faster than they are prefilled.
    """
    if rate * prefill >= 1:
        raise OutriderError(
            f"{rate:g} prompts/s of {prefill:.3g} s each are more than one prefill device can do;"
            f" use more than {rate * prefill:.2f} devices, or a --rate below {1 / prefill:.3g}"
        )
    return prefill + rate * prefill**2 / (2 * (1 - rate * prefill))


def transfer_bandwidth(cache_bytes: float, rate: float) -> float:
    """Return the bytes/s that R requests per second move from prefill to decode devices (DistServe, section 3.3)."""
    return cache_bytes * rate


def prefill_devices(rate: float, prefill: float, *, load: float = 0.8) -> float:
    """Return R D / load: groups of devices for the prefills, if each is busy for a share `load` (Little 1961)."""
    return rate * prefill / load


def decode_devices(rate: float, output: float, tokens_per_s: float) -> float:
    """Return R L / T: groups of devices for L output tokens per request, at T tokens/s each."""
    return rate * output / tokens_per_s
