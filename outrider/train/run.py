"""Runs a training from its options to the files of the trained draft."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from outrider.core.noise import derive_seed
from outrider.core.option import as_json
from outrider.core.prompts import Prompt
from outrider.drafting.plan.known_costs import known_costs
from outrider.drafting.plan.pass_cost import CostModel
from outrider.drafting.propose.leaves import draft_model
from outrider.drafting.propose.registry import check_proposer
from outrider.engine.codec import EncodedPrompt
from outrider.errors import OutriderError, either
from outrider.llm import LLM
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.fingerprint import model_fingerprint
from outrider.models.loader.load import reads_sources
from outrider.runtime import machine
from outrider.runtime.atomic_files import check_folder
from outrider.runtime.heap import Heap
from outrider.runtime.processes import rank, world_size
from outrider.runtime.progress import stage
from outrider.train.budget import TimeBudget
from outrider.train.data.answers import AnswerGenerator
from outrider.train.data.batches import Collator
from outrider.train.data.feature_cache import FeatureCache, origin_of
from outrider.train.data.prompts import count_repeated, encode_prompt, encode_sourced_prompt, read_prompts, split
from outrider.train.data.schedule import PromptSchedule
from outrider.train.distributed import join_group, leave_group
from outrider.train.evaluate import Evaluator
from outrider.train.loss.losses import parse
from outrider.train.model.joint import TARGET, DatasetCollator, DatasetTexts
from outrider.train.model.presets import KINDS
from outrider.train.report.card import FILE as CARD
from outrider.train.report.card import model_card
from outrider.train.report.log import Log, write
from outrider.train.settings import DRAFT, Settings
from outrider.train.setup import TrainSetup
from outrider.train.trainer import STATE, StepStats, Trainer, read_state

FACTS = "training.json"
_CHECK_TOKENS = 256  # tokens of the prompt on which the target's distribution is checked
EVAL_TOKENS = 128  # most tokens of an answer in the evaluation
_DEFAULT_CACHE_GB = 10.0
_EVALUATIONS = 8  # of a training with a time budget
_SAVE_SECONDS = 60.0  # between two saves of a training with a time budget
_log = logging.getLogger("outrider")


class Training:
    """One training, new or resumed.

    Attributes:
        setup: the engine with the target, and the draft.
        schedule: the samples of each generation cycle.
        evaluator: the prompts of the evaluation, and what answers them.
    """

    def __init__(self, kind: str, settings: Settings, *, eval_tokens: int | None = None) -> None:
        """Load data and models, and resume an interrupted training in `settings.out`.

        Args:
            kind: what is trained.
            eval_tokens: most tokens of an answer in the evaluation; None: 128.

        Raises:
            OutriderError: the data, the target or the options are not usable. The message says how to fix it.
        """
        self._start_time = perf_counter()
        self._settings = settings
        self._kind = kind
        if kind not in KINDS and kind != DRAFT:
            raise OutriderError(f"kind {kind!r} is unknown; use {either([*KINDS, DRAFT])}")
        losses = parse(settings.loss)
        check_folder(settings.out, "--out")
        check_proposer(settings.proposer)
        if settings.max_minutes is not None and world_size() > 1:
            raise OutriderError("--max-minutes works with one process; use --epochs with several")
        self._target = model_folder(settings.engine.target)
        self._has_sources = reads_sources(self._target)
        train_prompts, eval_prompts = self._read_prompts()
        self._out = Path(settings.out).expanduser()
        self._identity = _identity(kind, settings, self._target)
        state = _read_resumable(self._out, self._identity, overwrite=settings.overwrite)
        machine.use_threads(settings.engine.threads)
        self._heap = Heap()
        torch.manual_seed(settings.seed)
        num_prompts = max(len(train_prompts), len(eval_prompts))
        self.setup = TrainSetup(kind, settings, self._target, num_prompts=num_prompts)
        self._llm = LLM.from_parts(self.setup.parts)
        self._joined = join_group(self.setup.parts.device)
        self.schedule, self._collator = self._prepare_data(train_prompts)
        trainee = self.setup.trainee
        if state is None:
            trainee.begin(lambda: self.schedule.samples(0))
        steps = settings.ttt_length or trainee.steps
        lr = settings.lr or trainee.lr
        self._trainer = Trainer(trainee, losses=losses, steps=steps, decay=settings.loss_decay, lr=lr)
        self._cycle = 0  # generation cycles that are done
        seconds = 0.0  # of earlier runs
        if state:
            self._trainer.load(state)
            self._cycle = state["cycle"]
            seconds = state.get("seconds", 0.0)
        self._budget: TimeBudget | None = None
        if settings.max_minutes is not None:
            self._budget = TimeBudget(60 * settings.max_minutes, used=seconds)
        self._cycle_seconds = 0.0  # duration of the last generation cycle of this run
        self._evaluation_seconds = 0.0  # duration of the last evaluation of this run
        self.evaluator = Evaluator(
            self.setup.parts,
            list(map(self._eval_prompt, eval_prompts)),
            [prompt.category for prompt in eval_prompts],
            k=settings.k,
            tokens=eval_tokens or EVAL_TOKENS,
            seed=settings.seed,
        )

    def costs(self) -> CostModel:
        """Measure what passes of the target and of the draft cost. The contents of their caches are lost."""
        parts = self.setup.parts
        return known_costs(parts.target, [draft_model(self.setup.trainee.proposer(parts.setup))])[0]

    def run(
        self, *, on_evaluation: Callable[[Mapping[str, Any], float], None] | None = None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Train to the end.

        Args:
            on_evaluation: is called after each evaluation, with its figures and the share of the training that is done.

        Returns:
            The results as a JSON document, and the lines of the log. Only the process of rank 0 has log lines.

        Raises:
            OutriderError: the disk is full, or the loss is not finite. The files of the last save are intact.
        """
        if rank():
            while not self._is_finished():
                self.run_cycle()
            if self._joined:
                leave_group()
            return self._document({}), []
        log = Log(self._out, begin=self._cycle, events=self._settings.tensorboard)
        evaluation = log.last_evaluation
        if self._is_finished():  # an earlier run may have been killed between two files
            self._write_draft(evaluation)
        with stage("training", 1.0) as training:
            training.advance(self._share())
            finished = self._is_finished()
            while not finished:
                if self._budget is not None:
                    self._budget.start()
                stats, seconds = self.run_cycle()
                if self._budget is not None:
                    self._budget.stop()  # evaluations and saves do not count
                finished = self._is_finished()
                evaluated = finished or self._evaluation_due()
                if evaluated:
                    evaluation = self._evaluate()
                log.add(self._cycle, stats, evaluation, seconds)
                if finished or self._save_due():
                    self._save(finished)
                    self._write_draft(evaluation)
                done = 1.0 if finished else self._share()
                training.title = f"training: {_status(stats, evaluation)}"
                training.advance(done - training.done, f"{done:.0%} of {training.title}" if evaluated else "")
                if evaluated and on_evaluation is not None:
                    on_evaluation(evaluation, done)
        log.close()
        if self._joined:
            leave_group()
        return self._document(evaluation), log.lines

    def _evaluate(self) -> dict[str, Any]:
        start = perf_counter()
        evaluation = self.evaluator.measure(self.setup.trainee)
        self._evaluation_seconds = perf_counter() - start
        return evaluation

    def _is_finished(self) -> bool:
        if self._budget is None:
            return self._cycle >= self.schedule.num_cycles
        return self._cycle > 0 and self._budget.is_over(self._cycle_seconds)

    def _share(self, cycle_share: float = 0.0) -> float:
        """Return the share of the training that is done; `cycle_share` is that of the current generation cycle."""
        if self._budget is None:
            return (self._cycle + cycle_share) / self.schedule.num_cycles
        return self._budget.share

    def _evaluation_due(self) -> bool:
        every = self._settings.eval_every
        if self._budget is None or not every:
            return self._is_due(every)
        # Evaluations of a slow target may take long. Let training take most of the time.
        interval = max(self._budget.seconds / _EVALUATIONS, 3 * self._evaluation_seconds)
        return self._budget.is_due("evaluation", interval)

    def _save_due(self) -> bool:
        if self._budget is None:
            return self._is_due(self._settings.save_every)
        return self._budget.is_due("save", _SAVE_SECONDS)

    def _is_due(self, every: int) -> bool:
        """Return whether something is due that happens every `every` cycles. 0: never."""
        return bool(every and self._cycle % every == 0)

    def _save(self, finished: bool) -> None:
        facts = {}
        if self._budget is not None:
            # The last cycle may end a little early. A finished training stays finished.
            facts["seconds"] = max(self._budget.elapsed, self._budget.seconds if finished else 0.0)
        self._trainer.save(self._out, cycle=self._cycle, identity=self._identity, **facts)

    def run_cycle(self) -> tuple[list[StepStats], dict[str, float]]:
        """Run one generation cycle. Return the statistics of its steps, and the seconds of answers and steps."""
        settings = self._settings
        start = perf_counter()
        # Each process seeds its generator anew in each cycle, because a saved state only has the generator of rank 0.
        torch.manual_seed(derive_seed(derive_seed(settings.seed, self._cycle + 1), rank()))
        samples = self.schedule.samples(self._cycle)
        answered = perf_counter()
        stats = []
        steps = self.schedule.steps(samples, self._cycle)
        for i, micro_batches in enumerate(steps):
            batches = (
                self._collator.collate(group, train_on_prompts=settings.train_on_prompts) for group in micro_batches
            )
            stats.append(self._trainer.train(batches, progress=self._share(i / len(steps))))
            self._heap.tidy()
        self._cycle += 1
        self._cycle_seconds = perf_counter() - start
        return stats, {"answers": answered - start, "steps": perf_counter() - answered}

    def _read_prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Return the prompts for training and those for the evaluation. Warn about prompts that are in both.

        Raises:
            OutriderError: a file cannot be read, or there are too few prompts.
        """
        settings = self._settings
        prompts = read_prompts(settings.data, limit=settings.max_prompts, with_sources=self._has_sources)
        train_prompts, eval_prompts = split(
            prompts, settings.eval_data, seed=settings.seed, with_sources=self._has_sources
        )
        self._num_repeated = count_repeated(train_prompts, eval_prompts)
        if self._num_repeated and not rank():
            _log.warning(
                "%d of the %d evaluation prompts are also training prompts, so tau will be too"
                " high; give other prompts with --eval-data",
                self._num_repeated,
                len(eval_prompts),
            )
        return train_prompts, eval_prompts

    def _prepare_data(self, prompts: Sequence[Prompt]) -> tuple[PromptSchedule, Collator | DatasetCollator]:
        """Encode the prompts of this process. Return the schedule of samples, and the collator that batches them."""
        settings = self._settings
        parts = self.setup.parts
        recorder = self.setup.recorder
        trainee = self.setup.trainee
        numbers = range(rank(), len(prompts), world_size())  # of the prompts of this process
        most_per_process = -(-len(prompts) // world_size())
        if not numbers:
            raise OutriderError(
                f"{len(prompts)} prompts are too few for {world_size()} processes; give more"
                " prompts, or start fewer processes"
            )
        collator = Collator(
            trainee.aux_states, recorder.layers, self.setup.tables, trainee.ids, views=trainee.shared_kv
        )
        first = self._eval_prompt(prompts[rank()])
        collator.check(parts.target, first.tokens[:_CHECK_TOKENS], first.source_token_ids)
        if settings.train_target is not None:
            texts = {i: encode_prompt(parts.tokenizer, prompts[i], whole=True)[: parts.context] for i in numbers}
            schedule = PromptSchedule(DatasetTexts(texts), numbers, settings, most_per_process=most_per_process)
            return schedule, DatasetCollator(trainee.ids, parts.vocab)
        generator = AnswerGenerator(
            parts,
            recorder,
            self._encode_prompts(prompts, numbers),
            settings,
            cache=self._feature_cache(),
        )
        return PromptSchedule(generator, numbers, settings, most_per_process=most_per_process), collator

    def _encode_prompts(self, prompts: Sequence[Prompt], numbers: range) -> dict[int, EncodedPrompt]:
        """Return the tokens of prompts by number, cut to half of the context, which leaves as much for the answer."""
        limit = self.setup.parts.context // 2
        encoded = {i: self._encode(prompts[i]) for i in numbers}
        num_cut = sum(len(prompt.tokens) > limit for prompt in encoded.values())
        if num_cut and not rank():
            _log.warning(
                "%d of %d prompts are longer than half of the context and are cut to %d tokens",
                num_cut,
                len(numbers),
                limit,
            )
        return {i: prompt._replace(tokens=prompt.tokens[:limit]) for i, prompt in encoded.items()}

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        parts = self.setup.parts
        if self._has_sources:
            return encode_sourced_prompt(self._llm, prompt)
        return EncodedPrompt(encode_prompt(parts.tokenizer, prompt))

    def _feature_cache(self) -> FeatureCache | None:
        """Open the cache in `--cache-dir`, if this option is set."""
        settings = self._settings
        recorder = self.setup.recorder
        if settings.cache_dir is None:
            return None
        return FeatureCache(
            settings.cache_dir,
            gigabytes=settings.cache_dir_gb or _DEFAULT_CACHE_GB,
            origin=origin_of(self.setup.parts, self._target, recorder.kv_layers),
            layers=recorder.layers,
        )

    def _eval_prompt(self, prompt: Prompt) -> EncodedPrompt:
        """Return what the target continues: a prompt, or with --train-target the first half of a text."""
        parts = self.setup.parts
        if self._settings.train_target is None:
            encoded = self._encode(prompt)
            return encoded._replace(tokens=encoded.tokens[: parts.context // 2])
        tokens = encode_prompt(parts.tokenizer, prompt, whole=True)[: parts.context // 2]
        return EncodedPrompt(tokens[: max(len(tokens) // 2, 1)])

    def _write_draft(self, evaluation: Mapping[str, Any]) -> None:
        """Write the draft, a JSON file that describes the training, and a model card."""
        self.setup.trainee.save(self._out)
        document = self._document(evaluation)
        facts = {**document, "arguments": as_json(self._settings), "data": _data_hashes(self._settings)}
        write(self._out / FACTS, json.dumps(facts, indent=2) + "\n")
        write(self._out / CARD, model_card(facts))

    def _document(self, evaluation: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results as a JSON document."""
        return {
            "benchmark": "outrider train",
            "kind": self._kind,
            "out": self._settings.out,
            "target": self._target.name,
            "trained_target": None if self._settings.train_target is None else str(Path(self._settings.out) / TARGET),
            "cycles": self._cycle,
            "steps": self._trainer.step,
            "parameters": sum(weight.numel() for weight in self.setup.trainee.module.parameters()),
            "k": self._settings.k,
            "evaluation": dict(evaluation),
            "held_out_in_data": self._num_repeated,
            "seconds": round(perf_counter() - self._start_time, 1),
            "hardware": machine.hardware(str(self.setup.parts.device)),
            "versions": machine.versions(),
            "commit": machine.commit(),
        }


def _read_resumable(folder: Path, identity: str, *, overwrite: bool) -> dict[str, Any] | None:
    """Return the state of an interrupted training in a folder. None for a new training."""
    is_trained = (folder / FACTS).is_file()
    has_model = (folder / "config.json").is_file()
    if has_model and not (folder / STATE).is_file() and not (is_trained and overwrite):
        hint = ", or --overwrite to train it anew" if is_trained else ""
        raise OutriderError(f"{folder} has a model, but no training that can be resumed; use another --out{hint}")
    state = None if overwrite else read_state(folder)
    if state and state["identity"] != identity:
        raise OutriderError(
            f"{folder} has a training with other options; use another --out, or --overwrite to start anew"
        )
    return state


def _identity(kind: str, settings: Settings, target: Path) -> str:
    """Return what a run must have in common with the run that it resumes, as JSON."""
    draft = model_fingerprint(model_folder(settings.init_from)) if settings.init_from else None
    identity = {"kind": kind, "target": model_fingerprint(target), "draft": draft, "processes": world_size()}
    if settings.init_target:
        identity["draft_target"] = model_fingerprint(model_folder(settings.init_target))
    return json.dumps({**identity, **settings.identity(), "data": _data_hashes(settings)}, sort_keys=True)


def _data_hashes(settings: Settings) -> list[str]:
    """Return the SHA-256 hashes of the data files."""
    files = [*settings.data, *([settings.eval_data] if settings.eval_data else [])]
    return [hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest() for file in files]


def _status(stats: Sequence[StepStats], evaluation: Mapping[str, Any]) -> str:
    """Return the text beside the progress bar: loss, acceptance by position, and tau."""
    parts = [f"loss {stats[-1].loss:.3f}"]
    acceptance = next((step.acceptance for step in stats if step.alpha_counts), [])
    if acceptance:
        rates = " ".join(f"{100 * rate:.0f}" for rate in acceptance)
        parts.append(f"acceptance {rates}%")
    if evaluation:
        taus = ", ".join(f"{result['tau']:.2f}" for result in evaluation.values())
        parts.append(f"tau {taus}")
    return ", ".join(parts)
