"""Reads the speculative configuration of vLLM and SGLang as a proposer and k."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider.core.params import is_whole
from outrider.errors import OutriderError, either

# Names of SGLang's options by vLLM's keys.
_SGLANG = {
    "speculative_algorithm": "method",
    "speculative_draft_model_path": "model",
    "speculative_num_steps": "num_speculative_tokens",
}
_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_DRAFTS = ("draft_model", "standalone", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "p-eagle")
_OWN_HEADS = ("mtp", "nextn")
_METHODS = ("ngram", "suffix", *_OWN_HEADS, *_DRAFTS)


class Speculation(NamedTuple):
    """A proposer and a draft length."""

    proposer: str
    k: int | None  # None: the planner chooses


def read_speculative_config(given: str | Mapping[str, Any]) -> Speculation:
    """Return what a JSON object in the form of vLLM or SGLang, or its text, asks for.

    Raises:
        OutriderError: it is not a JSON object, or has an unknown key or value; the message names the known ones.
    """
    try:
        fields = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise _mistake(f"is not JSON ({error})", 'write for example {"method": "ngram"}') from error
    if not isinstance(fields, Mapping):
        raise _mistake("is not a JSON object", 'write for example {"method": "ngram"}')
    for name in fields:
        if name not in (*_KEYS, *_SGLANG):
            raise _mistake(f"has the key {name!r}", f"use {either((*_KEYS, *_SGLANG))}")
    named: dict[str, Any] = {
        _SGLANG.get(str(name), str(name)): value for name, value in fields.items() if value is not None
    }
    k = named.get("num_speculative_tokens")
    if k is not None and (not is_whole(k) or k < 1):
        raise _mistake(f"has num_speculative_tokens {k!r}", "use a whole number of at least 1")
    return Speculation(_proposer(named), k)


def _proposer(fields: Mapping[str, Any]) -> str:
    model = fields.get("model")
    method = str(fields.get("method") or ("ngram" if model in ("ngram", "[ngram]") else "draft_model")).lower()
    lookup = [fields.get(name) for name in ("prompt_lookup_min", "prompt_lookup_max")]
    if method not in _METHODS and not method.endswith("_mtp"):
        raise _mistake(f"has the method {method!r}", f"use {either(_METHODS)}")
    if method != "ngram" and lookup != [None, None]:
        raise _mistake(f"has prompt_lookup_min or prompt_lookup_max with the method {method}", "use the method ngram")
    if method == "ngram":
        ends = [each for each in lookup if each is not None]
        return f"ngram:{ends[0]}-{ends[-1]}" if ends else "ngram"
    if method in _DRAFTS and not isinstance(model, str):
        raise _mistake(f"has the method {method} and no model", "give the folder or the name of the draft as model")
    if model is not None and method != "suffix":
        return f"draft:{model}"
    return "suffix" if method == "suffix" else "mtp"


def _mistake(fault: str, fix: str) -> OutriderError:
    return OutriderError(f"speculative_config {fault}; {fix}")
