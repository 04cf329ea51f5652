"""Load the tokenizer of a model folder, with the rules of its tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from outrider.core.markers import CALL_END, CALL_START
from outrider.errors import OutriderError

_RULES = ("normalizer", "pre_tokenizer", "decoder")
_BPE_OPTIONS = ("fuse_unk", "byte_fallback", "ignore_merges")


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a folder. It encodes and decodes as its tokenizer.json says.

    Raises:
        OutriderError: the folder has no tokenizer, or a damaged one.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        _restore_rules(tokenizer, path / "tokenizer.json")
        spell_markers(tokenizer)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        # What transformers says of a missing file has several lines, and names packages that would not help.
        missing = not (path / "tokenizer.json").exists()
        reason = "there is no tokenizer.json" if missing else " ".join(str(error).split())
        raise OutriderError(f"{path} has no working tokenizer ({reason}); copy its tokenizer.json there") from error
    if isinstance(_model(tokenizer), BPE) and not _forces_clean_up(tokenizer):
        tokenizer.clean_up_tokenization_spaces = False  # transformers ignores it for BPE, with a warning
    return tokenizer


def _restore_rules(tokenizer: Any, file: Path) -> None:
    """Let a tokenizer use the rules of its tokenizer.json.

    Classes such as `LlamaTokenizer` and `GPT2Tokenizer` of transformers 5 replace these rules by fixed ones. If a
    checkpoint names such a class and has other rules, its text would be split into tokens that the model never saw.
    """
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(tokenizer) is PreTrainedTokenizerFast or not file.is_file():
        return
    description = json.loads(file.read_text("utf-8"))
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    rules = {**description, "model": empty, "added_tokens": [], "post_processor": None}
    published = Tokenizer.from_str(json.dumps(rules))
    for rule in _RULES:
        setattr(backend, rule, getattr(published, rule))
    model = backend.model
    if isinstance(model, BPE) and description["model"].get("type") == "BPE":
        for option in _BPE_OPTIONS:
            setattr(model, option, bool(description["model"].get(option)))


def spell_markers(tokenizer: Any) -> None:
    """Let the markers of function calls be text where a tokenizer has them as special tokens.

    Special tokens are left out of decoded text, and constraints cannot spell them. So calls could neither be found nor
    forced.
    """
    added = tokenizer.added_tokens_decoder.values()
    if not any(token.special and token.content in (CALL_START, CALL_END) for token in added):
        return
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in (CALL_START, CALL_END)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(description))


def _model(tokenizer: Any) -> Any:
    """Return the model of a tokenizer, such as BPE; None for a tokenizer in Python."""
    return getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)


def _forces_clean_up(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
