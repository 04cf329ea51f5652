"""The rules that split a text before byte-level BPE, by the name that a GGUF file has in `tokenizer.ggml.pre`.

Each rule is that of the published tokenizers whose files have the name: its expressions, and its normalizer. The names
are those of llama-vocab.cpp of llama.cpp.
"""

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
_CASED = (  # letters of scripts with case
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80"
    "-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LINE_ENDS = r"[\r\n]"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_KIMI_START = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_END = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|{_KIMI_START}*{_KIMI_END}+{_CONTRACTIONS}?|{_KIMI_START}+{_KIMI_END}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_GROUPED_DIGITS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # groups of three are counted from the end
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0eba-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
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
_SINGLE_CL100K = SplitRule(expressions=(_CL100K % "",))
_BLOOM_RULE = SplitRule(expressions=(_BLOOM,))
_TINY_AYA = SplitRule(expressions=(r"\d{1,3}(?=(?:\d{3})*\b)", _O200K_WORDS))
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
        "deepseek-r1-qwen": _SINGLE_CL100K,
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
        "deepseek-llm": SplitRule(
            expressions=(_LINE_ENDS, rf"\s?[{_CASED}]+", _DEEPSEEK_MARKS, r"\s+$", _EAST_ASIAN, r"\p{N}+")
        ),
        "deepseek-coder": SplitRule(expressions=(_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
        "falcon": SplitRule(expressions=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]")),
        "bloom": _BLOOM_RULE,
        "poro-chat": _BLOOM_RULE,
        "gpt3-finnish": _BLOOM_RULE,
        "viking": SplitRule(expressions=(_BLOOM, r"\p{N}")),
        "exaone": SplitRule(digits=True, gpt2=True, nfc=True),
        "exaone-moe": SplitRule(expressions=(_EXAONE_MOE,)),
        "kimi-k2": SplitRule(expressions=(_KIMI,)),
        "youtu": SplitRule(
            expressions=(_YOUTU_SCRIPTS, _O200K % {"end": f"{_CONTRACTIONS}?", "digits": ""}), whole_words=True
        ),
        "tiny_aya": _TINY_AYA,
        "cohere2moe": _TINY_AYA,
        "afmoe": SplitRule(expressions=(_GROUPED_DIGITS, _AFMOE_SCRIPTS, _DEEPSEEK_WORDS)),
        "laguna": SplitRule(expressions=(r"[^\n]+|[\n]+", _CL100K % "")),
        "minicpm5": SplitRule(expressions=(_DIGITS, _CL100K % "+"), whole_words=True),
        "hunyuan": _SINGLE_CL100K,
        "solar-open": _SINGLE_CL100K,
        "grok-2": _SINGLE_CL100K,
        "ufakzeka": SplitRule(expressions=((_CL100K % "").removeprefix(f"{_CONTRACTIONS}|"),)),
        "megrez": _QWEN2,
        "kormo": _QWEN2,
        "midm-2.0": _LLAMA3,
        "kanana2": _GPT4O,
        "joyai-llm": _DEEPSEEK3,
        "hy_v4": _DEEPSEEK3,
        "llada-moe": SplitRule(expressions=(_BAILING,)),
        "codeshell": _SINGLE_DIGITS,
        "minerva-7b": _SINGLE_DIGITS,
        "mellum2": _SINGLE_DIGITS,
        "exaone4": _GPT2,
        "gigachat": _GPT2,
        "a.x-4.0": _GPT2,
        "jais": _GPT2,
        "trillion": _GPT2,
        "granite-docling": _GPT2,
    }
)


def find_split_rule(name: str) -> SplitRule | None:
    """Return the rule of a name, or None."""
    return _RULES.get(name)


def split_rules() -> Iterator[tuple[str, SplitRule]]:
    """Yield the name of each rule in llama.cpp, and the rule. Aliases come last."""
    yield from _RULES.items()
