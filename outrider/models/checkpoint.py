"""The record of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.models.speech.rules import SpeechRules


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRules:
    """What an encoder-decoder model takes as source, and how its output begins."""

    context: int  # most tokens of a source, or positions of speech
    start: tuple[int, ...]  # the default prompt of the decoder; (): the checkpoint names none
    speech: SpeechRules | None = None  # None: the source is text


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
