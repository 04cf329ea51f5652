"""Make the tokenizer that a GGUF file describes.

transformers reads vocabulary, merges and special tokens. For byte-level BPE it always splits text as GPT-2 does. The
rule that the file names in `tokenizer.ggml.pre` is applied here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from outrider.errors import OutriderError, UnsupportedModel
from outrider.loader.tokenizer import spell_markers

# The rules of llama-vocab.cpp of llama.cpp, which split a text before its bytes are mapped to letters.
_GPT2 = None  # the rule of GPT-2, which is built into ByteLevel
_SINGLE_DIGITS = pre_tokenizers.Digits(individual_digits=True)  # then the rule of GPT-2
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RULES: Mapping[str, Any] = MappingProxyType(
    {
        "default": _GPT2,
        "gpt-2": _GPT2,
        "phi-2": _GPT2,
        "olmo": _GPT2,
        "smollm": _SINGLE_DIGITS,
        "starcoder": _SINGLE_DIGITS,
        "refact": _SINGLE_DIGITS,
        "command-r": _SINGLE_DIGITS,
        "llama-bpe": _WORDS % "{1,3}",
        "llama3": _WORDS % "{1,3}",
        "llama-v3": _WORDS % "{1,3}",
        "qwen2": _WORDS % "",
    }
)


def make_tokenizer(path: Path, model: str, rule: str) -> Any:
    """Make a tokenizer of transformers, with the chat template of the file.

    Args:
        path: the GGUF file.
        model: `tokenizer.ggml.model` of the file; gpt2 is byte-level BPE.
        rule: `tokenizer.ggml.pre` of the file.

    Raises:
        UnsupportedModel: the rule is unknown.
        OutriderError: the tokenizer is damaged.
    """
    if model == "gpt2" and rule not in _RULES:
        raise UnsupportedModel(
            f"{path} splits text by the rule {rule!r}; supported are {', '.join(_RULES)}; use the folder of the Hugging"
            " Face model"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise OutriderError(f"the tokenizer in {path} cannot be read ({error}); convert the model again") from error
    if model == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = _pre_tokenizer(_RULES[rule])
    spell_markers(tokenizer)
    return tokenizer


def rules() -> Iterator[tuple[str, Any]]:
    """Yield llama.cpp's name of each rule, and the pre-tokenizer that applies it. Aliases come last."""
    for name, rule in _RULES.items():
        yield name, _pre_tokenizer(rule)


def _pre_tokenizer(rule: Any) -> Any:
    if rule is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if isinstance(rule, str):
        split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return pre_tokenizers.Sequence([rule, pre_tokenizers.ByteLevel(add_prefix_space=False)])
