"""Outrider: exact speculative decoding.

A cheap proposer drafts several tokens, and the target verifies them in one pass. The output has the
distribution of the target alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from outrider._version import __version__
from outrider.errors import OutriderError, UnsupportedModel

if "OMP_WAIT_POLICY" not in os.environ:
    # libgomp reads this when torch is imported. By default, its idle threads spin for many
    # milliseconds, and on a busy machine they take processor time from the threads that work.
    os.environ.setdefault("GOMP_SPINCOUNT", "60000")

if TYPE_CHECKING:
    from outrider.core.config import EngineConfig
    from outrider.core.constraint import Constraint
    from outrider.core.params import SamplingParams
    from outrider.core.stats import Stats
    from outrider.core.types import Completion, FinishReason, TokenLogprobs
    from outrider.engine.output import Chunk
    from outrider.llm import LLM
    from outrider.models.torch.speech.wav import Recording
    from outrider.scale.ray.rollouts import RolloutPool
    from outrider.serve.speech.run import transcribe
    from outrider.serve.speech.transcript import Segment, Transcript

__all__ = [
    "Chunk",
    "Completion",
    "Constraint",
    "EngineConfig",
    "FinishReason",
    "LLM",
    "OutriderError",
    "Recording",
    "RolloutPool",
    "SamplingParams",
    "Segment",
    "Stats",
    "TokenLogprobs",
    "Transcript",
    "UnsupportedModel",
    "__version__",
    "transcribe",
]

_MODULES = {  # the module of each public name
    "LLM": "outrider.llm",
    "Chunk": "outrider.engine.output",
    "Completion": "outrider.core.types",
    "Constraint": "outrider.core.constraint",
    "FinishReason": "outrider.core.types",
    "EngineConfig": "outrider.core.config",
    "SamplingParams": "outrider.core.params",
    "Stats": "outrider.core.stats",
    "TokenLogprobs": "outrider.core.types",
    "Recording": "outrider.models.torch.speech.wav",
    "RolloutPool": "outrider.scale.ray.rollouts",
    "Segment": "outrider.serve.speech.transcript",
    "Transcript": "outrider.serve.speech.transcript",
    "transcribe": "outrider.serve.speech.run",
}


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds; `outrider --help` and a bare `import outrider` should not.
    if name not in _MODULES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
