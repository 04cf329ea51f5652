"""Outrider: exact speculative decoding.

A cheap proposer guesses several tokens, the target verifies them in one pass, and the text stays the target's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError, UnsupportedModel

if TYPE_CHECKING:
    from outrider.cache.base import Caching
    from outrider.constraint import Constraint
    from outrider.llm import LLM, Chunk
    from outrider.params import SamplingParams
    from outrider.stats import Stats
    from outrider.types import Completion, Finish, TokenLogprobs

__all__ = [
    "Caching",
    "Chunk",
    "Completion",
    "Constraint",
    "Finish",
    "LLM",
    "OutriderError",
    "SamplingParams",
    "Stats",
    "TokenLogprobs",
    "UnsupportedModel",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "LLM": "outrider.llm",
    "Chunk": "outrider.llm",
    "Completion": "outrider.types",
    "Constraint": "outrider.constraint",
    "Finish": "outrider.types",
    "Caching": "outrider.cache.base",
    "SamplingParams": "outrider.params",
    "Stats": "outrider.stats",
    "TokenLogprobs": "outrider.types",
}


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds; `outrider --help` and a bare `import outrider` should not.
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
