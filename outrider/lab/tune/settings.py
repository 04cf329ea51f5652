"""Settings of `outrider tune`, checked before any model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.config import draft_weight_bits, weight_bits
from outrider.core.params import AUTO, SamplingParams, check_draft_length
from outrider.drafting.propose.registry import check_draft_settings, has_draft, parse
from outrider.engine.default_proposer import default_proposer
from outrider.engine.verifiers import find_verifier
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_whole

PHASES = ("first", "middle", "last")  # thirds of an output
_PLAIN = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Arguments of one measurement. `LLM` and `SamplingParams` document the fields of the same names."""

    target: str | None = None
    proposers: tuple[str, ...]
    ks: tuple[int | str, ...] = (2, 4, 8, AUTO)
    batches: tuple[int, ...] = (1, 8, 32)  # sequences at once; the recommendation is for the first
    temperatures: tuple[float, ...] = (0.0,)  # the recommendation is for the first
    verifier: str | None = None
    prompts: str | None = None  # JSON Lines file; None: the embedded set
    limit: int | None = None  # prompts per category
    repeats: int = 3  # measurements of each prompt with each variant
    max_tokens: int = 128
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    quantize: str | None = None
    threads: int | None = None
    max_model_len: int | None = None
    draft_window: int | None = None  # of the proposers that have a draft model or a draft head
    draft_quantize: str | None = None  # of the same ones
    # By proposer: what to compare in place of `draft_quantize`. None is the weights as stored.
    draft_quantizes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in {"proposers": self.proposers, "k": self.ks, "batch": self.batches}.items():
            if not values:
                raise OutriderError(f"{name} names nothing to measure; give at least one")
        for k in self.ks:
            check_draft_length(k, least=1, or_auto=True)
        smallest = {
            "batch": min(self.batches),
            "repeats": self.repeats,
            "limit": self.limit,
            "draft_window": self.draft_window,
        }
        for name, value in smallest.items():
            if value is not None and value < 1:
                raise OutriderError(f"{name} is {value}; use at least 1")
        if self.max_tokens < len(PHASES):
            raise OutriderError(
                f"max_tokens is {self.max_tokens}; outputs are divided into thirds, so use at least {len(PHASES)}"
            )
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises if it is out of range
        for proposer in self.proposers:
            find_verifier(self.verifier, proposer)
            if _PLAIN in parse(proposer).names():
                raise OutriderError(
                    f"proposer {proposer!r} drafts no tokens, and plain decoding is always measured as well; leave"
                    f" {_PLAIN} out"
                )
        weight_bits(self.quantize)
        draft_weight_bits(self.draft_quantize, kernels=self.kernels, device=self.device)
        check_draft_settings(*self.proposers, window=self.draft_window, quantize=self.draft_quantize)

    def draft_settings(self, proposer: str, draft_quantize: str | None = None) -> dict[str, Any]:
        """Return `draft_window` and `draft_quantize` for a proposer; None if it has no draft model or draft head.

        A `draft_quantize` that is given takes precedence over that of the settings.
        """
        drafts = has_draft(proposer)
        return {
            "draft_window": self.draft_window if drafts else None,
            "draft_quantize": (draft_quantize or self.draft_quantize) if drafts else None,
        }

    @property
    def max_num_seqs(self) -> int:
        """Sequences at once in the largest batch."""
        return max(self.batches)


def default_proposers(target: str | Path | None, *, device: str, kernels: str, quantize: str | None) -> tuple[str, ...]:
    """Return the expressions to measure if the user gives none. The arguments are those of `EngineConfig`."""
    default = default_proposer(target, device=device, kernels=kernels, quantize=quantize)
    return tuple(dict.fromkeys(("ngram", "suffix", default)))


def read_proposers(text: str) -> tuple[str, ...]:
    """Return the expressions of a list such as "ngram;merge(ngram,recycle)".

    A semicolon in double quotes does not separate.
    """
    parts = [""]
    quoted = False
    for char in text:
        quoted ^= char == '"'
        if char == ";" and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def read_ks(text: str) -> tuple[int | str, ...]:
    """Return the values of "2,4,8,auto". auto comes last.

    Raises:
        OutriderError: `text` does not have this form.
    """
    parts = [part.strip() for part in text.split(",")]
    numbers = ",".join(part for part in parts if part != AUTO)
    try:
        ks: tuple[int | str, ...] = parse_whole("--k", numbers) if numbers else ()
    except OutriderError:
        raise OutriderError(f"--k is {text!r}; use numbers of draft tokens and {AUTO}, such as 2,4,8,{AUTO}") from None
    return (*ks, AUTO) if AUTO in parts else ks
