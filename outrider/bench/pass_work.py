"""The bytes that a pass reads, and the arithmetic for a token."""

from __future__ import annotations

from math import prod
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig

from outrider.llm import LLM
from outrider.loader.gguf import is_gguf, open_gguf
from outrider.models.prepack import can_prepack
from outrider.native.target import NativeTarget


def bytes_per_pass(llm: LLM, folder: Path) -> int:
    """Return the bytes of weights that one pass reads: all weights, without an embedding that is only looked up."""
    parts = llm.parts
    if is_gguf(folder) and isinstance(parts.target, NativeTarget):
        layers, head = parts.target.read_bytes()
        return sum(layers) + head
    embedding_weights, tied = _embedding(folder)
    # A packed or quantized LM head is a copy of its own.
    copied = can_prepack(parts.device, parts.dtype) or parts.target.kernels not in ("torch", "graphs")
    return parts.target.bytes() - (embedding_weights * parts.dtype.itemsize if copied or not tied else 0)


def flops_per_token(folder: Path) -> float:
    """Return two FLOPs per weight, without an embedding that is only looked up."""
    embedding_weights, tied = _embedding(folder)
    weights = 0
    if is_gguf(folder):
        weights = sum(int(tensor.n_elements) for tensor in open_gguf(folder).reader.tensors)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weights += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return 2.0 * (weights - (0 if tied else embedding_weights))


def _embedding(folder: Path) -> tuple[int, bool]:
    """Return the number of weights of the embedding, and whether the LM head shares them."""
    if is_gguf(folder):
        config = open_gguf(folder).config
    else:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    sizes = config.get_text_config()
    return sizes.vocab_size * sizes.hidden_size, bool(config.tie_word_embeddings)


def cache_bytes_per_token(llm: LLM) -> float:
    """Return the bytes of the target's cache that a pass reads for each cached token.

    A recurrent state does not grow with the sequence and is small compared with the weights. It counts 0.
    """
    return float(llm.parts.target.cache.usage().token_bytes)
