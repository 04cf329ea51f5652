"""The stages of a fit: measure, train, certify. Each one returns a result for JSON."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from outrider.core.config import NO_DRAFT, QUANTIZE_BITS, draft_weight_bits
from outrider.drafting.plan.pass_cost import CostModel
from outrider.drafting.propose.registry import NAMED, check_proposer, draft_settings, parse
from outrider.errors import OutriderError
from outrider.lab.audit.run import run_audit
from outrider.lab.audit.settings import Settings as AuditSettings
from outrider.lab.fit.outcome import duration
from outrider.lab.fit.prompts import PromptFiles
from outrider.lab.fit.rules import Gain, TrainingPlan, evaluation_tokens, expected_gain, plan_certificate
from outrider.lab.fit.settings import Settings
from outrider.lab.tune.advice import Advice
from outrider.lab.tune.budget import PLANNED
from outrider.lab.tune.measure import measure
from outrider.lab.tune.run import make_document
from outrider.lab.tune.settings import Settings as TuneSettings
from outrider.models.loader.gguf.file import read_gguf
from outrider.models.loader.load import check_fits, choose_device
from outrider.models.loader.paths import is_gguf
from outrider.runtime.progress import stage
from outrider.runtime.report.console import Document
from outrider.train.run import Training
from outrider.train.settings import TRAINING_ENGINE
from outrider.train.settings import Settings as TrainSettings

Drafts = Mapping[str, tuple[str | None, ...]]  # `draft_quantize` by proposer: what to compare

_CACHED = 256  # cached tokens of a sequence for which the gain is expected
_DRAFT_TOKENS = 5  # of an evaluation during training
_LOSS = "ce:0.1,tv:0.9"  # reaches a higher tau in a short training than ce alone
_SEQUENCES = 32  # prompts that are answered at once


def measure_proposers(
    settings: Settings, prompts: Path, proposers: Sequence[str], drafts: Drafts, progress: Console, *, file: Path
) -> Document:
    """Measure plain decoding and proposers. Returns the document of `outrider tune`, for all temperatures together.

    Raises:
        KeyboardInterrupt: it was interrupted. The runs so far are in `file`, from which the same measurement resumes.
    """
    asked = tune_settings(settings, prompts, proposers, drafts)
    measured = measure(asked, progress, max_seconds=60 * settings.measure_minutes, file=file)
    if not measured.complete:
        raise KeyboardInterrupt
    document = make_document(asked, measured, every_temperature=True)
    gc.collect()  # the next stage loads the target again
    return document


def compared_drafts(
    settings: Settings, proposers: Sequence[str], stored: Mapping[Path, frozenset[str]] = MappingProxyType({})
) -> Drafts:
    """Return the weights to compare of each proposer with a draft; {} if the user has named them.

    Quantized GGUF files keep their types. `stored` is that of a `Family`: another file has these weights.
    """
    if settings.engine.draft_quantize is not None:
        return {}
    try:
        draft_weight_bits("int8", kernels=settings.engine.kernels, device=str(choose_device(settings.engine.device)))
    except OutriderError:  # they run on torch or on a GPU
        return {}
    compared = {}
    for proposer in proposers:
        files = _full_drafts(proposer)
        if files:
            elsewhere = frozenset().union(*(stored.get(file, ()) for file in files))
            compared[proposer] = (None, *(name for name in QUANTIZE_BITS if name not in elsewhere))
    return compared


def _full_drafts(proposer: str) -> list[Path]:
    """Return the drafts of a proposer whose weights are not quantized yet."""
    drafts = [leaf.argument for leaf in parse(proposer).leaves() if leaf.name in NAMED and NAMED[leaf.name].reads_text]
    files = [Path(draft).expanduser() for draft in drafts]
    return [file for file in files if not (is_gguf(file) and file.is_file() and read_gguf(file).quantized)]


def tune_settings(settings: Settings, prompts: Path, proposers: Sequence[str], drafts: Drafts) -> TuneSettings:
    """Return the settings of a measurement. `drafts` are its `draft_quantizes`.

    Raises:
        OutriderError: a value is not allowed.
    """
    for proposer in proposers:
        check_proposer(proposer)
    return TuneSettings(
        engine=replace(settings.engine, **draft_settings(settings.engine, *proposers)),
        proposers=tuple(proposers),
        ks=settings.ks,
        batches=(settings.batch,),
        temperatures=settings.temperatures,
        prompts=str(prompts),
        repeats=1,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        draft_quantizes=drafts,
    )


def make_training(
    settings: Settings, files: PromptFiles, plan: TrainingPlan, folder: Path, *, tokens_per_s: float
) -> Training:
    """Return the training of a new head, or that which was interrupted. The target is loaded.

    `tokens_per_s` is the speed of plain decoding, from which the length of evaluations follows.

    Raises:
        OutriderError: the target cannot have a head of this kind, or the training cannot be read.
    """
    tokens = evaluation_tokens(tokens_per_s, minutes=settings.max_minutes)
    return Training(plan.kind, train_settings(settings, files, plan, folder), eval_tokens=tokens)


def train_head(settings: Settings, plan: TrainingPlan, training: Training, progress: Console) -> Document:
    """Train a head until its time is used, and return the figures of the training.

    Raises:
        OutriderError: the loss is not a number, or the disk is full.
    """
    report = _GainReport(settings, training, progress)
    document, _ = training.run(on_evaluation=report.show)
    return {
        "trained": True,
        "minutes": settings.max_minutes,
        "kind": plan.kind,
        "parameters": document["parameters"],
        "steps": document["steps"],
        "evaluation": document["evaluation"],
        "expected": {name: gain._asdict() for name, gain in report.gains.items()},
    }


def train_settings(settings: Settings, files: PromptFiles, plan: TrainingPlan, folder: Path) -> TrainSettings:
    """Return the settings of the training."""
    return TrainSettings(
        out=str(folder),
        data=[str(files.train)],
        eval_data=str(files.evaluation),
        engine=replace(
            settings.engine,
            proposer=TRAINING_ENGINE.proposer,
            k=_DRAFT_TOKENS,
            **NO_DRAFT,  # the head has them later
            max_model_len=None,
            max_num_seqs=_SEQUENCES,
        ),
        max_minutes=settings.max_minutes,
        max_tokens=settings.max_tokens,
        loss=_LOSS,
        draft_vocab_size=plan.draft_vocab_size,
        batch_size=plan.batch_size,
        steps_per_generation=plan.steps_per_generation,
        seed=settings.seed,
    )


class _GainReport:
    """Prints the expected gain after each evaluation of a training."""

    def __init__(self, settings: Settings, training: Training, console: Console) -> None:
        self.training = training
        self.gains: dict[str, Gain] = {}  # by temperature of the evaluation
        self._settings = settings
        self._console = console
        self._costs: CostModel | None = None

    def show(self, figures: Mapping[str, Any], done: float) -> None:
        """Print a line for the figures of an evaluation; `done` is the share of the training that is done."""
        if self._costs is None:
            self._costs = self.training.costs()
        parts = []
        for name in self._evaluations():
            acceptance = figures[name]["acceptance"]
            gain = expected_gain(self._costs, acceptance, batch=self._settings.batch, cached=_CACHED)
            self.gains[name] = gain
            expected = f"{gain.speedup:.2f} times plain decoding with k {gain.k}" if gain.k else "no gain yet"
            parts.append(f"tau {figures[name]['tau']:.2f} at {name} (expected: {expected})")
        self._console.print(
            f"  {done:.0%} of {duration(self._settings.max_minutes)}, on held-out prompts: {', '.join(parts)}",
            highlight=False,
            soft_wrap=True,
        )

    def _evaluations(self) -> list[str]:
        """Return the evaluations to show. They run greedily and at temperature 1; the nearer one counts."""
        near = ("temperature 0" if each < 0.5 else "temperature 1" for each in self._settings.temperatures)
        return list(dict.fromkeys(near))


def certify(settings: Settings, target: Path, advice: Advice, *, native: bool, tokens_per_s: float) -> Document:
    """Audit the chosen proposer within `--measure-minutes`: fewer samples and shorter texts where time is short.

    Args:
        advice: the choice of the second measurement.
        native: whether the target runs on native kernels. Kernels whose rounding depends on the batch are audited in
            float32.
        tokens_per_s: of plain decoding.

    Returns:
        Whether it passed, and the figures; or the reason why the audit could not be made.
    """
    k = max(advice.fixed_k, 1)
    seconds = PLANNED * 60 * settings.measure_minutes
    plan = plan_certificate(settings.samples, k=k, tokens_per_s=tokens_per_s, seconds=seconds)
    if plan is None:
        return {
            "passed": None,
            "reason": f"an audit of this target takes longer than --measure-minutes {settings.measure_minutes:g}; give"
            " more, or run outrider audit",
        }
    drafts = draft_settings(settings.engine, advice.proposer, draft_quantize=advice.draft_quantize)
    try:
        engine = replace(settings.engine, proposer=advice.proposer, k=k, **drafts)
        asked = AuditSettings(engine=engine, samples=plan.samples, max_tokens=plan.tokens)
        if not native:
            check_fits(target, dtype="float32", device=engine.device)
        with stage("certifying"):
            report = run_audit(asked, console=None)
    except OutriderError as error:
        return {"passed": None, "reason": str(error)}
    gc.collect()
    return report
