"""The record of a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from outrider.core.source import SourceRules
from outrider.models.torch.weights import Weights


class WeightFormat(NamedTuple):
    """How the weights of a model are stored."""

    types: tuple[str, ...]  # such as ("bfloat16",), ("int4",), or the GGUF types Q4_1 and Q6_K
    bits: float  # per weight, the mean over the matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The numbers of a loaded model, for reports."""

    weights: WeightFormat
    dtype: torch.dtype  # of activations, keys, values, and weights in no other type

    def __str__(self) -> str:
        """Return the text: bfloat16; or Q4_1 and Q6_K weights of 5.06 bits, bfloat16 otherwise."""
        types, dtype = self.weights.types, str(self.dtype).removeprefix("torch.")
        if types == (dtype,):
            return dtype
        return f"{' and '.join(types)} weights of {self.weights.bits:.3g} bits, {dtype} otherwise"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that every report has."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "weight_types": list(self.weights.types),
            "weight_bits": self.weights.bits,
        }


class LazyModel:
    """A model of transformers that is made when it is first used.

    The native kernels read weights from the files, so many targets need it for the load check only.
    """

    def __init__(self, make: Callable[[], Any], make_reference: Callable[[], Any] | None = None) -> None:
        """Prepare a model.

        Args:
            make: makes the model.
            make_reference: makes the same model for a comparison: it computes in float32, and takes little memory.
        """
        self._make = make
        self._make_reference = make_reference
        self._changes: list[Callable[[Any], None]] = []
        self._model: Any = None

    @classmethod
    def of(cls, model: Any) -> LazyModel:
        """Return a model that is made already."""
        return cls(lambda: model)

    def get(self) -> Any:
        """Return the model. It is made if necessary."""
        if self._model is None:
            model = self._make()
            for change in self._changes:
                change(model)
            self._model = model
        return self._model

    @property
    def may_differ(self) -> bool:
        """Whether the model may differ from its files: it was made, or a change of it waits."""
        return bool(self._changes) or self._model is not None

    def reference(self) -> Any:
        """Return a model to compare the target with."""
        return self.get() if self._make_reference is None or self.may_differ else self._make_reference()

    def change(self, change: Callable[[Any], None]) -> None:
        """Apply a function to the model, now or when it is made."""
        self._changes.append(change)
        if self._model is not None:
            change(self._model)

    def release(self) -> None:
        """Free the model until it is used again."""
        self._model = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model, its tokenizer, and facts of its configuration."""

    lazy_model: LazyModel
    config: Any  # of the model, with the names of transformers
    tokenizer: Any
    context: int  # tokens
    vocab: int  # ids that have logits
    end_ids: frozenset[int]  # tokens that end the text
    recurrent: bool
    device: torch.device
    dtype: torch.dtype
    folder: str = ""  # or file that it was loaded from
    source: SourceRules | None = None  # None: a decoder-only model
    context_reason: str = ""  # why the context is not longer, if it is not the model's own limit
    ranks: int = 1  # of tensor parallelism; the weights of this process are its part
    dtype_reason: str = ""  # why it was chosen, such as "as the checkpoint is stored"
    blocks: WeightFormat | None = None  # of the file, if its weights are quantized
    block_types: tuple[str, ...] = ()  # of weights in quantized blocks, such as Q4_K or int4
    weights: Weights | None = None  # for the native kernels; None: those of the model

    @property
    def model(self) -> Any:
        return self.lazy_model.get()

    def with_model(self, model: Any, dtype: torch.dtype | None = None) -> Checkpoint:
        """Return a checkpoint whose weights are those of a model of transformers, in its dtype."""
        made = LazyModel.of(model)
        return replace(self, lazy_model=made, weights=None, blocks=None, block_types=(), dtype=dtype or self.dtype)

    def tied_weights(self) -> Mapping[str, str]:
        """Return pairs of names that one weight has."""
        if self.weights is None:
            return getattr(self.model, "all_tied_weights_keys", {})
        return {"lm_head.weight": f"{self.weights.body}.embed_tokens.weight"} if self.config.tie_word_embeddings else {}
