"""A folder of texts: which are trained on and which are kept aside, and how they become tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT, USER, ASSISTANT, END, PAD = SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
ENDS = (TEXT, END)  # of a text, and of a turn
TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{{ '<|assistant|>' if m['role'] == 'assistant' else '<|user|>' }}{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ASIDE = 20  # one text in so many
_LONGEST = 1 << 20  # bytes; what is longer is seldom written by people


def read_texts(folder: Path, suffixes: Sequence[str] = ()) -> Iterator[tuple[Path, str]]:
    """Every file below a folder that is text, in the order of their names; of these suffixes where some are given."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size <= _LONGEST and (not suffixes or path.suffix in suffixes):
            try:
                text = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield path.relative_to(folder), text


def is_aside(path: Path) -> bool:
    """Whether a text is for validation: it follows from its name, so that every part of the recipe says the same."""
    return int(hashlib.sha256(path.as_posix().encode()).hexdigest(), 16) % _ASIDE == 0


def train_tokenizer(texts: Sequence[str], vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with digits one by one, and a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=TEXT,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """All texts as one row of ids [N], each behind the token that begins a text."""
    begin, bpe = tokenizer.convert_tokens_to_ids(TEXT), tokenizer.backend_tokenizer
    pieces = [np.array([begin, *found.ids], dtype=np.int32) for found in bpe.encode_batch(list(texts))]
    return torch.from_numpy(np.concatenate(pieces))
