"""What a benchmark is asked to do, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import OutriderError

PEERS = ("transformers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Arguments of one benchmark; see the fields of the same names in `LLM` and `SamplingParams`."""

    target: str | None = None
    proposer: str | None = None
    k: int = 4
    verifier: str | None = None
    prompts: str | None = None  # a file of JSON lines; None is the embedded set
    limit: int | None = None  # prompts of each category
    rounds: int = 3  # how often each prompt is measured in each way
    batch: int = 1  # rows at once
    peer: str | None = None
    temperature: float = 0.0
    max_tokens: int = 128
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        for name, value in {"rounds": self.rounds, "batch": self.batch, "limit": self.limit, "k": self.k}.items():
            if value is not None and value < 1:
                raise OutriderError(f"{name} is {value}; use at least 1")
        if self.max_tokens < 2:
            raise OutriderError(f"max_tokens is {self.max_tokens}; speed needs a first and a last token, so at least 2")
        if self.peer is not None and self.peer not in PEERS:
            raise OutriderError(f"peer {self.peer!r} is unknown; use {', '.join(PEERS)}")
        if self.peer and self.batch > 1:
            raise OutriderError(f"batch is {self.batch}; the peer is measured one row at a time, so use batch 1")
