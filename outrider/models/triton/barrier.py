"""Programs of one launch that wait for one another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch
import triton
import triton.language as tl

_SPLIT = 8  # programs that share a row, if the GPU can run all at once


@triton.jit
def wait_for_all(arrived, step, SPLIT: tl.constexpr) -> None:
    """Wait until all SPLIT programs of a row have written what they had to write before barrier `step`, from 1 on.

    `arrived` is the int32 counter of the row, 0 at first.
    """
    tl.debug_barrier()
    if SPLIT > 1:
        seen = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") + 1
        while seen < step * SPLIT:
            seen = tl.atomic_add(arrived, 0, sem="acq_rel", scope="gpu")
        tl.debug_barrier()


@lru_cache(256)
def block_options(device: torch.device, rows: int, vocab: int, largest: int) -> Mapping[str, int]:
    """Return how `rows` rows of `vocab` ids are cut into blocks of at most `largest` ids, as arguments of a kernel.

    SPLIT, the programs that share a row, has few values, because each one is compiled. The GPU must be able to run the
    programs of all rows at once.
    """
    block = min(largest, triton.next_power_of_2(vocab))
    blocks = triton.cdiv(vocab, block)
    split = 1
    if device.type == "cuda" and rows * _SPLIT <= torch.cuda.get_device_properties(device).multi_processor_count:
        split = min(_SPLIT, 1 << (blocks.bit_length() - 1))
    steps = triton.cdiv(blocks, split)
    return MappingProxyType({"BLOCK": block, "BLOCKS": triton.next_power_of_2(blocks), "STEPS": steps, "SPLIT": split})


def launch_options(split: int) -> dict[str, bool]:
    """Return the options of a launch in which `split` programs wait for one another: the GPU must run all at once."""
    return {"launch_cooperative_grid": True} if split > 1 else {}
