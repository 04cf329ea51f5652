"""Writes small models of transformers as GGUF files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.helpers.tiny import VOCAB, tokenizer

SIZES = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
_NAMES = {"mistral": "llama", "gemma3_text": "gemma3"}
_INTERLEAVED = ("llama", "mistral", "granite", "smollm3")
_NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3_text")
CHAT = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "Q8_0",
    *,
    kinds: Mapping[str, str] | None = None,
    tokens: bool = True,
    rule: str = "default",
    add: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write a model whose matrices have a block type.

    Args:
        path: the file.
        model: a model of transformers.
        kind: the type of matrices, such as Q4_0.
        kinds: other types, by a part of the tensor's name.
        tokens: whether the file has a tokenizer.
        rule: how the tokenizer splits text.
        add: adds further fields or tensors to the writer.
    """
    config = model.config
    name = _NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if config.model_type == "granite":
        writer.add_logit_scale(config.logits_scaling)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if tokens:
        add_tokenizer(writer, rule)
    add(writer)
    table = gguf.get_tensor_name_map(_architecture(name), config.num_hidden_layers)
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, suffix = key.rpartition(".")
        tensor = f"{table.get_name(module)}.{suffix}"
        add_values(writer, tensor, _reordered(config, module, weight), _kind(tensor, weight, kind, kinds or {}))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _architecture(name: str) -> Any:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _kind(tensor: str, weight: torch.Tensor, kind: str, kinds: Mapping[str, str]) -> str:
    if weight.dim() == 1:
        return "F32"
    return next((other for part, other in kinds.items() if part in tensor), kind)


def _reordered(config: Any, module: str, weight: torch.Tensor) -> np.ndarray:
    """llama.cpp has the two halves of a rotary head as neighbors, and norms of Gemma with their offset."""
    values = weight.float().numpy()
    if config.model_type in _NORMS_PLUS_ONE and weight.dim() == 1:
        return values + 1
    if config.model_type not in _INTERLEAVED or not module.endswith(("q_proj", "k_proj")):
        return values
    heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def add_values(writer: Any, name: str, values: np.ndarray, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K") or kind.startswith("IQ"):  # the package gguf reads them and does not write them
        writer.add_tensor(name, random_blocks(kind, *values.shape), raw_dtype=type_)
        return
    if kind in ("F32", "F16"):
        writer.add_tensor(name, values.astype(np.float32 if kind == "F32" else np.float16))
        return
    writer.add_tensor(name, gguf.quantize(values, type_), raw_dtype=type_)


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Return random blocks [outputs, bytes] of a type. Their half floats are finite."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    source = np.random.default_rng(seed)
    data = source.integers(0, 256, (outputs, inputs // block, size), dtype=np.uint8)
    pairs = dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
    places = {**pairs, "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
    if kind == "MXFP4":
        data[:, :, 0] = source.integers(0, 130, data.shape[:2])  # the scale is 2^(byte - 128)
    for at in places.get(kind, (0,)):
        limit = 0.0003 if kind.startswith("IQ") else 0.01  # their codes stand for numbers of up to 127
        numbers = source.uniform(-limit, limit, (outputs, inputs // block)).astype(np.float16)
        data[:, :, at : at + 2] = numbers[..., None].view(np.uint8)
    return data.reshape(outputs, -1)


def add_tokenizer(writer: Any, rule: str) -> None:
    """Tokens of single bytes, but the last one, which a merge makes."""
    words = tokenizer().get_vocab()
    names = sorted(words, key=words.__getitem__)
    names[-1] = "ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(names)
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template(CHAT)
