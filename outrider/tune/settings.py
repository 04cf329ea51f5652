"""What `outrider tune` is asked to measure, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.core.config import weight_bits
from outrider.core.params import AUTO, SamplingParams
from outrider.engine.verifiers import find_verifier
from outrider.errors import OutriderError
from outrider.measure.number_lists import parse_whole
from outrider.propose.registry import default_proposer, parse

PHASES = ("first", "middle", "last")  # thirds of an output
_PLAIN = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Arguments of one measurement; see the fields of the same names in `LLM` and `SamplingParams`."""

    target: str | None = None
    proposers: tuple[str, ...]
    ks: tuple[int | str, ...] = (2, 4, 8, AUTO)
    batches: tuple[int, ...] = (1, 8, 32)  # rows at once; the advice is for the first
    temperatures: tuple[float, ...] = (0.0,)  # the advice is for the first
    verifier: str | None = None
    prompts: str | None = None  # a file of JSON lines; None is the embedded set
    limit: int | None = None  # prompts of each category
    repeats: int = 3  # how often each prompt is measured in each way
    max_tokens: int = 128
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    quantize: str | None = None
    threads: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name, values in {"proposers": self.proposers, "k": self.ks, "batch": self.batches}.items():
            if not values:
                raise OutriderError(f"{name} names nothing to measure; give at least one")
        whole = [k for k in self.ks if not isinstance(k, str)]
        least = {
            "k": min(whole, default=None),
            "batch": min(self.batches),
            "repeats": self.repeats,
            "limit": self.limit,
        }
        for name, value in least.items():
            if value is not None and value < 1:
                raise OutriderError(f"{name} is {value}; use at least 1")
        if self.max_tokens < len(PHASES):
            raise OutriderError(
                f"max_tokens is {self.max_tokens}; an output is looked at in thirds, so use at least {len(PHASES)}"
            )
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # which raises
        for proposer in self.proposers:
            find_verifier(self.verifier, proposer)
            if _PLAIN in parse(proposer).names():
                raise OutriderError(f"proposer {proposer!r} guesses nothing; plain decoding is always measured as well")
        weight_bits(self.quantize)

    @property
    def rows(self) -> int:
        """Rows that must run at once."""
        return max(self.batches)


def read_proposers(text: str | None, target: str | Path | None) -> tuple[str, ...]:
    """The expressions of "ngram;merge(ngram,recycle)"; what stands in double quotes may hold semicolons."""
    if text is None:
        return tuple(dict.fromkeys(("ngram", "suffix", default_proposer(target))))
    parts, quoted = [""], False
    for letter in text:
        quoted ^= letter == '"'
        if letter == ";" and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def read_ks(text: str) -> tuple[int | str, ...]:
    """The values of "2,4,8,auto".

    Raises:
        OutriderError: the text is nothing of the kind.
    """
    parts = [part.strip() for part in text.split(",")]
    whole = ",".join(part for part in parts if part != AUTO)
    try:
        ks: tuple[int | str, ...] = parse_whole("--k", whole) if whole else ()
    except OutriderError:
        raise OutriderError(f"--k is {text!r}; use numbers of guesses and {AUTO}, such as 2,4,8,{AUTO}") from None
    return (*ks, AUTO) if AUTO in parts else ks
