"""The configuration of an engine: one record that Python, the command line, config files and the server share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeGuard

from outrider.core.option import LIMITS, MODEL, Option
from outrider.core.params import AUTO, check_draft_length, is_whole, parse_draft_length
from outrider.errors import OutriderError, either

REPLICATED, SHARDED = "replicated", "sharded"  # placements of a draft on several ranks
PLACEMENTS = (AUTO, REPLICATED, SHARDED)
QUANTIZE_BITS = {"int8": 8, "int4": 4}
KV_DTYPES = (AUTO, "int8")
FULL_BITS = 16
ONCE, ALWAYS, NEVER = "once", "always", "never"  # when the logits of a model are checked at load
# Fields of `EngineConfig` that are options of commands. All commands that load a target have the first ones.
TARGET_OPTIONS = ("target", "dtype", "device", "kernels", "check", "quantize", "kv_dtype", "threads")
DRAFT_OPTIONS = ("draft_window", "draft_quantize", "draft_candidates")
NO_DRAFT: Mapping[str, Any] = MappingProxyType(dict.fromkeys(DRAFT_OPTIONS))  # for an engine without a draft
ENGINE_OPTIONS = (*TARGET_OPTIONS, *DRAFT_OPTIONS, "proposer", "k", "verifier", "plan", "tp", "draft_placement")
LIMIT_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "max_round_ms", "cache_gb", "prefix_caching")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to load and how to run it. All values are checked when the record is made."""

    target: Annotated[str | Path | None, Option("DIR", MODEL)] = None
    """Folder of a language model, a GGUF file, or a model of the Hugging Face Hub: org/name, org/name@revision or
    org/name:Q4_K_M. Default: @mini, an embedded model."""
    proposer: Annotated[str | Callable[..., Any] | None, Option("NAME", MODEL)] = None
    """How to draft tokens. Without a model: none, ngram[:MIN-MAX], suffix[:TOKENS], recycle, lookahead[:WxNxG],
    group[:TOKENS], retrieval:DIR[:MIN], replay:FILE. A draft model or a trained head: draft:DIR, tree:DIR,
    cascade:DIR; with another vocabulary: draft-tokens:DIR, draft-text:DIR. The target itself: mtp,
    quantized:int4, exit:LAYERS, skip:A+B. Your own: pkg.module:Class, or in Python a callable that
    takes a setup and returns a proposer. Combinations: best(A,B), merge(A,B), first(A,B),
    switch(A,B). See docs/how-to/choose-a-proposer.md. DIR may also be a model of the Hugging Face
    Hub. Default: the embedded draft model for the embedded target; for any other, the first of
    best(suffix:100000,mtp), best(suffix:100000,quantized:int4) and suffix:100000 that fits."""
    k: Annotated[int | str, Option("N", MODEL, parse=parse_draft_length)] = AUTO
    """Draft tokens per round, up to 256. 0: plain decoding. auto: chosen in each round from measured costs, and 4 for a
    request with a seed whose text depends on the draft."""
    verifier: Annotated[str | None, Option("NAME", MODEL)] = None
    """walk, coupled, rejection, block, siblings or traversal; typical and lenient are not exact. Relaxed rules are not
    exact either, and declare a bound: lantern:delta=D, gsd:clusters=N, pcg:k=N, bins:distance=R and
    blend:share=S, with more options after commas, such as table=FILE. Default: block for chains of
    a draft model, traversal for its trees and for merges, walk for all other proposers."""
    dtype: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, float32, bfloat16 or float16."""
    device: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    kernels: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, native, triton, graphs or torch. auto: the fastest that support the model. The native kernels run on CPUs
    in bfloat16 and float32; the wheel has them, and elsewhere a C++ compiler builds them once per machine. The Triton
    kernels run Llama-like models on NVIDIA GPUs. graphs: torch with CUDA graphs."""
    check: Annotated[str, Option("NAME", MODEL)] = ONCE
    """once, always or never: when the logits of a model are compared with those of transformers at load. once: per
    checkpoint, version and machine."""
    quantize: Annotated[str | None, Option("NAME", MODEL)] = None
    """int8 or int4 weights for the target, on a CPU, or with the Triton kernels on a GPU. The quantized model is then
    the target, exactly. Default: the weights as stored."""
    kv_dtype: Annotated[str, Option("NAME", MODEL)] = AUTO
    """auto or int8: the keys and values in the KV cache, on the native kernels of a CPU. int8 takes half the memory of
    bfloat16. The model with that cache is then the target, exactly. Draft models use it as well. auto: as the model."""
    threads: Annotated[int | None, Option(panel=MODEL)] = None
    """CPU threads. Default: OMP_NUM_THREADS, or else the physical cores of one NUMA node."""
    draft_window: Annotated[int | None, Option("TOKENS", MODEL)] = None
    """Context window of the draft model or draft head, in tokens, draft tokens included. Default: its own maximum."""
    draft_quantize: Annotated[str | None, Option("NAME", MODEL)] = None
    """int8 or int4 weights for a draft model or draft head, LM head included, on the native kernels of a CPU. The
    output does not change. Default: the weights as stored."""
    draft_candidates: Annotated[int | None, Option("N", MODEL)] = None
    """Let factors of the LM head of a draft model or of quantized:int4 rank the vocabulary in panels of 32 tokens, and
    compute exact logits for the N best panels, such as 64. On the native kernels of a CPU. The output does not change.
    Default: 256 for quantized:int4 of a small model with a large vocabulary, otherwise all."""
    plan: Annotated[str | Path | None, Option("FILE", MODEL)] = None
    """With k auto: load what the planner has learned from this file, if there is one, and save it at the end."""
    tp: Annotated[int, Option("N", MODEL, min=1)] = 1
    """Split the target over N processes that torchrun has started, one for each GPU: torchrun --nproc-per-node N -m
    outrider ..."""
    draft_placement: Annotated[str, Option("NAME", MODEL)] = AUTO
    """With tp above 1: replicated (each rank runs the whole draft model), sharded (it is split, too), or auto (the
    faster one, by measured costs)."""
    max_model_len: Annotated[int | None, Option(panel=MODEL)] = None
    """Tokens of prompt and completion together. Default: the limit of the model, at most 8192."""
    max_num_seqs: Annotated[int, Option(panel=LIMITS, min=1)] = 16
    """Sequences that run at once."""
    max_num_batched_tokens: Annotated[int, Option(panel=LIMITS, min=1)] = 512
    """Prompt tokens that one round may process."""
    max_round_ms: Annotated[float, Option(panel=LIMITS, min=0.0)] = 0.0
    """Milliseconds that a round may take while other sequences decode. Longer prompts are split over rounds. 0: no
    limit."""
    cache_gb: Annotated[float | None, Option("GB", LIMITS)] = None
    """Memory of the KV caches of target and draft models in 10^9 bytes, with the native kernels. Default: a full
    context for every sequence, as far as memory is free."""
    prefix_caching: Annotated[bool, Option(panel=LIMITS)] = True
    """Reuse the KV cache of common prompt prefixes. A server does so within the requests of one user."""
    speculative_config: Annotated[str | Mapping[str, Any] | None, Option("JSON", MODEL)] = None
    """Proposer and k in the form of vLLM, such as {"method": "eagle3", "model": DIR, "num_speculative_tokens": 3}, or
    with the names of SGLang's options. Other keys: prompt_lookup_max, prompt_lookup_min. Files and Python may give an
    object in place of its text."""
    isolate_faults: bool = False
    """An exception in a proposer costs its draft only. It is logged and counted, and decoding goes on. It has no effect
    with `tp` above 1, because all ranks must draft the same tokens."""

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            self._take_speculative_config(self.speculative_config)
        for name in ("dtype", "kernels", "device"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise OutriderError(f"{name} is {value!r}; use a name, such as auto")
        if self.check not in (ONCE, ALWAYS, NEVER):
            raise OutriderError(f"check is {self.check!r}; use {ONCE}, {ALWAYS} or {NEVER}")
        check_draft_length(self.k, or_auto=True)
        weight_bits(self.quantize)
        if self.kv_dtype not in KV_DTYPES:
            raise OutriderError(f"kv_dtype is {self.kv_dtype!r}; use {either(KV_DTYPES)}")
        draft_weight_bits(self.draft_quantize, kernels=self.kernels, device=self.device)
        _check_count("tp", self.tp)
        if self.draft_placement not in PLACEMENTS:
            raise OutriderError(f"draft_placement is {self.draft_placement!r}; use {either(PLACEMENTS)}")
        if self.tp > 1:
            self._check_tensor_parallel()
        elif self.draft_placement != AUTO:
            raise OutriderError(
                f"draft_placement is {self.draft_placement}, which needs several ranks, and tp is"
                " 1; leave it out, or set tp"
            )
        self._check_limits()
        for name in ("prefix_caching", "isolate_faults"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OutriderError(f"{name} is {value!r}; use True or False")
        if self.plan is not None and not isinstance(self.plan, str | Path):
            raise OutriderError(f"plan is {self.plan!r}; give the path of a file, or leave it out")
        if self.plan is not None and self.k != AUTO:
            raise OutriderError(f"plan {self.plan} needs k auto, and k is {self.k}; use k auto, or no plan")

    def _take_speculative_config(self, given: str | Mapping[str, Any]) -> None:
        """Set proposer and k by a configuration of another engine."""
        from outrider.core.speculative_config import read_speculative_config  # here, so that proposers import little

        proposer, k = read_speculative_config(given)
        if self.proposer is not None or self.k != AUTO:
            raise OutriderError("speculative_config and proposer or k both set the drafts; leave one of them out")
        object.__setattr__(self, "proposer", proposer)
        object.__setattr__(self, "k", AUTO if k is None else k)
        object.__setattr__(self, "speculative_config", None)  # so that a copy of the record is valid

    def _check_limits(self) -> None:
        _check_count("max_num_seqs", self.max_num_seqs)
        _check_count("max_num_batched_tokens", self.max_num_batched_tokens)
        for name in ("max_model_len", "draft_window", "draft_candidates"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.threads is not None and not is_whole(self.threads):
            raise OutriderError(f"threads is {self.threads!r}; use a whole number, or None for one on each core")
        if not _is_number(self.max_round_ms) or self.max_round_ms < 0:
            raise OutriderError(f"max_round_ms is {self.max_round_ms!r}; use a number above 0, or 0 for no limit")
        if self.cache_gb is not None and (not _is_number(self.cache_gb) or self.cache_gb <= 0):
            raise OutriderError(
                f"cache_gb is {self.cache_gb!r}; use a number above 0, or leave it out to use what memory allows"
            )

    @classmethod
    def from_options(cls, target: str | Path | None = None, **options: Any) -> EngineConfig:
        """Make a configuration from keywords.

        Raises:
            OutriderError: a keyword is unknown; the message names the one to use.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                from outrider.core.foreign_names import unknown_name  # here, so that proposers import little

                raise OutriderError(f"{name} is not an option of an engine; {unknown_name(name, known)}")
        return cls(target=target, **options)

    @property
    def bits(self) -> int:
        """Bits of a weight of the linear layers; 16 if they are not quantized."""
        return weight_bits(self.quantize)

    def _check_tensor_parallel(self) -> None:
        """Check that the other settings go with several ranks."""
        if self.kernels in ("native", "triton"):
            raise OutriderError(
                f"the {self.kernels} kernels run in one process, and tp is {self.tp}; use kernels auto or torch"
            )
        if self.quantize is not None:
            raise OutriderError(
                "weights that are quantized when they are loaded cannot be split over ranks, and tp"
                f" is {self.tp}; leave quantize out, or use tp 1"
            )


def weight_bits(quantize: str | None, *, option: str = "quantize") -> int:
    """Bits of a weight of the linear layers. `option` is the name of the setting, for messages.

    Raises:
        OutriderError: the name is unknown.
    """
    if quantize is None:
        return FULL_BITS
    if not isinstance(quantize, str) or quantize not in QUANTIZE_BITS:
        raise OutriderError(f"{option} {quantize!r} is unknown; use {either(QUANTIZE_BITS)}")
    return QUANTIZE_BITS[quantize]


def draft_weight_bits(draft_quantize: str | None, *, kernels: str, device: str) -> int:
    """Bits of a weight of a draft model or draft head, as `weight_bits`. The device may be auto.

    Raises:
        OutriderError: the name is unknown, or the kernels do not quantize.
    """
    bits = weight_bits(draft_quantize, option="draft_quantize")
    if bits < FULL_BITS and kernels == "torch":
        raise OutriderError(
            f"draft_quantize is {draft_quantize}, and kernels is torch; use kernels auto, or leave draft_quantize out"
        )
    if bits < FULL_BITS and device not in (AUTO, "cpu") and kernels not in (AUTO, "triton"):
        raise OutriderError(
            f"draft_quantize is {draft_quantize}, and kernels {kernels} does not quantize on {device};"
            " use kernels auto, or leave draft_quantize out"
        )
    return bits


def _check_count(name: str, value: object) -> None:
    if not is_whole(value) or value < 1:
        raise OutriderError(f"{name} is {value!r}; use a whole number of at least 1")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


# The default configuration of a server.
SERVER_ENGINE = EngineConfig(max_round_ms=60.0, isolate_faults=True)
