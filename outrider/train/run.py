"""A training: answers, steps, measurements, and what is written about them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.core.noise import derive_seed
from outrider.errors import OutriderError
from outrider.loader.embedded import model_folder
from outrider.measure.prompts import Prompt
from outrider.plan.calibrate import known_costs
from outrider.plan.pass_cost import CostModel
from outrider.plan.store import model_print
from outrider.propose.registry import check_proposer, draft_model
from outrider.system import machine
from outrider.system.atomic_files import check_folder
from outrider.system.heap import Heap
from outrider.train.budget import TimeBudget
from outrider.train.data.answers import AnswerGenerator, AnswerParams
from outrider.train.data.batches import Reader
from outrider.train.data.feature_cache import FeatureCache, origin_of
from outrider.train.data.prompts import encoded, read_prompts, repeated, split
from outrider.train.data.schedule import PromptSchedule
from outrider.train.distributed import meet, part, rank, world
from outrider.train.evaluate import Evaluator
from outrider.train.loss.losses import parse
from outrider.train.model.joint import TARGET, Given, GivenReader
from outrider.train.model.presets import KINDS
from outrider.train.report.log import Log, write
from outrider.train.settings import DRAFT, Settings
from outrider.train.setup import make_train_setup
from outrider.train.trainer import STATE, Sums, Trainer, read_state

FACTS = "training.json"
_LOOKED_AT = 256  # tokens of a prompt on which the target is compared with what is taken from it
_MEASURED = 128  # tokens of an answer where tau is measured
_GIGABYTES = 10.0  # of the cache, where nobody says
_EVALUATIONS = 8  # of a training with a time budget
_SAVE_SECONDS = 60.0  # between two saves of a training with a time budget
_log = logging.getLogger("outrider")


class Training:
    """One run, from wherever the last one was stopped."""

    def __init__(self, kind: str, settings: Settings) -> None:
        """Load everything.

        Raises:
            OutriderError: the data, the target or the options do not allow it; the message says how they would.
        """
        self._began, self._settings, self._kind = perf_counter(), settings, kind
        if kind not in KINDS and kind != DRAFT:
            raise OutriderError(f"kind {kind!r} is unknown; use {', '.join([*KINDS, DRAFT])}")
        losses = parse(settings.loss)
        check_folder(settings.out, "--out")
        check_proposer(settings.proposer)
        if settings.max_minutes is not None and world() > 1:
            raise OutriderError("--max-minutes works with one process; use --epochs with several")
        found = read_prompts(settings.data, limit=settings.limit)
        texts, held = split(found, settings.eval_data, seed=settings.seed)
        self._twice = repeated(texts, held)
        if self._twice and not rank():
            _log.warning(
                "%d of the %d prompts to measure on are trained on, too, and tau will be better than that of others;"
                " name others with --eval-data",
                self._twice,
                len(held),
            )
        self._out = Path(settings.out).expanduser()
        self._target = model_folder(settings.target)
        self._identity = _identity(kind, settings, self._target)
        state = _state(self._out, self._identity, restart=settings.overwrite)
        machine.use_threads(settings.threads)
        self._heap = Heap()
        torch.manual_seed(settings.seed)
        self._room = make_train_setup(kind, settings, self._target, most=max(len(texts), len(held)))
        meet(self._room.parts.device)
        self._course, self._reader = self._prepare(texts)
        pupil = self._room.trainee
        if state is None:
            pupil.begin(lambda: self._course.samples(0))
        steps, lr = settings.ttt_length or pupil.steps, settings.lr or pupil.lr
        self._trainer = Trainer(pupil, losses=losses, steps=steps, decay=settings.loss_decay, lr=lr)
        if state:
            self._trainer.load(state)
        self._wave = state["wave"] if state else 0
        self._budget: TimeBudget | None = None
        if settings.max_minutes is not None:
            used = state.get("seconds", 0.0) if state else 0.0
            self._budget = TimeBudget(60 * settings.max_minutes, used=used)
        self._cycle_seconds = 0.0  # duration of the last generation cycle of this run
        self._evaluation_seconds = 0.0  # duration of the last evaluation of this run
        measured = [self._read(prompt) for prompt in held]
        self._gauge = Evaluator(self._room.parts, measured, k=settings.k, tokens=_MEASURED, seed=settings.seed)

    def costs(self) -> CostModel:
        """Measure what passes of the target and of the draft cost. The contents of their caches are lost."""
        parts = self._room.parts
        return known_costs(parts.target, draft_model(self._room.trainee.proposer(parts.setup)))

    def run(
        self, progress: Console, *, on_evaluation: Callable[[Mapping[str, Any], float], None] | None = None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Train to the end.

        Args:
            progress: where the progress bar goes.
            on_evaluation: is called after each evaluation, with its figures and the share of the training that is done.

        Returns:
            What came of it, fit for JSON, and the lines of the log; no lines where another process keeps it.

        Raises:
            OutriderError: the disk is full, or the loss is not a number; what was saved before is whole.
        """
        if rank():
            while not self._is_finished():
                self._run_wave()
            part()
            return self._document({}), []
        log = Log(self._out, begin=self._wave, events=self._settings.tensorboard)
        figures = log.figures
        if self._is_finished():  # the run before may have been killed between two files
            self._write(figures)
        with _bar(progress) as bar:
            task = bar.add_task("training", total=1.0, told="")
            bar.update(task, completed=self._share())
            finished = self._is_finished()
            while not finished:
                if self._budget is not None:
                    self._budget.start()
                sums, seconds = self._run_wave()
                if self._budget is not None:
                    self._budget.stop()  # evaluations and saves do not count
                finished = self._is_finished()
                evaluated = finished or self._evaluation_due()
                if evaluated:
                    figures = self._evaluate()
                log.add(self._wave, sums, figures, seconds)
                if finished or self._save_due():
                    self._save(finished)
                    self._write(figures)
                done = 1.0 if finished else self._share()
                bar.update(task, completed=done, told=_told(sums, figures))
                if evaluated and on_evaluation is not None:
                    on_evaluation(figures, done)
        log.close()
        part()
        return self._document(figures), log.lines

    def _evaluate(self) -> dict[str, Any]:
        began = perf_counter()
        figures = self._gauge.measure(self._room.trainee)
        self._evaluation_seconds = perf_counter() - began
        return figures

    def _is_finished(self) -> bool:
        if self._budget is None:
            return self._wave >= self._course.waves
        return self._wave > 0 and self._budget.is_over(self._cycle_seconds)

    def _share(self, cycle_share: float = 0.0) -> float:
        """Return the share of the training that is done; `cycle_share` is that of the current generation cycle."""
        if self._budget is None:
            return (self._wave + cycle_share) / self._course.waves
        return self._budget.share

    def _evaluation_due(self) -> bool:
        every = self._settings.eval_every
        if self._budget is None or not every:
            return self._due(every)
        # Evaluations of a slow target may take long. Let training take most of the time.
        interval = max(self._budget.seconds / _EVALUATIONS, 3 * self._evaluation_seconds)
        return self._budget.is_due("evaluation", interval)

    def _save_due(self) -> bool:
        if self._budget is None:
            return self._due(self._settings.save_every)
        return self._budget.is_due("save", _SAVE_SECONDS)

    def _due(self, every: int) -> bool:
        return bool(every and self._wave % every == 0)

    def _save(self, finished: bool) -> None:
        facts = {}
        if self._budget is not None:
            # The last cycle may end a little early. A finished training stays finished.
            facts["seconds"] = max(self._budget.elapsed, self._budget.seconds if finished else 0.0)
        self._trainer.save(self._out, wave=self._wave, identity=self._identity, **facts)

    def _run_wave(self) -> tuple[list[Sums], dict[str, float]]:
        """Answers and steps; and the seconds that each took."""
        settings, began = self._settings, perf_counter()
        # What each process draws follows from the wave, as a saved state holds the luck of one process alone.
        torch.manual_seed(derive_seed(derive_seed(settings.seed, self._wave + 1), rank()))
        samples = self._course.samples(self._wave)
        answered = perf_counter()
        out = []
        for i, grouped in enumerate(self._course.steps(samples, self._wave)):
            texts = (self._reader.read(some, everything=settings.train_on_prompts) for some in grouped)
            out.append(self._trainer.train(texts, progress=self._share(i / settings.steps_per_generation)))
            self._heap.tidy()
        self._wave += 1
        self._cycle_seconds = perf_counter() - began
        return out, {"answers": answered - began, "steps": perf_counter() - answered}

    def _prepare(self, texts: Sequence[Prompt]) -> tuple[PromptSchedule, Reader | GivenReader]:
        """What is learned in which order, and how it is read."""
        settings, room = self._settings, self._room
        mine, most = range(rank(), len(texts), world()), -(-len(texts) // world())
        if not mine:
            raise OutriderError(f"{len(texts)} prompts are too few for {world()} processes; give more, or begin fewer")
        pupil = room.trainee
        reader = Reader(pupil.aux_states, room.recorder.layers, room.tables, pupil.ids, views=pupil.shared_kv)
        reader.check(room.parts.target, self._read(texts[rank()])[:_LOOKED_AT])
        if settings.train_target is not None:
            given = {i: encoded(room.parts.tokenizer, texts[i], whole=True)[: room.parts.context] for i in mine}
            return PromptSchedule(Given(given), mine, settings, most=most), GivenReader(pupil.ids, room.parts.vocab)
        half = room.parts.context // 2  # and as much is left for the answer
        whole = {i: encoded(room.parts.tokenizer, texts[i]) for i in mine}
        prompts = {i: tokens[:half] for i, tokens in whole.items()}
        if (cut := sum(len(tokens) > half for tokens in whole.values())) and not rank():
            _log.warning("%d of %d prompts are longer than half of the context and are cut at %d", cut, len(mine), half)
        archive = None
        if settings.cache_dir is not None:
            origin, layers = origin_of(room.parts, self._target, room.recorder.looked), room.recorder.layers
            archive = FeatureCache(
                settings.cache_dir, gigabytes=settings.cache_gb or _GIGABYTES, origin=origin, layers=layers
            )
        manner = AnswerParams(
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            ignore_eos=settings.ignore_eos,
            seed=settings.seed,
        )
        author = AnswerGenerator(room.parts, room.recorder, prompts, manner, archive=archive)
        return PromptSchedule(author, mine, settings, most=most), reader

    def _read(self, prompt: Prompt) -> tuple[int, ...]:
        """What is to be gone on with: a prompt, or the first half of a text."""
        parts, whole = self._room.parts, self._settings.train_target is not None
        tokens = encoded(parts.tokenizer, prompt, whole=whole)[: parts.context // 2]
        return tokens[: max(len(tokens) // 2, 1)] if whole else tokens

    def _write(self, figures: Mapping[str, Any]) -> None:
        """The draft, and what it is."""
        self._room.trainee.save(self._out)
        facts = {**self._document(figures), "arguments": asdict(self._settings), "data": _hashes(self._settings)}
        write(self._out / FACTS, json.dumps(facts, indent=2) + "\n")

    def _document(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "benchmark": "outrider train",
            "kind": self._kind,
            "out": self._settings.out,
            "target": self._target.name,
            "taught_target": None if self._settings.train_target is None else str(Path(self._settings.out) / TARGET),
            "waves": self._wave,
            "steps": self._trainer.step,
            "parameters": sum(weight.numel() for weight in self._room.trainee.module.parameters()),
            "k": self._settings.k,
            "held_out": dict(figures),
            "held_out_in_data": self._twice,
            "seconds": round(perf_counter() - self._began, 1),
            "hardware": machine.hardware(str(self._room.parts.device)),
            "versions": machine.versions(),
            "commit": machine.commit(),
        }


def _state(folder: Path, identity: str, *, restart: bool) -> dict[str, Any] | None:
    """What a training with these options has saved in a folder."""
    ours = (folder / FACTS).is_file()
    if (folder / "config.json").is_file() and not (folder / STATE).is_file() and not (ours and restart):
        way = "; use another --out" + (", or --overwrite to train it anew" if ours else "")
        raise OutriderError(f"{folder} holds a model, and no training that could go on{way}")
    state = None if restart else read_state(folder)
    if state and state["identity"] != identity:
        raise OutriderError(
            f"{folder} holds a training with other options; use another --out, or --overwrite to begin anew"
        )
    return state


def _identity(kind: str, settings: Settings, target: Path) -> str:
    """What two runs must have in common if one is to go on with the other's weights."""
    draft = model_print(model_folder(settings.init_from)) if settings.init_from else None
    facts = {"kind": kind, "target": model_print(target), "draft": draft, "processes": world()}
    if settings.init_target:
        facts["draft_target"] = model_print(model_folder(settings.init_target))
    return json.dumps({**facts, **settings.identity(), "data": _hashes(settings)}, sort_keys=True)


def _hashes(settings: Settings) -> list[str]:
    files = [*settings.data, *([settings.eval_data] if settings.eval_data else [])]
    return [hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest() for file in files]


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[told]}"))
    return Progress(*columns, console=console)


def _told(sums: Sequence[Sums], figures: Mapping[str, Any]) -> str:
    last = sums[-1]
    kept = " ".join(f"{100 * share:.0f}" for share in next((s.acceptance for s in sums if s.met), []))
    taus = ", ".join(f"{each['tau']:.2f}" for each in figures.values())
    return f"loss {last.loss:.3f}" + (f", kept {kept}%" if kept else "") + (f", tau {taus}" if taus else "")
