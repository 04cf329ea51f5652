"""Verifiers on Triton kernels: two launches instead of dozens to thousands of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import triton

from outrider.core.noise import Noise, PositionNoise
from outrider.core.types import Draft, Packed, Verdict
from outrider.models.triton import masses, residuals
from outrider.models.triton.barrier import block_options, launch_options
from outrider.verify.rules import PackedVerifyFunction, Verifier

IDS_AT_ONCE = 4096  # token ids that one program sums


def on_device(verifier: Verifier) -> Verifier:
    """Return the verifier with its Triton implementation, or as it is if there is none."""
    if verifier.name not in _RULES:
        return verifier
    packed = _RULES[verifier.name]
    return replace(verifier, rule=partial(_verify_padded, packed), packed=packed)


def _verify_padded(packed: PackedVerifyFunction, draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    return packed(draft, Packed.of(p), noise)


class _Launch:
    """The tensors of a verification, by the names of the kernels' arguments."""

    def __init__(self, draft: Draft, p: Packed, noise: Noise) -> None:
        assert isinstance(noise, PositionNoise)
        self.batch_size = len(p.at)
        self.size = draft.size
        self.vocab = p.values.shape[-1]
        self.device = p.values.device
        self.options = block_options(self.device, self.batch_size, self.vocab, IDS_AT_ONCE)
        values = p.values.contiguous()
        q = Packed(values=values, at=p.at) if draft.q is None else draft.q
        self.path = torch.empty(self.batch_size, self.size, dtype=torch.int64, device=self.device)
        self.accepted = torch.empty_like(draft.count)
        self.bonus = torch.empty_like(draft.count)
        self.logprob = torch.empty(self.batch_size, 1 + self.size, dtype=values.dtype, device=self.device)
        self.arguments: dict[str, Any] = {
            "tokens": draft.tokens.contiguous(),
            "parent": draft.parent.contiguous(),
            "kind": draft.kind.contiguous(),
            "count": draft.count,
            "p": values,
            "p_at": p.at.contiguous(),
            "q": q.values.contiguous(),
            "q_at": q.at.contiguous(),
            "seed": noise.seed,
            "first": noise.first,
            "out_path": self.path,
            "out_accepted": self.accepted,
            "out_bonus": self.bonus,
            "out_logprob": self.logprob,
            "size": self.size,
            "vocab": self.vocab,
            "HAS_Q": draft.q is not None,
            "NODES": triton.next_power_of_2(1 + self.size),
        }

    def empty(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def run(self, kernel: Any, *grid: int, waits: bool = False, **arguments: Any) -> None:
        """Launch a kernel with its arguments among these and `arguments`. `waits`: its programs share a sequence."""
        every = {**self.arguments, **self.options, **arguments}
        options = launch_options(self.options["SPLIT"] if waits else 1)
        kernel[grid](**{name: every[name] for name in kernel.arg_names}, num_warps=8, **options)

    def verdict(self) -> Verdict:
        return Verdict(path=self.path, accepted=self.accepted, bonus=self.bonus, logprob=self.logprob)


def _by_masses(rule: int, decide: Callable[[], Any], draft: Draft, p: Packed, noise: Noise) -> Verdict:
    """Verify by sums over all blocks at all nodes, and one decision."""
    launch = _Launch(draft, p, noise)
    blocks = triton.cdiv(launch.vocab, launch.options["BLOCK"])
    nodes = 1 + launch.size
    arguments: dict[str, Any] = {
        "RULE": rule,
        "HAS_Q": draft.q is not None and rule in (masses.REJECTION.value, masses.BLOCK_RULE.value),
        "sums": launch.empty(launch.batch_size, nodes, 2, blocks),
        "winners": launch.empty(launch.batch_size, nodes, blocks, dtype=torch.int32),
    }
    launch.run(masses.sum_masses, blocks, nodes, launch.batch_size, **arguments)
    launch.run(decide(), launch.batch_size, **arguments)
    return launch.verdict()


def _by_residuals(rule: str, draft: Draft, p: Packed, noise: Noise) -> Verdict:
    """Verify a tree in one launch, by one residual after another."""
    launch = _Launch(draft, p, noise)
    levels = max(1, *draft.depth) if rule == "traversal" else 1
    launch.run(
        residuals.traverse if rule == "traversal" else residuals.descend,
        launch.options["SPLIT"],
        launch.batch_size,
        waits=True,
        residuals=launch.empty(launch.batch_size, levels, 2, launch.vocab, dtype=launch.logprob.dtype),
        sums=launch.empty(launch.batch_size, 2, launch.options["BLOCKS"]),
        arrived=torch.zeros_like(draft.count, dtype=torch.int32),
        levels=levels,
    )
    return launch.verdict()


_RULES: Mapping[str, PackedVerifyFunction] = MappingProxyType(
    {
        "walk": partial(_by_masses, masses.WALK.value, lambda: masses.follow_samples),
        "coupled": partial(_by_masses, masses.COUPLED.value, lambda: masses.follow_samples),
        "rejection": partial(_by_masses, masses.REJECTION.value, lambda: masses.decide_chain),
        "block": partial(_by_masses, masses.BLOCK_RULE.value, lambda: masses.decide_chain),
        "siblings": partial(_by_residuals, "siblings"),
        "traversal": partial(_by_residuals, "traversal"),
    }
)
