"""The base of replaced attention layers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from outrider.models.torch.attention import CacheReader, MaskRule, PositionBias, Scoring, attend_layer


@dataclass(slots=True)
class RunningPass:
    """The pass that the layers of a model run in. Without one they run as those of transformers."""

    reader: CacheReader | None = None

    @contextmanager
    def over(self, reader: CacheReader) -> Iterator[None]:
        """Run the layers over a cache."""
        self.reader = reader
        try:
            yield
        finally:
            self.reader = None


class AttentionLayer(ABC):
    """Replaces `forward` of an attention module of transformers while Outrider runs a pass.

    The module's own weights are used.
    """

    def __init__(self, module: Any, running: RunningPass) -> None:
        """Take over a module."""
        self.module = module
        self.original = module.forward
        self._running = running
        module.forward = self.forward

    @staticmethod
    def needed(module: Any) -> bool:
        """Return whether a module of this class has to be replaced."""
        return True

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the module over the hidden states [1, T, H] of a pass. Without a pass, run that of transformers."""
        reader = self._running.reader
        if reader is None:
            return self.original(hidden_states, *args, **kwargs)
        return self.run(reader, hidden_states, *args, **kwargs)

    @abstractmethod
    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the module of transformers returns. Its other arguments are passed on."""

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values [1, T, heads, D] of the projections `q_proj`, `k_proj` and `v_proj`."""
        module = self.module
        projections = (module.q_proj, module.k_proj, module.v_proj)
        return tuple(linear(hidden_states).unflatten(-1, (-1, module.head_dim)) for linear in projections)

    def attend(
        self,
        reader: CacheReader,
        query: torch.Tensor,  # [1, T, Hq, D]
        key: torch.Tensor,  # [1, T, Hkv, D]
        value: torch.Tensor,  # [1, T, Hkv, D]
        *,
        scale: float,
        mask: MaskRule | None = None,
        bias: PositionBias | None = None,
    ) -> torch.Tensor:
        """Return attention [1, T, Hq * D]."""
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        layer = reader.layer(self.module)
        return attend_layer(reader, layer, query, key, value, Scoring(scale), mask_rule=mask, bias=bias).flatten(2)
