"""Run a fit: the stages in order, the results of finished stages from the state, and the configuration at the end."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from typing import Any

from rich.console import Console

from outrider.core.option import as_json
from outrider.drafting.propose.expression import command_line_form, short
from outrider.engine.build import proposer_of
from outrider.engine.default_proposer import can_draft_for_itself
from outrider.engine.verifiers import find_verifier
from outrider.errors import OutriderError, either
from outrider.lab.fit.checks import check_disk, check_drafts, check_head, check_memory, target_size
from outrider.lab.fit.outcome import Outcome, duration
from outrider.lab.fit.prompts import PromptSplit, read_split, write_files
from outrider.lab.fit.rules import TrainingPlan, draft_quantizes, finalists, plan_training
from outrider.lab.fit.settings import AUTO_HEAD, Settings
from outrider.lab.fit.stages import (
    Drafts,
    certify,
    compared_drafts,
    make_training,
    measure_proposers,
    train_head,
    tune_settings,
)
from outrider.lab.fit.state import CONFIG, HEAD, RUNS, State
from outrider.lab.tune.config import FIT
from outrider.lab.tune.measurement import Measurement
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.family import Family, find_smaller
from outrider.models.loader.fingerprint import model_fingerprint
from outrider.models.loader.load import refuse_sources
from outrider.runtime.atomic_files import check_folder, write_whole
from outrider.runtime.processes import world_size
from outrider.runtime.report.console import Document, count_text, print_plain
from outrider.train.model.presets import KINDS
from outrider.train.trainer import STATE as TRAINING_STATE

_PROMPTS = "prompts"  # folder of the prompt files
_STAGES = 4


class Fit:
    """One fit. It continues where an earlier run of it has stopped."""

    def __init__(self, settings: Settings, progress: Console) -> None:
        """Check everything that can be checked before a model is loaded.

        Args:
            progress: where progress goes.

        Raises:
            OutriderError: a value is not allowed, there are too few prompts, or memory or disk do not suffice.
        """
        self._settings = settings
        self._progress = progress
        self._folder = Path(settings.out).expanduser()
        self._target = model_folder(settings.engine.target)
        if world_size() > 1:
            raise OutriderError("fit works with one process; start it without torchrun")
        if settings.head not in (AUTO_HEAD, *KINDS):
            raise OutriderError(f"--head {settings.head} is unknown; use {either([AUTO_HEAD, *KINDS])}")
        check_folder(settings.out, "--out")
        refuse_sources(self._target, "fit")
        check_memory(settings, self._target)
        family = find_smaller(self._target, settings.family) if settings.family else Family((), {}, {}, {})
        for line in family.reasons:
            self._say(line, indent="")
        if family.smaller:
            self._say(f"draft models: {', '.join(path.name for path in family.smaller)}", indent="")
        self._models = {_draft(file): _draft(model) for file, model in family.models.items()}
        self._proposers = _untrained(settings, self._target, family.smaller)
        check_drafts(settings, self._proposers)
        self._drafts = compared_drafts(settings, self._proposers, family.stored)
        tune_settings(settings, self._folder, self._proposers, self._drafts)  # which checks them
        self._split: PromptSplit = read_split(settings.prompts, batch=settings.batch, seed=settings.seed)
        if settings.max_minutes:
            check_head(settings, target_size(self._target), self._plan(tokens_per_s=1.0))
        self._state = State.open(self._folder, self._identity(), overwrite=settings.overwrite)
        self._files = write_files(self._split, self._folder / _PROMPTS, batch=settings.batch)
        self._head = self._folder.resolve() / HEAD
        self._drop_shorter_training()
        if self._state.get("training") is None and settings.max_minutes:
            size = target_size(self._target)
            check_disk(self._head, size, self._plan(tokens_per_s=1.0))

    @property
    def config(self) -> Path:
        """The file that `--config` of other commands takes."""
        return self._folder / CONFIG

    @property
    def started(self) -> bool:
        """Whether anything is measured, so that there is a best configuration so far."""
        return self._state.get("first") is not None

    def run(self) -> Document:
        """Run the stages that are not finished.

        Returns:
            The document of the fit. `--config` reads its `settings`.

        Raises:
            OutriderError: a stage fails, or the disk is full. Finished stages are not lost.
        """
        self._say(self._limit(), indent="")
        try:
            self._measure_first()
            self._train()
            self._measure_final()
            self._certify()
            (self._head / TRAINING_STATE).unlink(missing_ok=True)  # large, and only an interrupted training needs it
        except OutriderError as error:
            if not self.started:
                raise
            raise OutriderError(f"{error}. Finished stages are kept: the same command continues") from None
        return self.document()

    def document(self) -> Document:
        """Return the document of the stages that are finished; at least the first measurement must be."""
        first, final, certificate = map(self._state.get, ("first", "final", "certificate"))
        outcome = Outcome(
            first=Measurement.of(first),
            final=final and Measurement.of(final),
            training=self._state.get("training"),
            certificate=certificate,
            prompts={"train": len(self._split.train), "held_out": len(self._split.held_out)},
            out=str(self._folder),
            engine=self._settings.engine,
        )
        measured: Document = final or first
        settings = dict(measured["settings"])
        if not outcome.speculates:
            settings |= {"proposer": "none", "k": 0, "verifier": find_verifier(None, "none").name}
        return {
            **measured,
            "benchmark": FIT,
            "settings": settings,
            "fit": {**outcome.as_dict(), "arguments": as_json(self._settings), "first_measurement": first},
        }

    def write(self, document: Document) -> None:
        """Write the configuration. Raises OutriderError if it cannot be written."""
        write_whole(self.config, json.dumps(document) + "\n")

    def _limit(self) -> str:
        """Return the sentence that says how long the unfinished stages take at most."""
        minutes, get = self._settings.measure_minutes, self._state.get
        measurements = (get("first") is None) + (get("final") is None)
        parts = {count_text(measurements, "measurement"): measurements * minutes}
        if get("training") is None:
            parts["training, besides loading and evaluations"] = self._settings.max_minutes
        if get("certificate") is None and self._settings.samples:
            parts["certificate"] = minutes
        listed = [f"{duration(each)} for the {name}" for name, each in parts.items() if each]
        total = sum(parts.values())
        return f"This takes {duration(total)} at most: {', '.join(listed)}." if total else "All stages are finished."

    def _measure_first(self) -> None:
        prompts = len(self._files.first.read_text(encoding="utf-8").splitlines())
        self._announce(1, f"measure {len(self._proposers)} proposers that need no training, on {prompts} prompts")
        if self._state.get("first") is None:
            found = self._measure("first", self._files.first, self._proposers, self._drafts)
            self._state.put("first", found)
        if self._state.get("final") is None:
            self.write(self.document())  # it stays if the process is killed
        self._say(self._fastest(self._state.get("first")))

    def _measure(self, stage: str, prompts: Path, proposers: Sequence[str], drafts: Drafts) -> Document:
        file = self._folder / f"{stage}{RUNS}"
        return measure_proposers(self._settings, prompts, proposers, drafts, self._progress, file=file)

    def _train(self) -> None:
        settings = self._settings
        if settings.max_minutes:
            self._announce(2, f"train a head for {duration(settings.max_minutes)} on {len(self._split.train)} prompts")
        else:
            self._announce(2, "train no head, as --max-minutes is 0")
        if self._state.get("training") is None:
            self._state.put("training", self._trained() if settings.max_minutes else {"trained": False, "minutes": 0.0})
        if reason := self._state.get("training").get("reason"):
            self._say(f"no head is trained: {reason}")

    def _trained(self) -> Document:
        settings = self._settings
        skipped = {"trained": False, "minutes": settings.max_minutes}
        plan = self._stored_plan()
        try:
            training = make_training(settings, self._files, plan, self._head, tokens_per_s=self._first.tokens_per_s)
        except OutriderError as error:
            # A head that the user has not asked for by name may not fit the target. One that has begun does fit.
            if settings.head != AUTO_HEAD or self._head.exists():
                raise
            return {**skipped, "reason": str(error)}
        try:
            return train_head(settings, plan, training, self._progress)
        except OutriderError as error:
            raise OutriderError(f"{error}; or use --max-minutes 0 for a fit without a head") from None

    def _measure_final(self) -> None:
        head = str(self._head) if self._state.get("training")["trained"] else None
        proposers = finalists(self._first.cases, head, models=self._models)
        self._announce(3, f"measure {len(proposers)} proposers on {len(self._split.held_out)} held-out prompts")
        if self._state.get("final") is None:
            drafts = draft_quantizes(proposers, self._first.cases)
            found = self._measure("final", self._files.held_out, proposers, drafts)
            self._state.put("final", found)
            self.write(self.document())
        self._say(self._fastest(self._state.get("final")))

    def _certify(self) -> None:
        final = self._state.get("final")
        measured = Measurement.of(final)
        advice = measured.advice
        done = self._state.get("certificate")
        if not advice.worth:
            self._announce(4, "certify nothing, as plain decoding is chosen")
            return
        if not self._settings.samples and done is None:
            self._announce(4, "certify nothing, as --samples is 0")
            return
        self._announce(4, f"certify {short(advice.proposer)}")
        if done is None or done["passed"] is None:
            native = final["kernels"].startswith("native")
            speed = measured.tokens_per_s
            found = certify(self._settings, self._target, advice, native=native, tokens_per_s=speed)
            self._state.put("certificate", found)
        self.write(self.document())

    def _plan(self, *, tokens_per_s: float) -> TrainingPlan:
        return plan_training(
            self._settings.head,
            target_size(self._target),
            minutes=self._settings.max_minutes,
            prompts=len(self._split.train),
            max_tokens=self._settings.max_tokens,
            tokens_per_s=tokens_per_s,
        )

    def _stored_plan(self) -> TrainingPlan:
        """Return the plan of the training, which must not change when it is resumed."""
        if self._state.get("plan") is None:
            self._state.put("plan", asdict(self._plan(tokens_per_s=self._first.tokens_per_s)))
        return TrainingPlan(**self._state.get("plan"))

    def _drop_shorter_training(self) -> None:
        """Forget a finished training if more time is given now. It continues from its own state, if that is there."""
        done = self._state.get("training")
        if done is None or self._settings.max_minutes <= done["minutes"]:
            return
        stages = ["training", "final", "certificate"]
        if not (self._head / TRAINING_STATE).is_file():
            rmtree(self._head, ignore_errors=True)
            stages.append("plan")  # of a shorter training
        self._state.drop(*stages)

    def _identity(self) -> dict[str, Any]:
        prompts = [[prompt.prompt, prompt.messages] for prompt in (*self._split.train, *self._split.held_out)]
        return {
            **self._settings.identity(),
            "target": model_fingerprint(self._target),
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        }

    @property
    def _first(self) -> Measurement:
        """The first measurement, which must be finished."""
        return Measurement.of(self._state.get("first"))

    def _fastest(self, document: Document) -> str:
        line: str = document["summary"][1]
        return line

    def _announce(self, stage: int, text: str) -> None:
        self._say(f"{stage} of {_STAGES}: {text}", indent="")

    def _say(self, text: str, *, indent: str = "  ") -> None:
        print_plain(self._progress, f"{indent}{text}")


def _draft(path: Path) -> str:
    """Return the proposer of a draft model."""
    return command_line_form(f'draft:"{path}"')


def _untrained(settings: Settings, target: Path, smaller: Sequence[Path]) -> tuple[str, ...]:
    """Return the proposers of the first measurement. A short time limit may leave out the last ones."""
    drafts = list(map(_draft, smaller))
    if settings.proposers:
        return tuple(dict.fromkeys((*settings.proposers, *drafts)))
    engine = settings.engine
    names = [str(proposer_of(engine)), *drafts]
    names += ["ngram", "suffix", "suffix:100000", "recycle", "merge(suffix,recycle)"]
    if can_draft_for_itself(target, device=engine.device, kernels=engine.kernels, quantize=engine.quantize):
        names += ["quantized:int4", "best(suffix:100000,quantized:int4)"]
    return tuple(dict.fromkeys(names))
