"""Translates a recommendation into settings of vLLM and SGLang, or explains why it has none.

The names are those of their documentation: `--speculative-config` of vLLM, `--speculative-*` of SGLang.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.propose.registry import Expression, parse

_MAX_BATCH = 512  # largest batch in vLLM's table of k by batch size
_DRAFT_MODELS = ("draft", "draft-tokens")
_ALTERNATIVE = "use the best of draft, ngram and suffix from the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEngine:
    """The settings of another engine."""

    engine: str
    settings: str | None  # None: the engine does not support it
    note: str  # what differs in this engine, or why it has no settings


def other_engines(proposer: str, k: int, *, stops: int | None) -> tuple[OtherEngine, ...]:
    """Return the settings of vLLM and SGLang for a proposer.

    Args:
        proposer: an expression; "none" is plain decoding.
        k: draft tokens per round.
        stops: the batch from which speculation does not pay; None: unknown.
    """
    expression = parse(proposer)
    if expression.name == "none":
        note = "plain decoding: give no speculative settings"
        return tuple(OtherEngine(engine=name, settings=None, note=note) for name in ("vLLM", "SGLang"))
    return _vllm(expression, k, stops), _sglang(expression, k)


def _vllm(expression: Expression, k: int, stops: int | None) -> OtherEngine:
    name = expression.name
    config: dict[str, Any]
    notes = []
    if name in _DRAFT_MODELS:
        config = {"method": "draft_model", "model": expression.argument, "num_speculative_tokens": k}
        if name == "draft-tokens":
            config["use_heterogeneous_vocab"] = True
            notes.append("draft tokens are greedy there, which a draft with another vocabulary requires")
        else:
            notes.append("draft tokens are greedy there unless draft_sample_method is probabilistic")
            notes.append("a draft with another vocabulary also needs use_heterogeneous_vocab")
    elif name == "ngram":
        shortest, _, longest = (expression.argument or "1-5").partition("-")
        config = {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_min": int(shortest),
            "prompt_lookup_max": int(longest),
        }
        notes.append("it drafts one chain, without probabilities to trim it by")
    elif name == "suffix":
        config = {"method": "suffix", "num_speculative_tokens": k}
        if not expression.argument:
            config["suffix_decoding_max_cached_requests"] = 0
        notes.append("it drafts one chain")
    else:
        return OtherEngine(engine="vLLM", settings=None, note=f"vLLM has no {name}; {_ALTERNATIVE}")
    if stops is not None and stops > 1:
        k_by_batch = [[1, stops - 1, k], [stops, max(_MAX_BATCH, stops), 0]]
        notes.append(
            "to stop drafting at large batches, add num_speculative_tokens_per_batch_size"
            f" {json.dumps(k_by_batch)}, which its documentation calls tested with EAGLE and DFlash"
        )
    return OtherEngine(engine="vLLM", settings=f"--speculative-config '{json.dumps(config)}'", note="; ".join(notes))


def _sglang(expression: Expression, k: int) -> OtherEngine:
    name = expression.name
    if name == "draft":
        settings = (
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path {expression.argument}"
            f" --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        )
        note = "one chain; both models need the same vocabulary; no option stops drafting at large batches"
        return OtherEngine(engine="SGLang", settings=settings, note=note)
    if name in ("ngram", "suffix"):
        settings = f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {k + 1}"
        note = (
            "its NGRAM searches a tree of all requests, so it finds more than ngram and remembers outputs like"
            " suffix:TOKENS; CUDA only"
        )
        return OtherEngine(engine="SGLang", settings=settings, note=note)
    return OtherEngine(engine="SGLang", settings=None, note=f"SGLang has no {name}; {_ALTERNATIVE}")
