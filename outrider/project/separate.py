"""The estimate of prefill and decode on separate devices, for the JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from outrider.errors import OutriderError
from outrider.project.disaggregation import decode_devices, mean_ttft, prefill_devices, transfer_bandwidth
from outrider.project.layout import layout_pass
from outrider.project.options import ProjectOptions
from outrider.project.pair import Pair

_MAX_TOKENS = 10**7


def separate_prefill(
    options: ProjectOptions, pairs: Sequence[Pair], batches: Sequence[int], ks: Sequence[int]
) -> dict[str, Any]:
    """Return how many groups of devices prefill and decode a rate of requests, and what moves between them.

    Raises:
        OutriderError: a number is not above 0.
    """
    rate = options.rate
    if rate is None or not 0 < rate <= _MAX_TOKENS:
        raise OutriderError(f"--rate is {rate}; use a number of requests/s above 0")
    for name, tokens in (("--prompt-tokens", options.prompt_tokens), ("--output-tokens", options.output_tokens)):
        if not 1 <= tokens <= _MAX_TOKENS:
            raise OutriderError(f"{name} is {tokens}; use a number from 1 to {_MAX_TOKENS}")
    if options.fill:
        raise OutriderError("--fill is for one sequence after another, and --rate for many; give one of them")
    cache = pairs[0].target.cache_bytes(options.prompt_tokens)
    context = options.prompt_tokens + options.output_tokens // 2
    return {
        "rate": rate,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "cache_bytes_per_request": cache,
        "transfer_bytes_per_s": transfer_bandwidth(cache, rate),
        "cases": {pair.efficiency.name: _case(options, pair, rate, cache, context, max(batches), ks) for pair in pairs},
    }


def _case(
    options: ProjectOptions, pair: Pair, rate: float, cache: float, context: int, batch: int, ks: Sequence[int]
) -> dict[str, Any]:
    """Return the devices of one case. Each decode group runs the largest batch of the options."""
    prompt = options.prompt_tokens
    # The mean token of a prompt attends to half of it.
    prefill = layout_pass(
        pair.target, pair.machine, pair.efficiency, pair.layout, tokens=prompt, seqs=1, context=prompt / 2
    ).seconds
    prefill_groups = ceil(prefill_devices(rate, prefill))
    point = pair.best(batch, context, ks)
    transfer = cache / pair.layout.link.bandwidth if pair.layout.link else 0.0
    return {
        "prefill_seconds": prefill,
        "ttft_seconds": mean_ttft(prefill, rate / prefill_groups) + transfer,
        "prefill_groups": prefill_groups,
        "decode_groups": ceil(decode_devices(rate, options.output_tokens, point.tokens_per_s)),
        "decode_groups_plain": ceil(decode_devices(rate, options.output_tokens, point.plain_tokens_per_s)),
        "decode_batch": batch,
        "decode_k": point.k,
    }
