"""Chooses the threshold of a quality gate for a wanted quality."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from outrider.errors import OutriderError
from outrider.media.calibration.document import Calibration
from outrider.media.contract import Scorer
from outrider.media.engine import MediaEngine
from outrider.media.evaluation.summary import Summary, best_gate, summarize
from outrider.media.evaluation.thresholds import draft_scores, thresholds_at
from outrider.media.evaluation.trials import Trial, run_trials
from outrider.media.routers import QualityGate, TargetOnly

MIN_PROMPTS = 4
_REJECTED = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.95)  # shares of drafts that the first candidates reject
_FINER = (0.25, 0.5, 0.75)  # the same for those between the best of the first candidates and the next lower one
MAX_RUNS = 2 + len(_REJECTED) + len(_FINER)  # routers of the search; target-only runs twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The choice, and the figures of all candidates on the prompts of the search."""

    calibration: Calibration
    candidates: tuple[Summary, ...]  # target-only first
    reference: str


def tune(
    engine: MediaEngine,
    held_out: Scorer,
    prompts: Sequence[str],
    *,
    quality: float,
    aggregate: str = "min",
    advance: Callable[[], None] = lambda: None,
) -> Tuned:
    """Return the threshold that lets the target make the fewest blocks and keeps the wanted quality.

    A second search between the best candidate and the next lower one makes the choice finer. Half
    of the prompts are used for the search. The figures of the calibration are from the other half.
    If no candidate has the wanted quality, the best one is taken, and `reached` says so.

    Args:
        engine: makes the outputs.
        held_out: a scorer that does not decide.
        prompts: at least `MIN_PROMPTS`.
        quality: the wanted score as a share of target-only's, above 0 and at most 1.
        aggregate: of the gate; see `QualityGate`.
        advance: called after each output.

    Raises:
        OutriderError: the quality is out of range, or there are too few prompts.
    """
    _check(quality, prompts)
    search, check = prompts[::2], prompts[1::2]
    reference = TargetOnly()
    scores = draft_scores(engine, search, aggregate=aggregate)
    candidates: list[tuple[float, Summary]] = []

    def measure(thresholds: Sequence[float]) -> Summary:
        gates = [QualityGate(each, aggregate=aggregate) for each in thresholds]
        trials = run_trials(engine, held_out, [reference, *gates], search, rounds=1, advance=advance)
        target_only, *found = summarize(trials, reference=reference.name)
        candidates.extend(zip(thresholds, found, strict=True))
        candidates.sort(key=itemgetter(0))
        return target_only

    def best_candidate() -> int:
        return best_gate([each for _, each in candidates], quality)

    target_only = measure(thresholds_at(scores, _REJECTED))
    if best := best_candidate():
        low, high = candidates[best - 1][0], candidates[best][0]
        between = [score for score in scores if low < score < high]
        finer = thresholds_at(between, _FINER) if between else []
        if finer := [each for each in finer if low < each < high]:
            measure(finer)
    threshold = candidates[best_candidate()][0]
    gate = QualityGate(threshold, aggregate=aggregate)
    trials = run_trials(engine, held_out, [reference, gate], check, rounds=1, advance=advance)
    calibration = _calibration(trials, gate, threshold, quality, reference=reference.name)
    summaries = (target_only, *(each for _, each in candidates))
    return Tuned(calibration=calibration, candidates=summaries, reference=reference.name)


def _check(quality: float, prompts: Sequence[str]) -> None:
    if not 0 < quality <= 1:
        raise OutriderError(
            f"quality is {quality}; use a share of target-only's score above 0 and up to 1, such as 0.98"
        )
    if len(prompts) < MIN_PROMPTS:
        raise OutriderError(f"{len(prompts)} prompts are too few to choose a threshold; use at least {MIN_PROMPTS}")


def _calibration(
    trials: Sequence[Trial], gate: QualityGate, threshold: float, quality: float, *, reference: str
) -> Calibration:
    """Return the calibration of a gate with the wanted `quality`, from trials of target-only and of the gate."""
    _, checked = summarize(trials, reference=reference)
    return Calibration(
        wanted=quality,
        threshold=threshold,
        aggregate=gate.aggregate,
        quality=checked.quality,
        held_out=checked.held_out,
        speedup=checked.speedup.median,
        accepted_share=checked.accepted_share or 0.0,
        drafts=sum(trial.drafted for trial in trials),
        reached=checked.quality.value >= quality,
    )
