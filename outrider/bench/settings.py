"""What a benchmark is asked to do, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.params import AUTO, SamplingParams
from outrider.errors import OutriderError
from outrider.measure.number_lists import parse_whole
from outrider.plan.store import check_plan

PEERS = ("transformers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Values to measure one axis at a time, all else being as `Settings` has it; () leaves an axis alone."""

    k: tuple[int, ...] = ()  # guesses a round; 0 is plain decoding
    batch: tuple[int, ...] = ()  # rows at once
    context: tuple[int, ...] = ()  # tokens of prompt and completion together, which prompts are lengthened to fill
    temperature: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Arguments of one benchmark; see the fields of the same names in `LLM` and `SamplingParams`."""

    target: str | None = None
    proposer: str | None = None
    k: int | str = 4  # or auto
    verifier: str | None = None
    prompts: str | None = None  # a file of JSON lines; None is the embedded set
    limit: int | None = None  # prompts of each category
    repeats: int = 3  # how often each prompt is measured in each way
    batch: int = 1  # rows at once
    peer: str | None = None
    temperature: float = 0.0
    max_tokens: int = 128
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    quantize: str | None = None
    threads: int | None = None
    context: int | None = None
    plan: str | None = None
    sweep: Sweep = field(default_factory=Sweep)

    def __post_init__(self) -> None:
        if isinstance(self.k, str) and self.k != AUTO:
            raise OutriderError(f"k is {self.k!r}; use a number of guesses, or {AUTO}")
        check_plan(self.plan, k=self.k)
        k = None if isinstance(self.k, str) else self.k
        counts = {"repeats": self.repeats, "batch": self.batch, "limit": self.limit, "k": k}
        counts["batch of the sweep"] = min(self.sweep.batch, default=None)
        for name, value in counts.items():
            if value is not None and value < 1:
                raise OutriderError(f"{name} is {value}; use at least 1")
        if min(self.sweep.k, default=0) < 0:
            raise OutriderError(f"k of the sweep is {min(self.sweep.k)}; use at least 0, which is plain decoding")
        if self.max_tokens < 2:
            raise OutriderError(f"max_tokens is {self.max_tokens}; speed needs a first and a last token, so at least 2")
        if (least := min(self.sweep.context, default=None)) is not None and least <= self.max_tokens:
            raise OutriderError(
                f"context of the sweep is {least}, and max_tokens {self.max_tokens} leave no prompt; use a larger"
                " context or fewer max_tokens"
            )
        for temperature in (self.temperature, *self.sweep.temperature):
            SamplingParams(temperature=temperature)  # which raises
        if self.peer is not None and self.peer not in PEERS:
            raise OutriderError(f"peer {self.peer!r} is unknown; use {', '.join(PEERS)}")
        if self.peer and self.batch > 1:
            raise OutriderError(f"batch is {self.batch}; the peer is measured one row at a time, so use batch 1")

    @property
    def rows(self) -> int:
        """Rows that must run at once."""
        return max(self.batch, *self.sweep.batch, 1)

    @property
    def capacity(self) -> int | None:
        """Tokens that a row must hold; None is for the model to say."""
        return max((self.context or 0, *self.sweep.context)) or None


def parse_sweep(option: str, text: str) -> tuple[int, ...]:
    """The values of k in "k=0..12".

    Raises:
        OutriderError: the text is nothing of the kind.
    """
    axis, _, values = text.partition("=")
    if axis.strip() != "k":
        raise OutriderError(
            f"{option} {text!r} names no axis of its own; use for example {option} k=0..8. The axes batch, context and"
            " temperature take lists themselves: --batch 1,4"
        )
    return parse_whole(f"{option} k", values)
