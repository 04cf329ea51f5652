"""The bytes that a pass reads, and the arithmetic for a token."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.core.target import ExpertCounter, SelfDraftTarget
from outrider.llm import LLM
from outrider.models.loader.gguf.file import read_gguf
from outrider.models.loader.load import read_model_config
from outrider.models.loader.paths import is_gguf
from outrider.models.loader.quantized.weights import QuantizedWeights, quantization_of
from outrider.models.torch.encoder_decoder_target import EncoderDecoderTarget
from outrider.models.torch.prepack import can_prepack
from outrider.models.torch.tensor_files import TensorFiles
from outrider.models.torch.weights import Weights


class PassBytes(NamedTuple):
    """The weights that passes read, in bytes."""

    dense: int  # read by every pass
    expert: float  # one routed expert of each layer; 0: there are none, or the experts of a pass are not counted


def bytes_per_pass(llm: LLM, folder: Path) -> PassBytes:
    """Return the bytes of weights that a pass reads: all weights, without an embedding that is only looked up.

    In a mixture of experts a pass reads only the experts that its tokens use.
    """
    total = _all_bytes(llm, folder)
    count, _ = _experts(folder)
    target = llm.parts.target
    # The load check has run a pass, so the experts are known to be counted or not.
    if not count or not isinstance(target, ExpertCounter) or target.touched_experts() is None:
        return PassBytes(total, 0.0)
    experts = target.expert_bytes()
    return PassBytes(total - experts, experts / count)


def _all_bytes(llm: LLM, folder: Path) -> int:
    """Return the bytes of all weights, without an embedding that is only looked up, or an encoder."""
    parts = llm.parts
    # The encoder is no part of a pass, and the embedding of a GGUF file may be in blocks.
    counts_reads = isinstance(parts.target, EncoderDecoderTarget) or is_gguf(folder)
    if counts_reads and isinstance(parts.target, SelfDraftTarget):
        layers, head = parts.target.read_bytes()
        return sum(layers) + head
    embedding_weights, tied = _embedding(folder)
    kernels = parts.target.kernels.partition(",")[0]
    # On torch, a packed or quantized LM head is a copy of its own. The native kernels look up rows of the LM head.
    packed = can_prepack(parts.device, parts.dtype) or kernels not in ("torch", "graphs")
    copied = packed and not kernels.startswith("native")
    own_embedding = embedding_weights * parts.dtype.itemsize // parts.loaded.checkpoint.ranks  # of this rank
    return parts.target.bytes() - (own_embedding if copied or not tied else 0)


def flops_per_token(folder: Path) -> float:
    """Return two FLOPs per weight that a token uses.

    These are all weights without an embedding that is only looked up, and of the routed experts those of one token.
    """
    embedding_weights, tied = _embedding(folder)
    count, active = _experts(folder)
    weights = 0.0
    for name, shape in _shapes(folder).items():
        share = active / count if count and ".experts." in name else 1.0
        weights += share * prod(shape)
    return 2.0 * (weights - (0 if tied else embedding_weights))


def _shapes(folder: Path) -> dict[str, Sequence[int]]:
    """Return the shapes of all weights by name. Quantized weights have those of the dequantized ones."""
    if is_gguf(folder):
        return {name: tensor.shape for name, tensor in read_gguf(folder).tensors.items()}
    quantization = quantization_of(read_model_config(folder))
    if quantization is None:
        weights: Weights = TensorFiles.of(folder)
    else:
        weights = QuantizedWeights(folder, quantization, torch.float32)
    return {name: weights.shape(name) for name in weights}


def _experts(folder: Path) -> tuple[int, int]:
    """Return the number of routed experts of a layer, and of a token; (0, 0): the model has none."""
    if is_gguf(folder):
        return 0, 0
    config = read_model_config(folder).get_text_config()
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    count = next(filter(None, counts), 0)
    return (count, config.num_experts_per_tok) if count else (0, 0)


def _embedding(folder: Path) -> tuple[int, bool]:
    """Return the number of weights of the embedding, and whether the LM head shares them."""
    config = read_model_config(folder)
    sizes = config.get_text_config()
    return sizes.vocab_size * sizes.hidden_size, bool(config.tie_word_embeddings)


def cache_bytes_per_token(llm: LLM) -> float:
    """Return the bytes of the target's cache that a pass reads for each cached token.

    A recurrent state does not grow with the sequence and is small compared with the weights. It counts 0.
    """
    return float(llm.parts.target.cache.usage().token_bytes)
