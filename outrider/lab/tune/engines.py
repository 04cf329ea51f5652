"""Translates a recommendation into settings of vLLM, SGLang and llama.cpp, or explains why it has none.

The names are those of vLLM 0.33 (`--speculative-config`), SGLang 0.5.23 (`--speculative-*`) and llama.cpp of October
2026 (`--spec-*`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from types import MappingProxyType
from typing import Any

from outrider.drafting.propose.registry import Expression, parse
from outrider.errors import OutriderError
from outrider.models.heads.description import HeadDescription, Kind
from outrider.models.heads.files import read_config
from outrider.models.heads.formats.registry import find
from outrider.models.heads.store import KEY, import_head
from outrider.models.loader.embedded import model_folder

_MAX_BATCH = 512  # largest batch in vLLM's table of k by batch size
_DRAFT_MODELS = ("draft", "draft-tokens")
_GREEDY = "on a CPU it verifies greedily at any temperature, which changes the output of sampling"
_ALTERNATIVE = "use the best of draft, ngram and suffix from the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEngineSettings:
    """The settings of a recommendation in another engine."""

    engine: str  # its title
    settings: str | None  # None: the engine does not support it
    note: str  # what differs in this engine, or why it has no settings


def other_engines(proposer: str, k: int, *, stops: int | None) -> tuple[OtherEngineSettings, ...]:
    """Return the settings of vLLM, SGLang and llama.cpp for a proposer.

    Args:
        proposer: an expression; "none" is plain decoding.
        k: draft tokens per round.
        stops: the batch from which speculation does not pay; None: unknown.
    """
    expression = parse(proposer)
    if expression.name == "none":
        note = "plain decoding: give no speculative settings"
        return tuple(
            OtherEngineSettings(engine=name, settings=None, note=note) for name in ("vLLM", "SGLang", "llama.cpp")
        )
    kind = head_kind(expression.argument) if expression.name == "draft" else None
    if kind is not None:
        block = block_tokens(expression.argument) if kind in _BLOCKS else None
        return tuple(_head(engine, kind, expression.argument, k, block) for engine in _HEADS)
    return _vllm(expression, k, stops), _sglang(expression, k), _llamacpp(expression, k)


def head_kind(folder: str) -> Kind | None:
    """Return the kind of the draft head of a folder, or None if it holds a whole model or nothing that can be read."""
    try:
        path = model_folder(folder)
        config = read_config(path)
        if KEY in config:
            return HeadDescription.from_json(config[KEY]).kind
        found = find(path)
    except OutriderError:
        return None
    if found is None or found.whole():
        return None
    return _KINDS.get(found.format.name.partition("-")[0])


def block_tokens(folder: str) -> int:
    """Return the draft tokens of the whole block of a draft head; 0: the head cannot be read without its target."""
    try:
        block = import_head(model_folder(folder)).description.block
    except OutriderError:
        return 0
    return block.draft_tokens if block else 0


_BLOCKS = (Kind.DFLASH, Kind.DFLASH2, Kind.DSPARK)  # heads that other engines run with a block of k tokens
_KINDS: Mapping[str, Kind] = MappingProxyType({kind.value: kind for kind in Kind})

# For each engine: its name in `outrider export --for`, and its names of the kinds of draft heads that it runs.
_HEADS: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "vLLM": (
            "vllm",
            {"eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"},
        ),
        "SGLang": (
            "sglang",
            {"eagle": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH", "dflash2": "DFLASH", "dspark": "DSPARK"},
        ),
        "llama.cpp": ("llama.cpp", {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "dspark": "draft-dspark"}),
    }
)


def _block_note(engine: str, kind: Kind, block: int) -> str:
    """Return why the k of another engine is that of the whole block; 0: its size is unknown."""
    k = f"k is {block} there, the" if block else "give it the k of the"
    refuses = (engine, kind) == ("SGLang", Kind.DSPARK)
    smaller = "does not start" if refuses else "computes a shorter block and accepts less"
    return f"; {k} whole block that the head was trained with: with a smaller k, {engine} {smaller}"


def _head(engine: str, kind: Kind, folder: str, k: int, block: int | None) -> OtherEngineSettings:
    """Return the settings of a draft head.

    Args:
        engine: its title, a key of `_HEADS`.
        k: draft tokens per round here.
        block: draft tokens of the whole block that the head was trained with; 0: unknown; None: it fills in no block.
            Outrider computes the whole block and verifies k of its tokens. Other engines compute only k columns, which
            changes the attention inside the block, so they get the full block size.
    """
    name, methods = _HEADS[engine]
    if kind not in methods:
        removed = "; 0.33 has removed Medusa" if (engine, kind) == ("vLLM", Kind.MEDUSA) else ""
        return OtherEngineSettings(
            engine=engine, settings=None, note=f"{engine} runs no separate {kind} heads{removed}; {_ALTERNATIVE}"
        )
    k = block or k
    note = f"outrider export {quote(folder)} --for {name} --k {k} --out DIR writes the head and the whole command"
    if block is not None:
        note += _block_note(engine, kind, block)
    if engine == "vLLM":
        config = {"method": methods[kind], "model": "DIR/draft", "num_speculative_tokens": k}
        return OtherEngineSettings(engine=engine, settings=f"--speculative-config '{json.dumps(config)}'", note=note)
    if engine == "SGLang":
        settings = (
            f"--speculative-algorithm {methods[kind]} --speculative-draft-model-path DIR/draft"
            f" --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        )
        return OtherEngineSettings(engine=engine, settings=settings, note=f"{note}; {_GREEDY}")
    return OtherEngineSettings(
        engine=engine, settings=f"-md DRAFT.gguf --spec-type {methods[kind]} --spec-draft-n-max {k}", note=note
    )


def _unsupported(engine: str, name: str) -> OtherEngineSettings:
    """Return the answer for a proposer that an engine does not have."""
    return OtherEngineSettings(engine=engine, settings=None, note=f"{engine} has no {name}; {_ALTERNATIVE}")


def _llamacpp(expression: Expression, k: int) -> OtherEngineSettings:
    name = expression.name
    note = "it accepts a draft token if it samples the same one, so it accepts less than here at temperature above 0"
    if name == "draft":
        return OtherEngineSettings(
            engine="llama.cpp",
            settings=f"-md DRAFT.gguf --spec-type draft-simple --spec-draft-n-max {k}",
            note=f"{note}; outrider export --for llama.cpp writes the GGUF file",
        )
    if name in ("ngram", "suffix"):
        return OtherEngineSettings(
            engine="llama.cpp",
            settings=f"--spec-type ngram-mod --spec-draft-n-max {k}",
            note="it searches a pool of n-grams of all requests",
        )
    return _unsupported("llama.cpp", name)


def _vllm(expression: Expression, k: int, stops: int | None) -> OtherEngineSettings:
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
        notes.append(
            "it needs the package arctic-inference; outrider export suffix --for vllm writes one that does not"
        )
        if not expression.argument:
            config["suffix_decoding_max_cached_requests"] = 0
        notes.append("it drafts one chain")
    else:
        return _unsupported("vLLM", name)
    if stops is not None and stops > 1:
        k_by_batch = [[1, stops - 1, k], [stops, max(_MAX_BATCH, stops), 0]]
        notes.append(
            "to stop drafting at large batches, add num_speculative_tokens_per_batch_size"
            f" {json.dumps(k_by_batch)}, which its documentation calls tested with EAGLE and DFlash"
        )
    return OtherEngineSettings(
        engine="vLLM", settings=f"--speculative-config '{json.dumps(config)}'", note="; ".join(notes)
    )


def _sglang(expression: Expression, k: int) -> OtherEngineSettings:
    name = expression.name
    if name == "draft":
        settings = (
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path {expression.argument}"
            f" --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        )
        note = f"one chain; both models need the same vocabulary; no option stops drafting at large batches; {_GREEDY}"
        return OtherEngineSettings(engine="SGLang", settings=settings, note=note)
    if name in ("ngram", "suffix"):
        settings = f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {k + 1}"
        note = (
            "its NGRAM searches a tree of all requests, so it finds more than ngram and remembers outputs like"
            f" suffix:TOKENS; {_GREEDY}"
        )
        return OtherEngineSettings(engine="SGLang", settings=settings, note=note)
    return _unsupported("SGLang", name)
