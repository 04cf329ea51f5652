"""Tokenizers in GGUF files: the same ids as the published tokenizer, and one begin-of-text token where it is wanted."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from outrider.errors import UnsupportedModel
from outrider.models.loader.gguf.file import read_gguf
from outrider.models.loader.gguf.tokenizer import load_tokenizer
from tests.helpers.published_tokenizers import PUBLISHED, Small, small_tokenizer

# The rule that the published files name in `tokenizer.ggml.pre`, and the architecture.
RULES = {
    "Llama-3.2-1B": ("llama-bpe", "llama"),
    "Qwen2.5-0.5B": ("qwen2", "qwen2"),
    "Qwen3-0.6B": ("qwen2", "qwen3"),
    "Mistral-7B": (None, "llama"),
    "SmolLM2-135M": ("smollm", "llama"),
    "SmolLM3-3B": ("llama-bpe", "smollm3"),
    "Gemma-3-270m": (None, "gemma3"),
    "Phi-4-mini": ("gpt-4o", "phi3"),
}
TEXTS = (
    "Café déjà 123 สวัสดี 😊",
    "Cafe\u0301 de\u0301ja\u0300 e\u0301e\u0301",  # the same letters, composed of two characters each
    "What is 12345? it's WE'LL  don't\n\n\tdef add(first, second): return first + second\r\n  ",
    " leading and trailing ",
    "<|im_start|>user<|im_end|><tool_call>世界</tool_call><think>",
)
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6


def write_tokenizer(path: Path, small: Small, rule: str | None, architecture: str, **flags: Any) -> Path:
    """Write a GGUF file without tensors that has the tokenizer."""
    published = small.published
    model = json.loads(small.reference.to_str())["model"]
    vocab = small.reference.get_vocab(with_added_tokens=True)
    tokens = [f"[PAD{id}]" for id in range(max(vocab.values()) + 1)]
    types = [_NORMAL] * len(tokens)
    for token, id in vocab.items():
        tokens[id] = token
        if token in published.special or token.startswith("<extra"):
            types[id] = _CONTROL
        elif token in published.plain:
            types[id] = _USER_DEFINED
        elif rule is None and token.startswith("<0x"):
            types[id] = _BYTE
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2" if rule else "llama")
    if rule:
        writer.add_tokenizer_pre(rule)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if rule or architecture.startswith("gemma"):
        writer.add_token_merges(merges)
    else:
        # SentencePiece has a score for each token, which is better the earlier it is merged.
        rank = {merge.replace(" ", ""): -i - 1.0 for i, merge in enumerate(merges)}
        writer.add_token_scores([rank.get(token, -1e9) for token in tokens])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if published.bos:
        writer.add_bos_token_id(vocab[published.bos])
    writer.add_eos_token_id(vocab[published.eos])
    if rule is None:
        writer.add_unk_token_id(vocab["<unk>"])
    writer.add_add_bos_token(flags.get("bos", published.adds_bos))
    writer.add_add_space_prefix(published.prefix_space)
    writer.add_chat_template(published.template)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_those_of_the_published_tokenizer(tmp_path, name):
    """llama.cpp#23252: combining marks, digits and other scripts were split differently; Qwen composes them first."""
    small = small_tokenizer(name)
    rule, architecture = RULES[name]
    tokenizer = load_tokenizer(read_gguf(write_tokenizer(tmp_path / "t.gguf", small, rule, architecture)))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == small.reference.encode(text).ids, text
        assert tokenizer.decode(ids) == small.reference.decode(ids, skip_special_tokens=False), text
    assert tokenizer.get_vocab() == small.reference.get_vocab(with_added_tokens=True)


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Mistral-7B", "Qwen2.5-0.5B"])
def test_begin_of_text_is_added_where_the_file_says_so(tmp_path, name):
    """llama.cpp#3966, nobodywho PR #328: `add_bos_token` false was ignored, or the token came twice."""
    small = small_tokenizer(name)
    rule, architecture = RULES[name]
    bos = small.published.bos and small.id(small.published.bos)
    for wanted in (True, False):
        path = write_tokenizer(tmp_path / f"{wanted}.gguf", small, rule, architecture, bos=wanted)
        ids = load_tokenizer(read_gguf(path)).encode("The answer")
        assert ids.count(bos) == (wanted and bos is not None)


def test_a_template_with_begin_of_text_does_not_double_it(tmp_path):
    """nobodywho PR #328: both the template and the tokenizer wrote the begin-of-text token."""
    from outrider.core.prompts import chat_tokens

    small = small_tokenizer("Llama-3.2-1B")
    path = write_tokenizer(tmp_path / "t.gguf", small, "llama-bpe", "llama")
    ids = chat_tokens(load_tokenizer(read_gguf(path)), [{"role": "user", "content": "hi"}])
    assert list(ids).count(small.id("<|begin_of_text|>")) == 1


@pytest.mark.parametrize("rule", ["qwen35", "tekken", "gpt-4o", "llama4", "deepseek-v3", "glm4", "lfm2"])
def test_rules_of_current_models_are_known(tmp_path, rule):
    """llama.cpp#23252: files of new models named a rule that was not known yet, and were split by another one."""
    path = write_tokenizer(tmp_path / "t.gguf", small_tokenizer("Qwen3-0.6B"), rule, "qwen3")
    tokenizer = load_tokenizer(read_gguf(path))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_an_unknown_rule_is_refused_by_name(tmp_path):
    """llama.cpp#23252: the default rule silently gave other ids."""
    path = write_tokenizer(tmp_path / "t.gguf", small_tokenizer("Qwen3-0.6B"), "rule-of-2030", "qwen3")
    with pytest.raises(UnsupportedModel, match="splits text by the rule 'rule-of-2030'"):
        load_tokenizer(read_gguf(path))
