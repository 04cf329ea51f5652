"""What vLLM calls our options and parameters, to name ours in errors."""

from collections.abc import Collection
from difflib import get_close_matches

from outrider.errors import either

_OURS = {
    "model": "target",
    "tensor_parallel_size": "tp",
    "kv_cache_dtype": "kv_dtype",
    "quantization": "quantize",
    "enable_prefix_caching": "prefix_caching",
    "gpu_memory_utilization": "cache_gb",
    "structured_outputs": "constraint",
    "guided_decoding": "constraint",
    "num_speculative_tokens": "k",
}


def unknown_name(name: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown keyword: which of the known ones to use."""
    ours = _OURS.get(name)
    if ours in known:
        return f"use {ours}"
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"use {either(known)}"
