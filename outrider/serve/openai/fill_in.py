"""Prompts that ask for the text between a prefix and a suffix, for models with tokens for it."""

from typing import Any

from outrider.core.params import InvalidParam
from outrider.core.prompts import text_tokens

_PREFIX, _SUFFIX = "{prefix}", "{suffix}"
_FORMS = (  # special tokens, and the texts between them
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
    ("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>"),
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),
    ("▁<PRE>", _PREFIX, "▁<SUF>", _SUFFIX, "▁<MID>"),
)


def fill_in_tokens(tokenizer: Any, prefix: str, suffix: str) -> tuple[int, ...]:
    """Return the tokens of a prompt whose completion stands between two texts.

    Raises:
        InvalidParam: the vocabulary has no tokens for it.
    """
    vocabulary = tokenizer.get_vocab()
    for form in _FORMS:
        if all(part in vocabulary for part in form if part not in (_PREFIX, _SUFFIX)):
            break
    else:
        raise InvalidParam("suffix", "suffix: this model has no tokens to fill in the middle; leave suffix out")
    begin = [] if tokenizer.bos_token_id is None else list(text_tokens(tokenizer, "")[:1])
    texts = {_PREFIX: prefix, _SUFFIX: suffix}
    for part in form:
        if part in texts:
            begin += text_tokens(tokenizer, texts[part], special=False)
        else:
            begin.append(vocabulary[part])
    return tuple(begin)
