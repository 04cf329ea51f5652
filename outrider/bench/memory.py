"""How many bytes a pass reads, and how fast this machine reads them."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import AutoConfig

from outrider.llm import LLM
from outrider.prepack import can_prepack

_BYTES = 1 << 29  # of the buffer: larger than the caches of all but a few machines
_REPEATS = 7


def bytes_per_pass(llm: LLM, folder: Path) -> int:
    """Bytes of weights that one pass reads: all but an embedding table that serves for looking up alone."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    sizes = config.get_text_config()
    table = sizes.vocab_size * sizes.hidden_size * llm.house.dtype.itemsize
    shared = config.tie_word_embeddings and not can_prepack(llm.house.device, llm.house.dtype)
    return llm.house.target.bytes() - (0 if shared else table)


def read_bandwidth(device: torch.device, size: int = _BYTES) -> float:
    """Bytes a second of summing up a buffer of `size` bytes, the median of several times."""
    buffer = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(_REPEATS):
        began = perf_counter()
        buffer.sum().item()  # waits for the device
        seconds.append(perf_counter() - began)
    return buffer.nbytes / median(seconds)
