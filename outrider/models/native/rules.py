"""Verifiers on the native kernels: one call instead of dozens of torch operations."""

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from outrider.core.noise import Noise, PositionNoise
from outrider.core.types import Draft, Packed, Verdict
from outrider.errors import UnsupportedModel
from outrider.models.native.library import Library, load_library
from outrider.models.native.structures import CVerification
from outrider.verify.rules import PackedVerifyFunction, Verifier

# The numbers of the rules in rules.cpp.
_RULES: Mapping[str, int] = MappingProxyType({"walk": 0, "block": 1, "traversal": 2, "coupled": 3})


def fastest_verifier(verifier: Verifier, device: torch.device) -> Verifier:
    """Return the verifier with its native implementation, if the device is a CPU and the kernels support the rule."""
    if device.type != "cpu" or verifier.name not in _RULES:
        return verifier
    try:
        library = load_library()
    except UnsupportedModel:
        return verifier  # no compiler; the torch implementation gives the same results
    packed = partial(_verify, library, _RULES[verifier.name])
    return replace(verifier, rule=partial(_verify_padded, packed), packed=packed)


def _verify_padded(packed: PackedVerifyFunction, draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    return packed(draft, Packed.of(p), noise)


def _verify(library: Library, rule: int, draft: Draft, p: Packed, noise: Noise) -> Verdict:
    assert isinstance(noise, PositionNoise)
    assert p.values.dtype == torch.float32
    batch_size = len(p.at)
    vocab = p.values.shape[-1]
    results = {
        "path": torch.empty(batch_size, draft.size, dtype=torch.int64),
        "accepted": torch.empty(batch_size, dtype=torch.int64),
        "bonus": torch.empty(batch_size, dtype=torch.int64),
        "logprob": torch.empty(batch_size, 1 + draft.size),
    }
    inputs = {
        "token": draft.tokens,
        "parent": draft.parent,
        "kind": draft.kind,
        "count": draft.count,
        "p": p.values,
        "p_index": p.at,
        "seed": noise.seed,
        "first": noise.first,
    }
    if draft.q is not None:
        inputs |= {"q": draft.q.values.float(), "q_index": draft.q.at}
    # The copies must live until the call returns, because the kernels get only their addresses.
    tensors = {name: tensor.contiguous() for name, tensor in inputs.items()} | results
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    arguments = CVerification(**addresses, batch_size=batch_size, nodes=draft.size, vocab=vocab, rule=rule)
    library.code.outrider_verify(ctypes.byref(arguments))
    return Verdict(**results)
