"""The result of the audit of a server."""

from dataclasses import asdict, dataclass
from typing import Any

from outrider.lab.audit.server.client import Abilities
from outrider.lab.audit.server.diagnosis import Diagnosis
from outrider.lab.audit.server.distribution import SamplingTest
from outrider.lab.audit.server.replay import ReplayResult
from outrider.lab.audit.server.settings import ServerOptions
from outrider.lab.audit.settings import Settings
from outrider.lab.client.server import retries_text
from outrider.runtime import machine

_FEW_DIFFERENCES = 0.02  # share of real differences up to which the sampling tests still say something


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionResult:
    """The result of the sampling tests, as in the JSON document."""

    passed: bool
    significance: float  # smallest p-value that passes
    tests: list[SamplingTest]
    skipped: list[str]  # tests in which rounding decides what a filter keeps
    refused: dict[str, str]  # by test: why the server refuses its requests
    power: dict[str, float]  # by known defect: probability that the tests find it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling tests, and why they fail."""

    distribution: DistributionResult
    diagnosis: Diagnosis | None  # None: they passed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAuditResult:
    """The results of the audit of a server."""

    settings: Settings
    options: ServerOptions
    model: str  # its name at the server
    abilities: Abilities
    dtype: str  # of the server's numbers
    rounding: float  # standard deviation of the server's logits
    replay: ReplayResult
    sampling: Sampling
    retries: int
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.replay.passed and self.sampling.distribution.passed

    @property
    def target(self) -> str:
        """The model with which the server is compared."""
        return str(self.settings.engine.target or "the embedded model")

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        engine = self.settings.engine
        return {
            "passed": self.passed,
            "model": self.model,
            "asked": {
                "route": "chat/completions" if self.abilities.chat else "completions",
                "prompt": "token ids" if self.abilities.prompt_ids else "text",
                "returned": "token ids" if self.abilities.token_ids else "text",
                "filters_off": self.abilities.neutral,
            },
            "dtype": self.dtype,
            "rounding_logits": self.rounding,
            "replay": asdict(self.replay),
            **asdict(self.sampling),
            "retries": self.retries,
            "notes": notes(self),
            "server": self.options.server,
            "target": self.target,
            "draft": self.options.draft,
            "k": engine.k,
            "seed": self.options.seed,
            "seconds": self.seconds,
            "versions": machine.versions(),
            "hardware": machine.hardware("cpu" if engine.device == "auto" else engine.device),
            "commit": machine.commit(),
        }


def notes(result: ServerAuditResult) -> list[str]:
    """Return what the reader must know to judge the result."""
    notes = []
    distribution, diagnosis = result.sampling.distribution, result.sampling.diagnosis
    if result.replay.real_differences > _FEW_DIFFERENCES * max(result.replay.tokens, 1) and not distribution.passed:
        notes.append(
            "The greedy replay already differs, so the server has other weights, another precision or another prompt"
            " than the target. The causes below explain only differences in sampling."
        )
    if not result.abilities.token_ids:
        worst = max((test.ambiguity for test in distribution.tests), default=0.0)
        notes.append(
            "The server returns text only. The distribution counts all tokenizations of a text; other tokenizations"
            f" than the distinguished ones have a probability of {worst:.2g} and are part of it."
        )
    if result.replay.unread_characters:
        notes.append(
            f"{result.replay.unread_characters} characters of greedy text fit no token (parts of characters, or special"
            " tokens) and were not compared."
        )
    if not result.abilities.neutral:
        notes.append(
            "The server refuses top_k and min_p, so filters of its own may be on. Switch them off where it starts."
        )
    if distribution.skipped:
        names = ", ".join(distribution.skipped)
        notes.append(
            f"Not run, because rounding decides which tokens the filter keeps: {names}. Give --prompts other prompts,"
            " or a smaller --tolerance."
        )
    for name, problem in distribution.refused.items():
        notes.append(f"Not run, because the server refuses the request: {name} ({problem}).")
    if diagnosis and len(diagnosis.causes) > 1:
        notes.append("Several causes explain the counts equally well. The counts cannot tell them apart.")
    if diagnosis and not diagnosis.causes:
        notes.append("No known defect explains the counts of all tests.")
    if result.retries:
        notes.append(retries_text(result.retries))
    return notes
