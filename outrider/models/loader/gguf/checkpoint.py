"""Make the record of a model in a GGUF file."""

from typing import Any

import torch

from outrider.models.loader.dtype import DtypeChoice
from outrider.models.loader.facts import context_length, context_reason
from outrider.models.loader.gguf.file import GGUFFile
from outrider.models.loader.gguf.tokenizer import load_tokenizer
from outrider.models.loader.gguf.weights import GGUFWeights
from outrider.models.torch.checkpoint import Checkpoint, LazyModel, WeightFormat


def gguf_checkpoint(
    file: GGUFFile, config: Any, lazy_model: LazyModel, weights: GGUFWeights, choice: DtypeChoice, device: torch.device
) -> Checkpoint:
    """Return the record of a model without recurrent layers. It takes its weights from `lazy_model`.

    Args:
        config: the configuration of the model, with the names of transformers.
        lazy_model: the model of transformers.
        choice: the type of activations and of weights in no blocks.
        device: where the model runs.

    Raises:
        OutriderError: the file has no tokenizer, or a damaged one.
        UnsupportedModel: the kind of the vocabulary or its split rule is not supported.
    """
    return Checkpoint(
        lazy_model=lazy_model,
        config=config,
        tokenizer=load_tokenizer(file),
        context=context_length(config),
        context_reason=context_reason(config),
        vocab=config.vocab_size,
        end_ids=file.end_ids(),
        recurrent=False,
        blocks=WeightFormat(tuple(file.types), file.bits) if file.quantized else None,
        block_types=weights.types,
        dtype=choice.dtype,
        folder=str(file.path),
        dtype_reason=choice.reason,
        device=device,
    )
