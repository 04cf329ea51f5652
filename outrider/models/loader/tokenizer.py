"""Load the tokenizer of a model folder, with the rules of its tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors
from tokenizers.models import BPE

from outrider.core.markers import text_markers
from outrider.core.tokenizer import NAMED, FastTokenizer
from outrider.errors import OutriderError

_RULES = ("normalizer", "pre_tokenizer", "decoder")
_BPE_OPTIONS = ("fuse_unk", "byte_fallback", "ignore_merges")
_CORRUPTING_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"  # a setting


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a folder. It encodes and decodes as its tokenizer.json says.

    Raises:
        OutriderError: the folder has no tokenizer, or a damaged one.
    """
    return _open_fast(path) or _read_full(path)


def _read_full(path: Path) -> Any:
    """Return the tokenizer of transformers. Errors are those of `read_tokenizer`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        _restore_rules(tokenizer, path / "tokenizer.json")
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            tokenizer._tokenizer = _with_text_markers(backend)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        # The message of transformers about a missing file has several lines, and names packages that would not help.
        missing = not (path / "tokenizer.json").exists()
        reason = "there is no tokenizer.json" if missing else " ".join(str(error).split())
        raise OutriderError(f"{path} has no working tokenizer ({reason}); copy its tokenizer.json there") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(getattr(backend, "model", None), BPE) and not getattr(tokenizer, _CORRUPTING_CLEAN_UP, False):
        tokenizer.clean_up_tokenization_spaces = False  # transformers ignores it for BPE, with a warning
    return tokenizer


def _open_fast(path: Path) -> FastTokenizer | None:
    """Return a tokenizer without transformers.

    Returns:
        None: the folder has files or settings that only transformers reads, or they are damaged.
    """
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
        named = _named(path, settings)
        template = _template(path, settings)
        if named is None or not _is_plain(settings, backend, named):
            return None
        backend = _with_text_markers(backend)
    except Exception:  # the tokenizers library raises bare Exceptions; transformers gives the reason
        return None
    if settings.keys() & {"add_bos_token", "add_eos_token"}:
        backend.post_processor = _post_processor(backend, settings, named)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named.values()])
    return FastTokenizer(backend, named, template, lambda: _read_full(path))


def _named(path: Path, settings: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the named special tokens; None: one has settings of its own."""
    file = path / "special_tokens_map.json"
    listed = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    given = {**listed, **settings}
    values = {name: value for name in NAMED if (value := given.get(name)) is not None}
    named = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
    return named if all(isinstance(token, str) for token in named.values()) else None


def _template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template. A TypeError says that there are several."""
    file = path / "chat_template.jinja"
    if (path / "additional_chat_templates").exists() or (path / "chat_template.json").exists():
        raise TypeError("several chat templates")
    template = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise TypeError("several chat templates")
    return template


def _is_plain(settings: Mapping[str, Any], backend: Tokenizer, named: Mapping[str, str]) -> bool:
    """Return whether tokenizer.json says everything, and transformers adds nothing."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = (settings.get("added_tokens_decoder") or {}).values()
    extra = [*_extra_tokens(settings), *(str(each["content"]) for each in listed)]
    known = all(token in added for token in (*named.values(), *extra))
    special = all(added[token].special for token in named.values() if token in added)
    unusual = (
        settings.get(_CORRUPTING_CLEAN_UP) or settings.get("split_special_tokens") or settings.get("fix_mistral_regex")
    )
    return known and special and not unusual and isinstance(backend.model, BPE)


def _extra_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a name."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    return [str(each["content"] if isinstance(each, dict) else each) for each in extra]


def _post_processor(backend: Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]) -> Any:
    """Return what adds the begin and end of a text where the settings say so."""
    begin = named.get("bos_token") if settings.get("add_bos_token") else None
    end = named.get("eos_token") if settings.get("add_eos_token") else None
    first = [f"{begin}:0"] if begin else []
    last = [f"{end}:0"] if end else []
    tokens = [(token, backend.token_to_id(token)) for token in (begin, end) if token]
    return processors.TemplateProcessing(
        single=[*first, "$A:0", *last],
        pair=[*first, "$A:0", *last, *(f"{begin}:1" for _ in first), "$B:1", *(f"{end}:1" for _ in last)],
        special_tokens=tokens,
    )


def _with_text_markers(backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer in which the markers of function calls and reasoning are text.

    Special tokens are left out of decoded text, and constraints cannot spell them. So calls could
    neither be found nor forced.
    """
    added = backend.get_added_tokens_decoder().values()
    markers = text_markers([token.content for token in added])
    if not any(token.special and token.content in markers for token in added):
        return backend
    description = json.loads(backend.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in markers
    return Tokenizer.from_str(json.dumps(description))


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
    if isinstance(model, BPE) and isinstance(backend.model, BPE):
        for option in _BPE_OPTIONS:
            setattr(model, option, bool(description["model"].get(option)))
