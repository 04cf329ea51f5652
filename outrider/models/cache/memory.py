"""Check that a KV cache fits into the memory of its device."""

import torch

from outrider.errors import NotEnoughMemory


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that torch can still allocate; None on another device."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)


def check_cache(*, token_bytes: int, slots: int, context: int, reserve: int, device: torch.device) -> None:
    """Check that a KV cache fits into the free memory of its device.

    Args:
        token_bytes: bytes of one token of one sequence, in all layers.
        slots: sequences.
        context: tokens of a sequence.
        reserve: bytes that passes need besides the cache.
        device: where the cache is allocated.

    Raises:
        NotEnoughMemory: it does not fit. The message says what does.
    """
    free = free_bytes(device)
    size = token_bytes * slots * context
    if free is None or size + reserve <= free:
        return
    room = max(free - reserve, 0) // token_bytes  # tokens
    remedies = []
    if room >= context:
        remedies.append(f"max_num_seqs to {room // context}")
    if room > 2 * slots:  # one entry of a slot may be spare
        remedies.append(f"max_model_len to {room // slots - 1}")
    remedy = f"set {' or '.join(remedies)}" if remedies else "lower max_num_seqs and max_model_len"
    raise NotEnoughMemory(
        f"the KV cache of {slots} sequences of up to {context} tokens takes {size / 1e9:.3g} GB,"
        f" passes take about {reserve / 1e9:.2g} GB, and {free / 1e9:.3g} GB of {device} are free;"
        f" {remedy}, or use a smaller model"
    )


def check_slots(what: str, *, slot_bytes: int, slots: int, device: torch.device) -> None:
    """Check that something of a fixed size per sequence fits into the free memory of its device.

    Args:
        what: its name, for the message.
        slot_bytes: bytes of one sequence, in all layers.
        slots: sequences.
        device: where it is allocated.

    Raises:
        NotEnoughMemory: it does not fit. The message says how many sequences do.
    """
    free = free_bytes(device)
    size = slot_bytes * slots
    if free is None or size <= free:
        return
    room = free // slot_bytes
    raise NotEnoughMemory(
        f"{what} of {slots} sequences take {size / 1e9:.3g} GB, and {free / 1e9:.3g} GB of {device}"
        f" are free; {f'set max_num_seqs to {room}, or ' if room else ''}use a smaller model"
    )


def out_of_memory(error: torch.OutOfMemoryError, *, slots: int, context: int) -> NotEnoughMemory:
    """Return an error that says what to change after the device ran out of memory."""
    reason = str(error).split(". ")[0]
    return NotEnoughMemory(
        f"a pass needs more memory than the device has ({reason}); lower max_num_seqs, which is"
        f" {slots}, or max_model_len, which is {context}, or end other programs on the device"
    )
