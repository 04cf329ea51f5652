"""The same settings for other engines, or why they have none.

Names are those of the engines' own documents: `--speculative-config` of vLLM, `--speculative-*` of SGLang.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.propose.registry import Expression, parse

_WIDEST = 512  # rows: the last batch of vLLM's table, whose k is 0
_DRAFTS = ("draft", "draft-tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEngine:
    """What to give another engine."""

    engine: str
    settings: str | None  # None: it cannot do this
    note: str  # what differs there, or why it cannot


def other_engines(proposer: str, k: int, *, stops: int | None) -> tuple[OtherEngine, ...]:
    """vLLM's and SGLang's settings for a proposer.

    Args:
        proposer: an expression; none is plain decoding.
        k: guesses a round.
        stops: the batch from which nothing pays; None where that is not known.
    """
    expression = parse(proposer)
    if expression.name == "none":
        note = "plain decoding: give no speculative settings"
        return tuple(OtherEngine(engine=name, settings=None, note=note) for name in ("vLLM", "SGLang"))
    return _vllm(expression, k, stops), _sglang(expression, k)


def _vllm(expression: Expression, k: int, stops: int | None) -> OtherEngine:
    name, config, notes = expression.name, dict[str, Any](), []
    if name in _DRAFTS:
        config = {"method": "draft_model", "model": expression.argument, "num_speculative_tokens": k}
        notes.append("guesses are drawn greedily there unless draft_sample_method is probabilistic")
        if name == "draft-tokens":
            config["use_heterogeneous_vocab"] = True
            notes[0] = "guesses are drawn greedily there, which another vocabulary demands"
        else:
            notes.append("a draft with another vocabulary needs use_heterogeneous_vocab as well")
    elif name == "ngram":
        least, _, most = (expression.argument or "1-5").partition("-")
        config = {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_min": int(least),
            "prompt_lookup_max": int(most),
        }
        notes.append("it guesses one chain, with no chances to trim it by")
    elif name == "suffix":
        config = {"method": "suffix", "num_speculative_tokens": k}
        if not expression.argument:
            config["suffix_decoding_max_cached_requests"] = 0
        notes.append("it guesses one chain")
    else:
        return OtherEngine(engine="vLLM", settings=None, note=f"vLLM has no {name}; {_INSTEAD}")
    if stops is not None and stops > 1:
        table = [[1, stops - 1, k], [stops, max(_WIDEST, stops), 0]]
        notes.append(
            f"to stop guessing in time, add num_speculative_tokens_per_batch_size {json.dumps(table)}, which is said to"
            " be tested with EAGLE and DFlash"
        )
    return OtherEngine(engine="vLLM", settings=f"--speculative-config '{json.dumps(config)}'", note="; ".join(notes))


def _sglang(expression: Expression, k: int) -> OtherEngine:
    name = expression.name
    if name == "draft":
        settings = (
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path {expression.argument}"
            f" --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        )
        note = "one chain; both models need the same vocabulary; there is no switch that stops guessing by batch"
        return OtherEngine(engine="SGLang", settings=settings, note=note)
    if name in ("ngram", "suffix"):
        settings = f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {k + 1}"
        note = (
            "its NGRAM looks in a tree that all requests fill, so it finds more than ngram and remembers as"
            " suffix:TOKENS does; CUDA alone"
        )
        return OtherEngine(engine="SGLang", settings=settings, note=note)
    return OtherEngine(engine="SGLang", settings=None, note=f"SGLang has no {name}; {_INSTEAD}")


_INSTEAD = "take the best of draft, ngram and suffix from the table"
