"""What each draft model of a fit costs and gains, with each kind of weights."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from shlex import quote
from statistics import fmean

from outrider.core.config import EngineConfig
from outrider.drafting.propose.expression import command_line_form
from outrider.drafting.propose.registry import parse
from outrider.lab.common.trial import Choice
from outrider.lab.fit.rules import candidates
from outrider.lab.tune.candidate import Candidate, fastest_first
from outrider.lab.tune.figures import Estimate
from outrider.lab.tune.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFigures(Choice):
    """A draft model with one kind of weights, at its best draft length. Means are over the temperatures."""

    memory_bytes: int  # weights and KV cache
    token_ms: float  # drafting time of a round over the draft tokens of a sequence
    tau: float
    acceptance: float  # accepted draft tokens over all draft tokens
    speedup: Estimate  # the geometric mean

    def command(self, engine: EngineConfig) -> str:
        """Return the command that runs this draft; `engine` has the target."""
        options = {
            "--target": None if engine.target is None else str(engine.target),
            "--quantize": engine.quantize,
            "--proposer": command_line_form(self.proposer),
            "--draft-quantize": self.draft_quantize or engine.draft_quantize,
            "--k": str(self.k),
        }
        words = [f"{name} {quote(value)}" for name, value in options.items() if value is not None]
        return f'outrider run {" ".join(words)} "..."'


def draft_figures(measured: Measurement) -> tuple[DraftFigures, ...]:
    """Return the figures of each draft model and kind of weights, the fastest first."""
    best: dict[tuple[str, str | None], Candidate] = {}
    for candidate in fastest_first(candidates(measured.cases)):
        if parse(candidate.proposer).name == "draft":
            best.setdefault((candidate.proposer, candidate.draft_quantize), candidate)
    return tuple(_figures(measured, best.values()))


def _figures(measured: Measurement, best: Iterable[Candidate]) -> Iterator[DraftFigures]:
    for candidate in best:
        cases = [case for case in measured.cases if case.choice == candidate.choice]
        same = [case for case in measured.cases if case.label == candidate.label and case.nodes]
        drafted = [case for case in same if case.choice == candidate.choice] or same  # k auto may draft nothing
        memory = measured.memory[candidate.label]
        tau = fmean(case.total.tau for case in cases)
        nodes = fmean(case.nodes for case in cases)
        yield DraftFigures(
            **asdict(candidate.choice),
            memory_bytes=memory.draft_weight_bytes + memory.draft_cache_bytes,
            token_ms=sum(case.parts.draft for case in drafted) / sum(case.nodes for case in drafted)
            if drafted
            else 0.0,
            tau=tau,
            acceptance=(tau - 1) / nodes if nodes else 0.0,
            speedup=candidate.overall,
        )
