"""Tokenizers are used as their files describe them, whatever class the checkpoint names."""

import json
import logging
import shutil

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider import LLM, Constraint, SamplingParams
from outrider.core.prompts import text_tokens
from outrider.errors import OutriderError
from outrider.models.loader.tokenizer import read_tokenizer
from tests.helpers import tiny

TEXT = "It is 2024, in Paris."
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("tokenizer")).folder("llama")


@pytest.fixture
def folder(model, tmp_path):
    """A valid model folder, which a test may change."""
    return shutil.copytree(model, tmp_path / "model")


def byte_level(pre_tokenizer, *, ignore_merges=False):
    """Byte-level BPE that joins digits in pairs, unless a pre-tokenizer separates them."""
    vocab = {letter: i for i, letter in enumerate([*BYTES, "20", "24", "ĠP", "Ġ2", "ris", "2024"])}
    merges = [("2", "0"), ("2", "4"), ("Ġ", "P"), ("Ġ", "2")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write(folder, tokenizer, **settings):
    """Replace the tokenizer of a folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | settings))


DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
TRIPLES = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\P{N}+"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("rule", [DIGITS, TRIPLES], ids=["digits", "triples"])
def test_text_is_split_by_the_rule_of_the_file(folder, name, rule):
    """transformers replaces the pre-tokenizer by the one that belongs to the class."""
    tokenizer = byte_level(rule, ignore_merges=True)
    tokenizer.normalizer = normalizers.Lowercase()
    write(folder, tokenizer, tokenizer_class=name)
    loaded = read_tokenizer(folder)
    expected = tokenizer.encode(TEXT).ids
    assert list(text_tokens(loaded, TEXT)) == expected
    assert loaded.decode(expected) == tokenizer.decode(expected) == TEXT.lower()


@pytest.mark.parametrize("adds_begin", [True, False])
def test_sentencepiece_rules_are_kept(folder, adds_begin):
    """Without a space before the text, where `LlamaTokenizer` would add one."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if adds_begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    write(folder, tokenizer, tokenizer_class="LlamaTokenizer", unk_token="<unk>")
    loaded = read_tokenizer(folder)
    for text in ("a b", " a é", "世"):
        assert list(text_tokens(loaded, text)) == tokenizer.encode(text).ids
        assert text_tokens(loaded, text).count(1) == adds_begin
        assert loaded.decode(loaded.encode(text), skip_special_tokens=True) == text


def test_begin_of_text_token_is_not_doubled_and_not_dropped(folder):
    tokenizer = byte_level(DIGITS)
    begin = tokenizer.token_to_id("<s>")
    letter = tokenizer.token_to_id("a")
    write(folder, tokenizer, tokenizer_class="PreTrainedTokenizerFast")
    assert text_tokens(read_tokenizer(folder), "<s><s>a") == (begin, begin, letter)  # nothing adds one
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    write(folder, tokenizer, tokenizer_class="PreTrainedTokenizerFast")
    loaded = read_tokenizer(folder)
    assert text_tokens(loaded, "a") == text_tokens(loaded, "<s>a") == (begin, letter)
    assert text_tokens(loaded, "<s><s>a") == (begin, begin, letter)
    assert text_tokens(loaded, "<s>a", special=False) == (begin, letter)
    assert text_tokens(loaded, "") == (begin,)


def test_setting_that_bpe_ignores_gives_no_warning(folder, caplog):
    write(folder, byte_level(DIGITS), tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=True)
    loaded = read_tokenizer(folder)
    with caplog.at_level(logging.WARNING):
        assert loaded.decode(loaded.encode("a .")) == "a ."
    assert not caplog.records


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}'])
def test_damaged_file_is_an_error(folder, content):
    write(folder, byte_level(DIGITS), tokenizer_class="GPT2Tokenizer")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(OutriderError, match=r"has no working tokenizer .*; copy its tokenizer.json there"):
        read_tokenizer(folder)


def test_end_of_text_token_of_the_tokenizer_counts_if_the_configurations_name_none(folder):
    for file in ("generation_config.json", "config.json"):
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(settings | {"eos_token_id": None}))
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = "b"
    tokenizer.save_pretrained(folder)
    llm = LLM(folder, proposer="ngram", dtype="float32", max_num_seqs=1, max_model_len=64, threads=1)
    assert llm.parts.end_ids == {tokenizer.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    llm = LLM(folder, proposer="ngram", dtype="float32", max_num_seqs=1, max_model_len=64, threads=1)
    assert llm.parts.end_ids == {7, 9}


def test_constraint_with_a_vocabulary_that_leaves_ids_out(folder):
    """Its end-of-text token has a larger id than the tokenizer has tokens."""
    pytest.importorskip("llguidance")
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    letters = BYTES[: vocab - 30]
    tokenizer = Tokenizer(models.BPE(vocab={a: i for i, a in enumerate(letters)} | {"</s>": vocab - 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab - 1}))
    llm = LLM(folder, proposer="ngram", dtype="float32", max_num_seqs=1, max_model_len=64, threads=1)
    params = SamplingParams(k=3, max_tokens=20, constraint=Constraint.regex("ab(cd)?"), logit_bias={vocab - 1: 100})
    (completion,) = llm.generate([[3, 4]], params)
    assert completion.text == "ab"
    assert completion.token_ids[-1] == vocab - 1
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("marker", ["<tool_call>", "</tool_call>"])
def test_markers_of_calls_are_text(folder, marker):
    """Also where the tokenizer has them as special tokens, whose text would be left out."""
    tokenizer = byte_level(DIGITS)
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>", "<other>"])
    write(folder, tokenizer)
    read = read_tokenizer(folder)
    ids = read.encode(f"a{marker}b<other>c</s>", add_special_tokens=False)
    assert read.convert_tokens_to_ids(marker) in ids
    assert len(ids) == 6
    assert read.decode(ids, skip_special_tokens=True) == f"a{marker}bc"
