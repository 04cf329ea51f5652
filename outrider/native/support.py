"""The models that the native kernels may run, from their configuration alone."""

from __future__ import annotations

from typing import Any

from outrider.errors import UnsupportedModel
from outrider.native.library import find_compiler

ROUTED_FAMILIES = frozenset({"mixtral", "olmoe", "qwen3_moe"})  # with routed experts instead of an MLP
# Decoder layers consist of a norm, rotary attention, a norm, and an MLP with SiLU gates, or experts of such MLPs.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"}) | ROUTED_FAMILIES


def may_run(config: Any) -> bool:
    """Return whether the kernels know the architecture of a configuration and can be compiled here."""
    if config.model_type not in FAMILIES:
        return False
    try:
        return bool(find_compiler())
    except UnsupportedModel:
        return False
