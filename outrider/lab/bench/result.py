"""The results of a benchmark."""

from dataclasses import asdict, dataclass
from typing import Any

from outrider.core.bound import Bound
from outrider.core.placement import DraftPlacement
from outrider.lab.bench import figures, limits
from outrider.lab.bench.rates import Rates
from outrider.lab.bench.settings import Settings
from outrider.lab.bench.sweep import Entry, Measured
from outrider.lab.common.memory import MemoryUse
from outrider.models.loader.embedded import model_name
from outrider.models.torch.checkpoint import Precision
from outrider.runtime import machine
from outrider.runtime.report.console import count_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a benchmark measured, and where."""

    settings: Settings
    proposer: str
    verifier: str
    exact: bool
    bound: Bound | None
    kernels: str
    placements: tuple[DraftPlacement, ...]
    compile_seconds: float  # of the native kernels; 0: none run, or an earlier run has compiled them
    precision: Precision
    hardware: dict[str, Any]
    before: Rates
    after: Rates
    roofline: limits.Roofline
    memory: MemoryUse
    measured: Measured  # at the first value of every axis
    sweeps: dict[str, list[Entry]]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "benchmark": "outrider bench",
            "arguments": self.settings.arguments(),
            "proposer": self.proposer,
            "verifier": self.verifier,
            "exact": self.exact,
            "bound": self.bound and self.bound.as_dict(),
            "kernels": self.kernels,
            "draft_placements": [placement.as_dict() for placement in self.placements],
            "compile_seconds": self.compile_seconds,
            **self.precision.as_dict(),
            "hardware": self.hardware,
            "versions": machine.versions(),
            "commit": machine.commit(),
            "rates": {"before": self.before.as_dict(), "after": self.after.as_dict()},
            "limits": asdict(self.roofline) | asdict(self.measured.limits),
            "memory": self.memory.as_dict(),
            "results": {name: each.as_dict() for name, each in self.measured.by_category.items()},
            "sweeps": {axis: list(map(Entry.as_dict, entries)) for axis, entries in self.sweeps.items()},
            "definitions": {**figures.DEFINITIONS, **limits.DEFINITIONS},
        }

    def summary(self) -> str:
        """Return one line that says what was measured, and where."""
        hardware, settings = self.hardware, self.settings
        device = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} of {hardware['cores']} cores"
        sampling = f"temperature {settings.temperature:g}" if settings.temperature else "greedy"
        target = model_name(settings.engine.target) if settings.engine.target else "the embedded target"
        bound = f", {self.bound}" if self.bound else ""
        exact = "exact" if self.exact else f"not exact{bound}"
        return (
            f"{target} with {self.proposer}, k {settings.engine.k}, verifier {self.verifier} ({exact});"
            f" {sampling}, {self.precision}, {self.kernels} kernels, {settings.batch} at once,"
            f" {count_text(settings.repeats, 'repeat')} on {device}"
        )
