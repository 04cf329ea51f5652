"""The result of an audit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outrider.core.placement import DraftPlacement
from outrider.models.loader.check_store import CheckResult
from outrider.runtime import machine
from outrider.verify.rules import Verifier

if TYPE_CHECKING:
    from outrider.lab.audit.distribution import DistributionResult
    from outrider.lab.audit.flips import FlipResult
    from outrider.lab.audit.replay import ReplayResult


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The results of an audit, and the machine that it ran on."""

    rule: Verifier
    k: int
    placements: tuple[DraftPlacement, ...]
    load_check: CheckResult
    seed: int
    replay: ReplayResult
    distribution: DistributionResult
    flips: FlipResult
    hardware: dict[str, Any]
    target: str = ""
    proposer: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the verifier is exact and all tests passed."""
        return self.rule.exact and self.replay.passed and self.distribution.passed and self.flips.passed

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "passed": self.passed,
            "verifier": self.rule.name,
            "exact": self.rule.exact,
            "bound": self.rule.bound and self.rule.bound.as_dict(),
            "k": self.k,
            "draft_placements": [placement.as_dict() for placement in self.placements],
            "load_check": asdict(self.load_check),
            "seed": self.seed,
            "replay": asdict(self.replay),
            "distribution": asdict(self.distribution),
            "flips": self.flips.as_dict(),
            "versions": machine.versions(),
            "hardware": self.hardware,
            "commit": machine.commit(),
            "target": self.target,
            "seconds": self.seconds,
            "proposer": self.proposer,
        }
