"""The record of a loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outrider.models.speech.rules import SpeechRules


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRules:
    """What an encoder-decoder model takes as source, and how its output begins."""

    context: int  # most tokens of a source, or positions of speech
    start: tuple[int, ...]  # the default prompt of the decoder; (): the checkpoint names none
    speech: SpeechRules | None = None  # None: the source is text


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
        return precision_text(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that every report has."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "weight_types": list(self.weights.types),
            "weight_bits": self.weights.bits,
        }


def precision_text(document: Mapping[str, Any]) -> str:
    """Return the precision in a report as text: bfloat16; or Q4_1 and Q6_K weights of 5.06 bits, bfloat16 otherwise."""
    types, dtype = document["weight_types"], document["dtype"]
    if types == [dtype]:
        return str(dtype)
    return f"{' and '.join(types)} weights of {document['weight_bits']:.3g} bits, {dtype} otherwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded model, its tokenizer, and facts of its configuration."""

    model: Any
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
    blocks: WeightFormat | None = None  # of the file, if its weights are in quantized blocks
