"""Verifiers in the kernels' hands: what `outrider.verify.rules` says, in one call instead of some dozens."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from outrider.core.noise import Noise, PositionNoise
from outrider.core.types import Draft, Packed, Verdict
from outrider.errors import UnsupportedModel
from outrider.native.abi import CTrial
from outrider.native.library import Library, load_library
from outrider.verify.rules import PackedVerifyFunction, Verifier

# As rules.cpp numbers them.
_RULES: Mapping[str, int] = MappingProxyType({"walk": 0, "block": 1, "traversal": 2, "coupled": 3})


def fastest_verifier(verifier: Verifier, device: torch.device) -> Verifier:
    """The same verifier; on a CPU with kernels that know it, run by them."""
    if device.type != "cpu" or verifier.name not in _RULES:
        return verifier
    try:
        library = load_library()
    except UnsupportedModel:
        return verifier  # no compiler here, and the reference says the same
    packed = partial(_judge, library, _RULES[verifier.name])
    return replace(verifier, rule=partial(_judge_padded, packed), packed=packed)


def _judge_padded(packed: PackedVerifyFunction, draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    return packed(draft, Packed.of(p), noise)


def _judge(library: Library, rule: int, draft: Draft, p: Packed, noise: Noise) -> Verdict:
    assert isinstance(noise, PositionNoise)
    assert p.values.dtype == torch.float32
    rows, size, vocab = len(p.at), draft.size, p.values.shape[-1]
    found = Verdict(
        path=torch.empty(rows, size, dtype=torch.int64),
        accepted=torch.empty(rows, dtype=torch.int64),
        bonus=torch.empty(rows, dtype=torch.int64),
        logprob=torch.empty(rows, 1 + size),
    )
    q = (None, None) if draft.q is None else (draft.q.values.float(), draft.q.at)
    given = (draft.tokens, draft.parent, draft.kind, draft.count, p.values, p.at, *q, noise.seed, noise.first)
    read = [None if part is None else part.contiguous() for part in given]  # held until the call is over
    written = (found.path, found.accepted, found.bonus, found.logprob)
    addresses = [0 if part is None else part.data_ptr() for part in (*read, *written)]
    library.code.outrider_judge(ctypes.byref(CTrial(*addresses, rows, size, vocab, rule)))
    return found
