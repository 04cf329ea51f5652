"""Programs of one launch that wait for one another."""

from __future__ import annotations

from functools import lru_cache

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


@lru_cache(64)
def programs_per_row(device: torch.device, rows: int, blocks: int) -> int:
    """Return how many programs share a row of `blocks` blocks, a power of two. All programs must run at once.

    It has few values, because each one is compiled.
    """
    if device.type != "cuda" or rows * _SPLIT > torch.cuda.get_device_properties(device).multi_processor_count:
        return 1
    return min(_SPLIT, 1 << (blocks.bit_length() - 1))


def launch_options(split: int) -> dict[str, bool]:
    """Return the options of a launch in which `split` programs wait for one another: the GPU must run all at once."""
    return {"launch_cooperative_grid": True} if split > 1 else {}
