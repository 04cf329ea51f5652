"""The configuration of an engine: one record that Python, the command line, config files and the server share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from outrider.core.params import AUTO, check_draft_length
from outrider.errors import OutriderError

REPLICATED, SHARDED = "replicated", "sharded"  # placements of a draft on several ranks
PLACEMENTS = (AUTO, REPLICATED, SHARDED)
QUANTIZE_BITS = {"int8": 8, "int4": 4}
FULL_BITS = 16
ONCE, ALWAYS, NEVER = "once", "always", "never"  # when the logits of a model are checked at load


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to load and how to run it. All values are checked when the record is made."""

    target: str | Path | None = None
    """Folder of a language model, a GGUF file, or a name on the Hugging Face Hub: "org/name", "org/name@revision" or
    "org/name:Q4_K_M". None: the embedded model."""
    proposer: str | Callable[..., Any] | None = None
    """An expression such as "ngram" or "draft:DIR", or a callable that takes a setup and returns a proposer.
    None: the embedded draft for the embedded target. For any other, the first of "best(suffix:100000,mtp)",
    "best(suffix:100000,quantized:int4)" and "ngram" that fits; see `outrider.engine.default_proposer`."""
    k: int | str = AUTO
    """Draft tokens per round, up to 256. 0: plain decoding. "auto": chosen in each round from measured costs, and 4 for
    a request with a seed whose text depends on the draft."""
    verifier: str | None = None
    """walk, coupled, rejection, block, siblings, traversal, typical or lenient, or a relaxed rule such as
    "lantern:delta=0.1,table=FILE". None: what fits the proposer."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    kernels: str = "auto"
    """native, torch or auto. auto: the native kernels on a CPU where they support the model, torch elsewhere."""
    check: str = ONCE
    """When the logits of target and draft models are compared with those of transformers at load: once (per checkpoint,
    version and machine), always or never."""
    quantize: str | None = None
    """int8 or int4 for the target's weights. The quantized model is then the target. None: the weights as stored."""
    threads: int | None = None
    """CPU threads. None: OMP_NUM_THREADS, or the physical cores of one NUMA node."""
    max_num_seqs: int = 16
    """Sequences that run at once."""
    max_model_len: int | None = None
    """Tokens of prompt and completion together. None: the model's own limit, at most 8192."""
    max_num_batched_tokens: int = 512
    """Prompt tokens that one round may process."""
    max_round_ms: float | None = None
    """Milliseconds that a round may take while sequences decode; longer prompts are split. None: no limit."""
    cache_gb: float | None = None
    """Memory of all KV caches in 10^9 bytes, with the native kernels. None: a full context for every sequence, as far
    as memory is free."""
    prefix_caching: bool = True
    """Reuse the KV cache of equal prompt prefixes."""
    draft_window: int | None = None
    """Context window of the draft model or draft head, in tokens, draft tokens included. None: its own maximum."""
    draft_quantize: str | None = None
    """int8 or int4 for the weights of a draft model or draft head on the native kernels, LM head included. The output
    stays the target's. None: the weights as stored."""
    plan: str | Path | None = None
    """With k="auto", a file of what the planner has learned. It is read if it exists."""
    tp: int = 1
    """Ranks of tensor parallelism. Start the program with torchrun and this number of processes, one for each GPU. Each
    process loads a part of the target. 1: one process."""
    draft_placement: str = AUTO
    """With `tp` above 1: replicated (each rank runs the whole draft model), sharded (it is split as the target is), or
    auto (the faster one, by measured costs)."""
    isolate_faults: bool = False
    """An exception in a proposer costs its draft only. It is logged and counted, and decoding goes on. It has no effect
    with `tp` above 1, because all ranks must draft the same tokens."""

    def __post_init__(self) -> None:
        for name in ("dtype", "kernels", "device"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise OutriderError(f"{name} is {value!r}; use a name, such as auto")
        if self.check not in (ONCE, ALWAYS, NEVER):
            raise OutriderError(f"check is {self.check!r}; use {ONCE}, {ALWAYS} or {NEVER}")
        check_draft_length(self.k, or_auto=True)
        weight_bits(self.quantize)
        draft_weight_bits(self.draft_quantize, kernels=self.kernels, device=self.device)
        _check_count("tp", self.tp)
        if self.draft_placement not in PLACEMENTS:
            raise OutriderError(f"draft_placement is {self.draft_placement!r}; use {', '.join(PLACEMENTS)}")
        if self.tp > 1:
            self._check_tensor_parallel()
        elif self.draft_placement != AUTO:
            raise OutriderError(
                f"draft_placement is {self.draft_placement}, which needs several ranks, and tp is 1; leave it out, or"
                " set tp"
            )
        _check_count("max_num_seqs", self.max_num_seqs)
        _check_count("max_num_batched_tokens", self.max_num_batched_tokens)
        for name in ("max_model_len", "draft_window"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.threads is not None and not _is_whole(self.threads):
            raise OutriderError(f"threads is {self.threads!r}; use a whole number, or None for one on each core")
        _check_positive("max_round_ms", self.max_round_ms, "leave it out for no limit")
        _check_positive("cache_gb", self.cache_gb, "leave it out to use what memory allows")
        for name in ("prefix_caching", "isolate_faults"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OutriderError(f"{name} is {value!r}; use True or False")
        if self.plan is not None and not isinstance(self.plan, str | Path):
            raise OutriderError(f"plan is {self.plan!r}; give the path of a file, or leave it out")
        if self.plan is not None and self.k != AUTO:
            raise OutriderError(f"plan {self.plan} needs k auto, and k is {self.k}; use k auto, or no plan")

    @classmethod
    def from_options(cls, target: str | Path | None = None, **options: Any) -> EngineConfig:
        """Make a configuration from keywords.

        Raises:
            OutriderError: a keyword is unknown; the message names the closest one.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"use {', '.join(known)}"
                raise OutriderError(f"{name} is no option of an engine; {hint}")
        return cls(target=target, **options)

    @property
    def bits(self) -> int:
        """Bits of a weight of the linear layers; 16 if they are not quantized."""
        return weight_bits(self.quantize)

    def _check_tensor_parallel(self) -> None:
        """Check that the other settings go with several ranks."""
        if self.kernels == "native":
            raise OutriderError(
                f"the native kernels run in one process, and tp is {self.tp}; use kernels auto or torch"
            )
        if self.quantize is not None:
            raise OutriderError(
                f"weights that are quantized when they are loaded cannot be split over ranks, and tp is {self.tp};"
                " leave quantize out, or use tp 1"
            )


def weight_bits(quantize: str | None, *, option: str = "quantize") -> int:
    """Bits of a weight of the linear layers. `option` is the name of the setting, for messages.

    Raises:
        OutriderError: the name is unknown.
    """
    if quantize is None:
        return FULL_BITS
    if not isinstance(quantize, str) or quantize not in QUANTIZE_BITS:
        raise OutriderError(f"{option} {quantize!r} is unknown; use {', '.join(QUANTIZE_BITS)}")
    return QUANTIZE_BITS[quantize]


def draft_weight_bits(draft_quantize: str | None, *, kernels: str, device: str) -> int:
    """Bits of a weight of a draft model or draft head, as `weight_bits`. The device may be auto.

    Raises:
        OutriderError: the name is unknown, or the draft does not run on the native kernels.
    """
    bits = weight_bits(draft_quantize, option="draft_quantize")
    if bits < FULL_BITS and kernels == "torch":
        raise OutriderError(
            f"draft_quantize is {draft_quantize}, and kernels is torch; use kernels auto, or leave draft_quantize out"
        )
    if bits < FULL_BITS and device not in (AUTO, "cpu"):
        raise OutriderError(
            f"draft_quantize is {draft_quantize}, and the native kernels do not run on {device}; use device cpu, or"
            " leave draft_quantize out"
        )
    return bits


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(name: str, value: object) -> None:
    if not _is_whole(value) or value < 1:
        raise OutriderError(f"{name} is {value!r}; it must be a whole number, at least 1")


def _check_positive(name: str, value: object, otherwise: str) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise OutriderError(f"{name} is {value!r}; use a number above 0, or {otherwise}")
