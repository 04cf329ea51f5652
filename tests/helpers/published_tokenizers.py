"""The settings of the tokenizers of popular checkpoints, and small tokenizers that have them.

The vocabulary is trained on a few lines. Rules, special tokens and the structure of the chat template are those of the
published tokenizer, and so is the number of ids that the model has beyond those of its tokenizer.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = (
    "What is the capital of France? The capital of France is Paris.",
    "def add(first, second): return first + second  # it's 12345 in 2024",
    "You are a helpful assistant. The answer is 42, and 世界 is a word.",
) * 8
QUESTION = "What is 12345?"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # %s: how many digits make one piece
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHATML = (
    "{%%- if messages[0].role != 'system' %%}{{ '<|im_start|>system\\n%s<|im_end|>\\n' }}{%% endif %%}"
    "{%%- for m in messages %%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%% endfor %%}"
    "{%%- if add_generation_prompt %%}{{ '<|im_start|>assistant\\n' }}{%% endif %%}"
)  # %s: the system message if there is none


@dataclass(frozen=True, kw_only=True)
class Published:
    """The settings of one tokenizer. Ids are those of the small tokenizer."""

    tokenizer_class: str  # as in tokenizer_config.json
    special: tuple[str, ...]  # special tokens
    plain: tuple[str, ...] = ()  # added tokens that are not special
    bos: str | None
    eos: str
    pad: str | None
    adds_bos: bool
    ends: tuple[str, ...]  # eos_token_id of generation_config.json
    template: str
    prompt: str  # what the template makes of QUESTION, with the generation prompt
    digits: str = "1"  # how "12345" is split: "1" into digits, "3" into groups of three from the left
    split: str | None = None  # regular expression of the pre-tokenizer
    sentencepiece: bool = False  # with byte fallback, in place of byte-level
    prefix_space: bool = False  # a space is put before a text, and removed from the front of decoded text
    first: bool = False  # the special tokens have the lowest ids
    padding: int = 0  # ids of the model beyond those of the tokenizer; below 0: of the tokenizer beyond the model's
    clean_up: bool = False  # clean_up_tokenization_spaces


PUBLISHED: dict[str, Published] = {
    # 128,000 tokens and 256 special ones. The template also writes dates, which are fixed here.
    "Llama-3.2-1B": Published(
        tokenizer_class="PreTrainedTokenizerFast",
        special=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|finetune_right_pad_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad=None,
        adds_bos=True,
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        template=(
            "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' }}{%- if"
            " messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ '<|eot_id|>' }}{%- for m in"
            " messages if m.role != 'system' %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' +"
            " m.content | trim + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}{{"
            " '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
        ),
        prompt=(
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
            f"<|start_header_id|>user<|end_header_id|>\n\n{QUESTION}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        digits="3",
        split=_CL100K % "{1,3}",
        clean_up=True,
    ),
    # 151,665 tokens, and 151,936 in the small models.
    "Qwen2.5-0.5B": Published(
        tokenizer_class="Qwen2Tokenizer",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=("<tool_call>", "</tool_call>"),
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        adds_bos=False,
        ends=("<|im_end|>", "<|endoftext|>"),
        template=_CHATML % "You are a helpful assistant.",
        prompt=(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        ),
        split=_CL100K % "",
        padding=271,
    ),
    # 151,669 tokens of 151,936. The template has no system message of its own.
    "Qwen3-0.6B": Published(
        tokenizer_class="Qwen2Tokenizer",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        adds_bos=False,
        ends=("<|im_end|>", "<|endoftext|>"),
        template=(
            "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}{%-"
            " if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not"
            " enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{%- endif %}"
        ),
        prompt=f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
        split=_CL100K % "",
        padding=267,
    ),
    # 32,768 tokens. The tokenizer of version 3, which is sentencepiece's.
    "Mistral-7B": Published(
        tokenizer_class="LlamaTokenizer",
        special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        bos="<s>",
        eos="</s>",
        pad=None,
        adds_bos=True,
        ends=("</s>",),
        template=(
            "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]'"
            " }}{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{%- else %}{{ raise_exception('only"
            " user and assistant roles are supported') }}{% endif %}{% endfor %}"
        ),
        prompt=f"<s>[INST] {QUESTION}[/INST]",
        sentencepiece=True,
        prefix_space=True,
        first=True,
    ),
    # 49,152 tokens. Its begin-of-text token is that of a turn, and nothing adds it.
    "SmolLM2-135M": Published(
        tokenizer_class="GPT2Tokenizer",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos="<|im_start|>",
        eos="<|im_end|>",
        pad="<|im_end|>",
        adds_bos=False,
        ends=("<|im_end|>",),
        template=_CHATML % "You are a helpful assistant.",
        prompt=(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        ),
        first=True,
    ),
    # 128,256 tokens: those of Llama 3, with the markers of ChatML among the special ones.
    "SmolLM3-3B": Published(
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        plain=("<think>", "</think>"),
        bos=None,
        eos="<|im_end|>",
        pad="<|im_end|>",
        adds_bos=False,
        ends=("<|im_end|>",),
        template=_CHATML % "## Metadata\\n\\nReasoning Mode: /think\\n\\n",
        prompt=(
            "<|im_start|>system\n## Metadata\n\nReasoning Mode: /think\n\n<|im_end|>\n"
            f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        ),
        digits="3",
        split=_CL100K % "{1,3}",
    ),
    # 262,145 tokens, of which the last, an image token, is beyond the 262,144 ids of the text models.
    "Gemma-3-270m": Published(
        tokenizer_class="GemmaTokenizer",
        special=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        adds_bos=True,
        ends=("<eos>", "<end_of_turn>"),
        template=(
            "{{ bos_token }}{%- for m in messages %}{%- set role = 'model' if m.role == 'assistant' else m.role %}"
            "{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
            "{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
        ),
        prompt=f"<bos><start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n",
        sentencepiece=True,
        first=True,
        padding=-1,
    ),
    # 200,064 ids, of which the tokenizer has 200,029.
    "Phi-4-mini": Published(
        tokenizer_class="GPT2Tokenizer",
        special=("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>"),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        adds_bos=False,
        ends=("<|end|>", "<|endoftext|>"),
        template=(
            "{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
            "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
        ),
        prompt=f"<|user|>{QUESTION}<|end|><|assistant|>",
        digits="3",
        split=_O200K,
        padding=35,
    ),
}


# Tokenizers that differ from a published one in one point.
VARIANTS: dict[str, Published] = {
    "Qwen2.5 with special markers": replace(
        PUBLISHED["Qwen2.5-0.5B"],
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
        plain=(),
    )
}


@dataclass(frozen=True, kw_only=True)
class Small:
    """A small tokenizer with published settings."""

    published: Published
    reference: Tokenizer  # what tokenizer.json describes
    model_vocab: int  # ids of the model

    def id(self, token: str) -> int:
        found = self.reference.token_to_id(token)
        assert found is not None
        return found

    @property
    def end_ids(self) -> list[int]:
        return [self.id(token) for token in self.published.ends]

    @property
    def undecodable(self) -> list[int]:
        """Ids of the model for which the tokenizer has no token."""
        known = set(self.reference.get_vocab(with_added_tokens=True).values())
        return [id for id in range(self.model_vocab) if id not in known]


@cache
def small_tokenizer(name: str) -> Small:
    """Train the small tokenizer of a checkpoint."""
    published = (PUBLISHED | VARIANTS)[name]
    tokenizer = _sentencepiece(published) if published.sentencepiece else _byte_level(published)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in published.special])
    if published.plain:
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in published.plain])
    if published.padding < 0:
        tokenizer.add_special_tokens([f"<extra_{i}>" for i in range(-published.padding)])
    if published.adds_bos:
        assert published.bos is not None
        begin = (published.bos, tokenizer.token_to_id(published.bos))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{published.bos} $A", pair=f"{published.bos} $A {published.bos}:1 $B:1", special_tokens=[begin]
        )
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    return Small(published=published, reference=tokenizer, model_vocab=highest + 1 + published.padding)


def save_tokenizer(name: str, folder: Path) -> Small:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into the folder of a model."""
    small = small_tokenizer(name)
    published = small.published
    small.reference.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": published.bos, "eos_token": published.eos, "pad_token": published.pad}
    settings: dict[str, Any] = {
        "tokenizer_class": published.tokenizer_class,
        "chat_template": published.template,
        "clean_up_tokenization_spaces": published.clean_up,
        **tokens,
    }
    if published.tokenizer_class in ("LlamaTokenizer", "GemmaTokenizer"):
        settings["add_bos_token"] = True
        settings["unk_token"] = "<unk>"
    if published.tokenizer_class == "GPT2Tokenizer":
        settings["unk_token"] = "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = small.end_ids
    generation = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return small


def _byte_level(published: Published) -> Tokenizer:
    """Train byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    pieces: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
    if published.split is not None:
        pieces = [pre_tokenizers.Split(Regex(published.split), behavior="isolated")]
    own_regex = published.split is None
    pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    if published.tokenizer_class == "Qwen2Tokenizer":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = _train(tokenizer, alphabet)
    tokenizer.model = models.BPE(vocab=_with_special(published, vocab), merges=merges)
    return tokenizer


def _sentencepiece(published: Published) -> Tokenizer:
    """Train BPE with byte fallback, as it is converted from sentencepiece."""
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if published.prefix_space:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps)
    lines = [line.replace("世界", "") for line in LINES]  # its characters are spelled in bytes
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    vocab, merges = _train(trained, [chr(i) for i in range(33, 127)], lines)
    words = [f"<0x{byte:02X}>" for byte in range(256)] + [word for word in vocab if word != "\n"]
    tokenizer.model = models.BPE(
        vocab=_with_special(published, words), merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    )
    return tokenizer


def _train(
    tokenizer: Tokenizer, alphabet: Sequence[str], lines: Sequence[str] = LINES
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the vocabulary in the order of its ids, and the merges."""
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 60, initial_alphabet=list(alphabet), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


def _with_special(published: Published, vocab: Sequence[str]) -> dict[str, int]:
    """Number the tokens, with the special ones before or after the others."""
    before = published.special if published.first else ()
    after = () if published.first else published.special
    ids: Iterator[tuple[str, int]] = ((token, i) for i, token in enumerate([*before, *vocab]))
    start = len(before) + len(vocab)
    return dict(ids) | {token: start + i for i, token in enumerate(after)}
