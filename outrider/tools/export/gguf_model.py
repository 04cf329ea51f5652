"""Writes a small language model as a GGUF file for llama.cpp, with its tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.core.packages import needed_by
from outrider.errors import OutriderError
from outrider.models.heads.files import TensorFiles, read_config
from outrider.models.loader.gguf.file import read_gguf
from outrider.models.loader.gguf.split_rules import split_rules
from outrider.models.loader.gguf.tokenizer import load_tokenizer
from outrider.models.loader.tokenizer import read_tokenizer

# model_type of transformers -> architecture of llama.cpp, for models whose tensors need no more than new names
_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
)
_INTERLEAVED = ("llama", "mistral")  # llama.cpp stores the two halves of a rotary head as neighbors
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # kinds of tokens
_TOKENIZER = "gpt2"  # llama.cpp's name of byte-level BPE
# Texts on which the rules that split a text before BPE differ: digits, contractions, line breaks,
# other scripts, and characters that are composed of several.
_SAMPLES = (
    "In 2026, 1234567 tokens:\n\n\tdef add(a, b):\n        return a + b  # it's\r\n",
    "It's WE'LL don't 3.14159 éàü 漢字 привет   end...!?\n \n",
    "Cafe\u0301 de\u0301ja\u0300 สวัสดี",
)


def write_gguf(folder: Path, file: Path) -> None:
    """Write the model of a Hugging Face folder as a GGUF file, in the type of its weights.

    The file is read back: its tokenizer must give the same tokens as that of the folder.

    Raises:
        OutriderError: gguf is not installed, or the architecture or the tokenizer is not supported.
    """
    with needed_by("a GGUF file", "gguf"):
        import gguf
    config = read_config(folder)
    kind = str(config.get("model_type"))
    if kind not in _ARCHITECTURES:
        raise OutriderError(
            f"{folder} is a {kind} model, and only {', '.join(_ARCHITECTURES)} are written as GGUF"
            " here; use convert_hf_to_gguf.py of llama.cpp"
        )
    writer = gguf.GGUFWriter(file, _ARCHITECTURES[kind])
    _add_sizes(writer, config)
    _add_tokenizer(writer, folder, int(config["vocab_size"]))
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == _ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    stored = TensorFiles(folder)
    for key in stored:
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        module, _, suffix = key.rpartition(".")
        if module.endswith("rotary_emb"):
            continue
        name = names.get_name(module)
        if name is None:
            raise OutriderError(f"{folder} has the tensor {key}, which llama.cpp has no name for; use its converter")
        _add(writer, gguf, f"{name}.{suffix}", _reordered(config, module, stored[key]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise OutriderError("the draft scales its rotary embedding; use convert_hf_to_gguf.py of llama.cpp")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, folder: Path, vocab: int) -> None:
    tokenizer = read_tokenizer(folder)
    try:
        model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError) as error:
        raise OutriderError(f"{folder} has no tokenizer.json that can be read ({error}); copy it again") from None
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise OutriderError(f"{folder} has no byte-level BPE tokenizer; use convert_hf_to_gguf.py of llama.cpp")
    names: list[str] = [f"[PAD{token}]" for token in range(vocab)]
    kinds = [_UNUSED] * vocab
    for name, token in tokenizer.get_vocab().items():
        if token < vocab:
            names[token] = name
            kinds[token] = _CONTROL if token in tokenizer.all_special_ids else _NORMAL
    for token, added in tokenizer.added_tokens_decoder.items():
        if token < vocab and added.special:
            kinds[token] = _CONTROL
    writer.add_tokenizer_model(_TOKENIZER)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    for token, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if token is not None:
            add(token)
    ids = tokenizer.encode("a")
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    writer.add_tokenizer_pre(find_rule(tokenizer, folder))


def find_rule(tokenizer: Any, folder: Path) -> str:
    """Return llama.cpp's name of the rule by which a tokenizer splits text before BPE.

    Raises:
        OutriderError: no known rule gives the tokenizer's own tokens.
    """
    backend = tokenizer.backend_tokenizer
    expected = [backend.encode(text, add_special_tokens=False).ids for text in _SAMPLES]
    own = (backend.normalizer, backend.pre_tokenizer)
    try:
        for name, rule in split_rules():
            backend.normalizer = rule.normalizer()
            backend.pre_tokenizer = rule.pre_tokenizer()
            if [backend.encode(text, add_special_tokens=False).ids for text in _SAMPLES] == expected:
                return name
    finally:
        backend.normalizer, backend.pre_tokenizer = own
    raise OutriderError(
        f"the tokenizer of {folder} splits text by a rule that is not known here; use"
        " convert_hf_to_gguf.py of llama.cpp"
    )


def _reordered(config: Mapping[str, Any], module: str, weight: torch.Tensor) -> torch.Tensor:
    if config["model_type"] not in _INTERLEAVED or not module.endswith(("q_proj", "k_proj")):
        return weight
    heads = config["num_attention_heads"]
    if module.endswith("k_proj"):
        heads = config.get("num_key_value_heads") or heads
    shape = weight.shape
    return weight.reshape(heads, 2, -1, *shape[1:]).transpose(1, 2).reshape(shape)


def _add(writer: Any, gguf: Any, name: str, weight: torch.Tensor) -> None:
    values = weight.float().contiguous().numpy()
    if weight.dim() == 1 or weight.dtype is torch.float32:
        writer.add_tensor(name, values)
    elif weight.dtype is torch.float16:
        writer.add_tensor(name, values.astype("float16"))
    else:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def same_tokens(file: Path, folder: Path, texts: Sequence[str] = _SAMPLES) -> bool:
    """Return whether the tokenizer of a GGUF file gives the tokens of that of a folder."""
    own = read_tokenizer(folder)
    written = load_tokenizer(read_gguf(file))
    return all(
        written.encode(text, add_special_tokens=False) == own.encode(text, add_special_tokens=False) for text in texts
    )
