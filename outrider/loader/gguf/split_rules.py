"""The rules that split a text before byte-level BPE, by the name that a GGUF file has in `tokenizer.ggml.pre`.

Each rule is that of the published tokenizers whose files have the name: its expressions, and its normalizer. The names
are those of llama-vocab.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # %s: how many digits make one piece
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(end)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(end)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # end: of a word
_O200K_WORDS = _O200K % {"end": f"{_CONTRACTIONS}?", "digits": "{1,3}"}
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = r"\p{N}{1,3}"
_CJK = r"[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """How a text becomes the pieces in which BPE merges bytes."""

    expressions: tuple[str, ...] = ()  # one after the other; each match is a piece, and so is what lies between
    digits: bool = False  # whether each digit is a piece
    gpt2: bool = False  # whether the rule of GPT-2, which is built into ByteLevel, comes last
    nfc: bool = False  # whether the text is composed first (Unicode normalization form C)
    whole_words: bool = False  # whether a piece that is a token needs no merges
    bos: bool = False  # whether texts begin with the begin-of-text token if the file does not say

    def pre_tokenizer(self) -> Any:
        """Return the pre-tokenizer of the tokenizers library."""
        steps: list[Any] = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in self.expressions]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]

    def normalizer(self) -> Any:
        """Return the normalizer of the tokenizers library, or None."""
        return normalizers.NFC() if self.nfc else None


_GPT2 = SplitRule(gpt2=True)
_SINGLE_DIGITS = SplitRule(digits=True, gpt2=True)
_THREE_DIGITS = SplitRule(expressions=(_CL100K % "{1,3}",))
_LLAMA3 = SplitRule(expressions=(_CL100K % "{1,3}",), whole_words=True, bos=True)
_GLM4 = SplitRule(expressions=(_CL100K % "{1,3}",), whole_words=True)
_QWEN2 = SplitRule(expressions=(_CL100K % "",), nfc=True)
_GPT4O = SplitRule(expressions=(_O200K_WORDS,))
_DEEPSEEK3 = SplitRule(expressions=(_DIGITS, _CJK, _DEEPSEEK_WORDS))
_RULES: Mapping[str, SplitRule] = MappingProxyType(
    {
        "default": _GPT2,
        "gpt-2": _GPT2,
        "phi-2": _GPT2,
        "olmo": SplitRule(gpt2=True, nfc=True),
        "mellum": _GPT2,
        "mpt": SplitRule(gpt2=True, nfc=True),
        "smollm": _SINGLE_DIGITS,
        "starcoder": _SINGLE_DIGITS,
        "refact": _SINGLE_DIGITS,
        "command-r": SplitRule(digits=True, gpt2=True, nfc=True),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "falcon3": _LLAMA3,
        "falcon-h1": _LLAMA3,
        "pixtral": _LLAMA3,
        "lfm2": _LLAMA3,
        "dbrx": _THREE_DIGITS,
        "smaug-bpe": _THREE_DIGITS,
        "chatglm-bpe": _THREE_DIGITS,
        "glm4": _GLM4,
        "glm5": _GLM4,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": SplitRule(expressions=(_CL100K % "",)),
        "stablelm2": SplitRule(expressions=(_CL100K % "",), nfc=True),
        "qwen35": SplitRule(expressions=(_QWEN35,), nfc=True),
        "tekken": SplitRule(expressions=(_O200K % {"end": "", "digits": ""},), whole_words=True, bos=True),
        "gpt-4o": _GPT4O,
        "llama4": _GPT4O,
        "minimax-m2": _GPT4O,
        "deepseek-v3": _DEEPSEEK3,
        "hunyuan-dense": _DEEPSEEK3,
        "bailingmoe": SplitRule(expressions=(_BAILING,)),
        "bailingmoe2": SplitRule(expressions=(_BAILING,)),
        "seed-coder": SplitRule(expressions=(_SEED,)),
    }
)


def find_split_rule(name: str) -> SplitRule | None:
    """Return the rule of a name, or None."""
    return _RULES.get(name)


def split_rules() -> Iterator[tuple[str, SplitRule]]:
    """Yield the name of each rule in llama.cpp, and the rule. Aliases come last."""
    yield from _RULES.items()
