"""Prefill and decode on separate devices: waiting for a prefill, moving the KV cache, and the ratio of the devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from outrider.errors import OutriderError
from outrider.scale.estimate.layout import Work, layout_pass
from outrider.scale.estimate.options import ProjectOptions
from outrider.scale.estimate.pair import Pair

_MAX_TOKENS = 10**7
_DEFAULT_PROMPT_TOKENS = 1024
_DEFAULT_OUTPUT_TOKENS = 256


def separate_prefill(
    options: ProjectOptions, pairs: Sequence[Pair], batches: Sequence[int], ks: Sequence[int]
) -> dict[str, Any]:
    """Return how many groups of devices prefill and decode a rate of requests, and what moves between them.

    Returns:
        {} without `--rate`, otherwise {"separate": ...}.

    Raises:
        OutriderError: a number is not above 0, or an option needs `--rate`.
    """
    rate = options.rate
    lengths = {"--prompt-tokens": options.prompt_tokens, "--output-tokens": options.output_tokens}
    for name, tokens in lengths.items():
        if tokens is not None and rate is None:
            raise OutriderError(f"{name} is for prefill on its own devices; give --rate as well, or leave it out")
        if tokens is not None and not 1 <= tokens <= _MAX_TOKENS:
            raise OutriderError(f"{name} is {tokens}; use a number from 1 to {_MAX_TOKENS}")
    if rate is None:
        return {}
    if not 0 < rate <= _MAX_TOKENS:
        raise OutriderError(f"--rate is {rate}; use a number of requests/s above 0")
    if options.fill:
        raise OutriderError("--fill is for one sequence after another, and --rate for many; give one of them")
    prompt = options.prompt_tokens or _DEFAULT_PROMPT_TOKENS
    output = options.output_tokens or _DEFAULT_OUTPUT_TOKENS
    cache = pairs[0].target.cache_bytes(prompt)
    load = _Load(rate=rate, prompt=prompt, output=output, cache=cache, batch=max(batches))
    separate = {
        "rate": rate,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cache_bytes_per_request": cache,
        "transfer_bytes_per_s": transfer_bandwidth(cache, rate),
        "cases": {pair.efficiency.name: _case(pair, load, ks) for pair in pairs},
    }
    return {"separate": separate}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """The requests of all devices together."""

    rate: float  # requests/s
    prompt: int  # tokens
    output: int  # tokens
    cache: float  # bytes of the KV cache of a prompt
    batch: int  # sequences of a decode group


def _case(pair: Pair, load: _Load, ks: Sequence[int]) -> dict[str, Any]:
    """Return the devices of one case. Each decode group runs the largest batch of the options."""
    # The mean token of a prompt attends to half of it.
    prompt = Work(tokens=load.prompt, seqs=1, context=load.prompt / 2)
    prefill = layout_pass(pair.target, pair.machine, pair.efficiency, pair.layout, prompt).seconds
    prefill_groups = ceil(prefill_devices(load.rate, prefill))
    point = pair.best(load.batch, load.prompt + load.output // 2, ks)
    transfer = load.cache / pair.layout.link.bandwidth if pair.layout.link else 0.0
    return {
        "prefill_seconds": prefill,
        "ttft_seconds": mean_ttft(prefill, load.rate / prefill_groups) + transfer,
        "prefill_groups": prefill_groups,
        "decode_groups": ceil(decode_devices(load.rate, load.output, point.tokens_per_s)),
        "decode_groups_plain": ceil(decode_devices(load.rate, load.output, point.plain_tokens_per_s)),
        "decode_batch": load.batch,
        "decode_k": point.k,
    }


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
