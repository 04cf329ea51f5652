"""The record of where a draft runs under tensor parallelism."""

from dataclasses import dataclass
from typing import Any

from outrider.core.config import REPLICATED, SHARDED


@dataclass(frozen=True, slots=True, kw_only=True)
class PassEstimate:
    """Estimated seconds of a pass of a draft model over one token."""

    replicated: float
    sharded: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlacement:
    """Where a draft runs, and why."""

    draft: str  # its folder
    name: str  # of the draft in reports: its name on the Hub, or its folder
    ranks: int  # of tensor parallelism
    sharded: bool  # each rank has a part of the draft; otherwise each has the whole draft
    reason: str
    estimate: PassEstimate | None = None  # None: the draft cannot be split

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        estimate = self.estimate
        return {
            "draft": self.name,
            "placement": SHARDED if self.sharded else REPLICATED,
            "ranks": self.ranks,
            "reason": self.reason,
            "replicated_ms": estimate and round(1e3 * estimate.replicated, 4),
            "sharded_ms": estimate and round(1e3 * estimate.sharded, 4),
        }

    def __str__(self) -> str:
        place = f"{SHARDED} over" if self.sharded else f"{REPLICATED} on"
        text = f"the draft {self.name} is {place} {self.ranks} ranks: {self.reason}"
        if self.estimate is None:
            return text
        times = f"{1e3 * self.estimate.replicated:.3g} ms replicated, {1e3 * self.estimate.sharded:.3g} ms sharded"
        return f"{text} (estimated per draft token: {times})"
