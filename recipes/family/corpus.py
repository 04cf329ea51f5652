"""Reads a folder of text files, divides them into training and validation documents, and tokenizes them."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"  # also the first token of every document
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END_OF_TURN = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END_OF_TURN, PAD)  # in the order of their ids
EOS_TOKENS = (END_OF_TEXT, END_OF_TURN)
CHAT_TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{{ '<|assistant|>' if m['role'] == 'assistant' else '<|user|>' }}{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_VALIDATION_INTERVAL = 20  # one document in so many is for validation
_MAX_BYTES = 1 << 20  # larger files are rarely written by people


def read_texts(folder: Path, suffixes: Sequence[str] = ()) -> Iterator[tuple[Path, str]]:
    """Yield relative path and text of every UTF-8 file below a folder, in the order of the paths.

    With `suffixes`, only files with one of these suffixes are read. Empty files and files above 1 MiB are left out.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size <= _MAX_BYTES and (not suffixes or path.suffix in suffixes):
            try:
                text = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield path.relative_to(folder), text


def is_for_validation(path: Path) -> bool:
    """Return whether a document is for validation. This depends only on its path, so all parts of the recipe agree."""
    return int(hashlib.sha256(path.as_posix().encode()).hexdigest(), 16) % _VALIDATION_INTERVAL == 0


def train_tokenizer(texts: Sequence[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with `vocab` tokens, one token per digit, and a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """Return the token ids [N] of all texts, concatenated. Each text begins with the end-of-text token."""
    first_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encodings = tokenizer.backend_tokenizer.encode_batch(list(texts))
    documents = [np.array([first_id, *encoding.ids], dtype=np.int32) for encoding in encodings]
    return torch.from_numpy(np.concatenate(documents))
