"""Make the tokenizer that a GGUF file describes, with the tokenizers library."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from outrider.core.markers import text_markers
from outrider.core.tokenizer import FastTokenizer
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.loader.gguf.file import GGUFFile
from outrider.models.loader.gguf.split_rules import SplitRule, find_split_rule, split_rules

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
# The named tokens of transformers, and the last part of their fields.
_NAMED: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
)
_SPACE = "▁"  # in the vocabulary of SentencePiece
_KINDS = ("gpt2", "llama", "gemma4")  # byte-level BPE, and BPE of SentencePiece
Merges = list[tuple[str, str]]


def load_tokenizer(file: GGUFFile) -> FastTokenizer:
    """Make a tokenizer, with the chat template of the file.

    Raises:
        UnsupportedModel: the kind of the vocabulary or its split rule is not supported.
        OutriderError: the file has no tokenizer, or a damaged one.
    """
    names = file.field("tokenizer.ggml.tokens")
    if names is None:
        raise OutriderError(f"{file.path} has no tokenizer; convert the model again, with its tokenizer")
    tokens = list(names)
    kind = file.field("tokenizer.ggml.model", "")
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"{file.path} has a vocabulary of the kind {kind!r}; supported are {', '.join(_KINDS)}; use the folder of"
            " the Hugging Face model"
        )
    try:
        backend = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
        _add_tokens(backend, tokens, file.field("tokenizer.ggml.token_type") or ())
        named = {name: tokens[id] for name, id in _named_ids(file)}
        backend.post_processor = _post_processor(file, backend, named.get("bos_token"))
        template = file.field("tokenizer.chat_template")
        return FastTokenizer(backend, named, template, lambda: _full(backend, named, template))
    except UnsupportedModel:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise OutriderError(
            f"the tokenizer in {file.path} cannot be read ({error}); convert the model again"
        ) from error


def _named_ids(file: GGUFFile) -> Iterable[tuple[str, int]]:
    for name, key in _NAMED.items():
        if (id := file.field(f"tokenizer.ggml.{key}")) is not None:
            yield name, id


def _full(backend: Tokenizer, named: Mapping[str, str], template: str | None) -> Any:
    """Return a tokenizer of transformers around `backend`. Its constructor would copy `backend`, which is slow."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = backend
    tokenizer.__init__(clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = template
    return tokenizer


def _vocab(tokens: Iterable[str]) -> dict[str, int]:
    """Return the id of each token, without those that only fill up the rows of the embedding."""
    return {token: id for id, token in enumerate(tokens) if token != f"[PAD{id}]"}


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    rule = _split_rule(file)
    backend = Tokenizer(BPE(vocab=_vocab(tokens), merges=_merges(file), ignore_merges=rule.whole_words))
    backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(file: GGUFFile) -> Merges:
    return [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges") or ()]


def _split_rule(file: GGUFFile) -> SplitRule:
    name = file.field("tokenizer.ggml.pre", "default")
    rule = find_split_rule(name)
    if rule is None:
        known = ", ".join(name for name, _ in split_rules())
        raise UnsupportedModel(
            f"{file.path} splits text by the rule {name!r}; supported are {known}; use the folder of the Hugging Face"
            " model"
        )
    return rule


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    gemma = file.architecture.startswith("gemma") or file.field("tokenizer.ggml.model") == "gemma4"
    if gemma:  # runs of spaces are stored as spaces
        tokens[:] = [_SPACE * len(token) if token.isspace() and " " in token else token for token in tokens]
    vocab = _vocab(tokens)
    merges = _merges(file)
    if not merges:
        # The scores of Gemma do not follow the order of its merges, but the ids do.
        scores = [-id for id in range(len(tokens))] if gemma else file.field("tokenizer.ggml.scores")
        merges = _merges_of(vocab, tokens, scores)
    unknown = file.field("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = bool(file.field("tokenizer.ggml.add_space_prefix", True)) and not gemma
    replace = normalizers.Replace(" ", _SPACE)
    if file.architecture == "phi3" and prefix:  # its published tokenizer puts a space before spaces, too
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
    elif gemma:
        backend.normalizer = replace
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend


def _merges_of(vocab: Mapping[str, int], tokens: list[str], scores: list[float]) -> Merges:
    """Return the merges that a vocabulary implies: all ways to make a token of two, those of the best token first."""
    found = []
    for token, id in vocab.items():
        for i in range(1, len(token)):
            left = vocab.get(token[:i])
            if left is not None and (right := vocab.get(token[i:])) is not None:
                found.append((-scores[id], left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, left, right in found]


def _add_tokens(backend: Tokenizer, tokens: list[str], types: Iterable[int]) -> None:
    """Add the tokens that text is searched for before it is split. Those of control are special.

    The markers of function calls and reasoning are text, as `read_tokenizer` has them.
    """
    markers = text_markers(tokens)
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, type in zip(tokens, types, strict=False):
        if token and type in (_CONTROL, _USER_DEFINED):
            is_special = type == _CONTROL and token not in markers
            (special if is_special else plain).append(AddedToken(token, normalized=False, special=is_special))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _post_processor(file: GGUFFile, backend: Tokenizer, bos: str | None) -> Any:
    """Return what adds the begin-of-text token, if the file wants it."""
    kind = file.field("tokenizer.ggml.model")
    default = kind != "gpt2" or _split_rule(file).bos
    if bos is None or not file.field("tokenizer.ggml.add_bos_token", default):
        return processors.Sequence([])
    begin = (bos, backend.token_to_id(bos))
    return processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[begin])
