"""Verifiers in the kernels' hands: what `outrider.verify` says, in one call instead of some dozens."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from outrider.errors import UnsupportedModel
from outrider.native.abi import CTrial
from outrider.native.library import Library, load_library
from outrider.noise import Noise, PositionNoise
from outrider.types import Draft, Verdict
from outrider.verify import Verifier

_RULES: Mapping[str, int] = MappingProxyType({"walk": 0, "block": 1, "traversal": 2})  # as rules.cpp numbers them


def fastest(verifier: Verifier, device: torch.device) -> Verifier:
    """The same verifier; on a CPU with kernels that know it, run by them."""
    if device.type != "cpu" or verifier.name not in _RULES:
        return verifier
    try:
        library = load_library()
    except UnsupportedModel:
        return verifier  # no compiler here, and the reference says the same
    return replace(verifier, rule=partial(_judge, library, _RULES[verifier.name]))


def _judge(library: Library, rule: int, draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    assert isinstance(noise, PositionNoise)
    assert p.dtype == torch.float32
    rows, size, vocab = len(p), draft.size, p.shape[-1]
    found = Verdict(
        path=torch.empty(rows, size, dtype=torch.int64),
        accepted=torch.empty(rows, dtype=torch.int64),
        bonus=torch.empty(rows, dtype=torch.int64),
        logprob=torch.empty(rows, 1 + size),
    )
    q = None if draft.q is None else draft.q.float().contiguous()
    given = [part.contiguous() for part in (draft.tokens, draft.parent, draft.law, draft.count, p)]
    numbers = [part.contiguous() for part in (noise.seed, noise.first)]
    addresses = [part.data_ptr() for part in given] + [q.data_ptr() if q is not None else 0]
    outputs = (found.path, found.accepted, found.bonus, found.logprob)
    addresses += [part.data_ptr() for part in (*numbers, *outputs)]
    library.code.outrider_judge(ctypes.byref(CTrial(*addresses, rows, size, vocab, rule)))
    return found
