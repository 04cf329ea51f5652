"""Settings of a benchmark, checked before any model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.config import ONCE
from outrider.core.params import AUTO, SamplingParams, check_draft_length
from outrider.drafting.plan.store import check_plan
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_whole

PEERS = ("transformers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The values of each swept axis. One axis varies at a time; () means that an axis is not swept."""

    k: tuple[int, ...] = ()  # draft tokens per round; 0 is plain decoding
    batch: tuple[int, ...] = ()  # sequences at once
    context: tuple[int, ...] = ()  # tokens of prompt and completion together; prompts are lengthened to fill it
    temperature: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Arguments of one benchmark. `LLM` and `SamplingParams` document the fields of the same names."""

    target: str | None = None
    proposer: str | None = None
    k: int | str = 4  # or auto
    verifier: str | None = None
    prompts: str | None = None  # JSON Lines file; None: the embedded set
    limit: int | None = None  # prompts per category
    repeats: int = 3  # measurements of each prompt with each variant
    batch: int = 1  # sequences at once
    peer: str | None = None
    temperature: float = 0.0
    max_tokens: int = 128
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    check: str = ONCE
    quantize: str | None = None
    threads: int | None = None
    draft_window: int | None = None
    draft_quantize: str | None = None
    context: int | None = None
    plan: str | None = None
    tp: int = 1  # ranks of tensor parallelism
    draft_placement: str = AUTO
    sweep: Sweep = field(default_factory=Sweep)

    def __post_init__(self) -> None:
        check_draft_length(self.k, least=1, or_auto=True)
        check_plan(self.plan, k=self.k)
        if self.tp > 1 and self.peer is not None:
            raise OutriderError(f"--peer {self.peer} runs in one process, and --tp is {self.tp}; leave one of them out")
        counts = {"repeats": self.repeats, "batch": self.batch, "limit": self.limit}
        counts["batch of the sweep"] = min(self.sweep.batch, default=None)
        for name, value in counts.items():
            if value is not None and value < 1:
                raise OutriderError(f"{name} is {value}; use at least 1")
        for k in self.sweep.k:
            check_draft_length(k)
        if self.max_tokens < 2:
            raise OutriderError(
                f"max_tokens is {self.max_tokens}; a speed needs a first and a last token, so use at least 2"
            )
        shortest = min(self.sweep.context, default=None)
        if shortest is not None and shortest <= self.max_tokens:
            raise OutriderError(
                f"context of the sweep is {shortest} and max_tokens is {self.max_tokens}, which leaves no tokens for a"
                " prompt; use a larger context or fewer max_tokens"
            )
        for temperature in (self.temperature, *self.sweep.temperature):
            SamplingParams(temperature=temperature)  # raises if it is out of range
        if self.peer is not None and self.peer not in PEERS:
            raise OutriderError(f"peer {self.peer!r} is unknown; use {', '.join(PEERS)}")
        if self.peer and self.batch > 1:
            raise OutriderError(f"batch is {self.batch}; the peer runs one sequence at a time, so use batch 1")

    @property
    def max_num_seqs(self) -> int:
        """Sequences at once in the largest batch."""
        return max(self.batch, *self.sweep.batch, 1)

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence; None: the maximum of the model."""
        return max((self.context or 0, *self.sweep.context)) or None


def parse_sweep(option: str, text: str) -> tuple[int, ...]:
    """Return the values of k in "k=0..12".

    Raises:
        OutriderError: `text` does not have this form.
    """
    axis, _, values = text.partition("=")
    if axis.strip() != "k":
        raise OutriderError(
            f"{option} {text!r} does not sweep k; use for example {option} k=0..8. To sweep batch, context or"
            " temperature, give a list to its own option: --batch 1,4"
        )
    return parse_whole(f"{option} k", values)
