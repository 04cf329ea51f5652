"""The command `outrider media bench`: speed against quality, with the controls of the gate."""

from functools import partial
from pathlib import Path
from time import perf_counter, process_time

from rich.console import Console

from outrider.media.command.settings import BenchSettings
from outrider.media.contract import Router
from outrider.media.evaluation.ablations import Controls, controls, first_block_share
from outrider.media.evaluation.plot import check_plot_file, draw_plot
from outrider.media.evaluation.summary import Summary, best_gate, summarize, total_seconds
from outrider.media.evaluation.table import summary_table
from outrider.media.evaluation.thresholds import draft_scores, thresholds_at
from outrider.media.evaluation.trials import Trial, run_trials
from outrider.media.models.store import MediaModels, load_models
from outrider.media.routers import DrafterOnly, QualityGate, TargetOnly
from outrider.runtime import machine
from outrider.runtime.grouping import group_by
from outrider.runtime.progress import stage
from outrider.runtime.report.console import Document, print_document

_REJECTED = (0.02, 0.05, 0.1, 0.2, 0.35, 0.6)  # shares of drafts that the default thresholds reject
_PROMPTS_FOR_THRESHOLDS = 64  # whose drafts give the default thresholds


def bench(settings: BenchSettings, *, as_json: bool) -> None:
    """Measure, print tables, and write the plot if one is asked for."""
    file = check_plot_file(settings.plot) if settings.plot else None
    machine.use_threads(settings.threads)
    clock = process_time if settings.processor_time else perf_counter
    models = load_models(settings.models, eager_commits=settings.eager_commits, clock=clock)
    run = _Bench(settings, models, Console(stderr=True))
    run.measure()
    print_document(run.document(), run.show, as_json=as_json, write=partial(run.plot, file) if file else None)


class _Bench:
    """The measurement, in two parts: the gates, then the controls of one gate."""

    def __init__(self, settings: BenchSettings, models: MediaModels, console: Console) -> None:
        self._settings = settings
        self._models = models
        self._console = console
        self._prompts = models.language.random_captions(settings.num_prompts, settings.seed)
        self._target, self._drafter = TargetOnly(), DrafterOnly()
        self._given = [QualityGate(each, aggregate=settings.aggregate) for each in settings.threshold_list()]
        for gate in self._given:
            models.engine.check(gate)
        self.gates: list[Summary] = []
        self.controls: list[Summary] = []
        self.passes: dict[str, float] = {}
        self.base: list[Summary] = []  # target-only and drafter-only
        self.chosen = ""
        self.first_block: float | None = None

    def measure(self) -> None:
        settings = self._settings
        scores = draft_scores(
            self._models.engine, self._prompts[:_PROMPTS_FOR_THRESHOLDS], aggregate=settings.aggregate
        )
        gates = self._given or [
            QualityGate(each, aggregate=settings.aggregate) for each in thresholds_at(scores, _REJECTED)
        ]
        trials = self._run([self._target, self._drafter, *gates], "gates")
        self.passes = _passes(trials, self._target.name)
        target, drafter, *self.gates = summarize(trials, reference=self._target.name)
        self.base = [target, drafter]
        number = best_gate(self.gates, self._settings.quality)
        chosen = gates[number]
        self.chosen = chosen.name
        compared = self._controls(chosen, self.gates[number], scores)
        trials = self._run([self._target, *compared.all()], "controls")
        _, *self.controls = summarize(trials, reference=self._target.name)
        (first_only,) = (each for each in self.controls if each.router == compared.first_only.name)
        self.first_block = first_block_share(drafter, first_only, self.gates[number])

    def _controls(self, gate: QualityGate, measured: Summary, scores: list[float]) -> Controls:
        other = "mean" if gate.aggregate == "min" else "min"
        rejected = sum(score < (gate.threshold or 0.0) for score in scores) / len(scores)
        others = draft_scores(self._models.engine, self._prompts[:_PROMPTS_FOR_THRESHOLDS], aggregate=other)
        (threshold,) = thresholds_at(others, [rejected])
        blocks = self._models.engine.max_blocks
        return controls(gate, measured, other_threshold=threshold, blocks=blocks)

    def _run(self, routers: list[Router], description: str) -> list[Trial]:
        rounds = self._settings.rounds
        with stage(description, len(self._prompts) * len(routers)) as videos:
            return run_trials(
                self._models.engine,
                self._models.held_out_scorer,
                routers,
                self._prompts,
                rounds=rounds,
                advance=videos.advance,
            )

    def document(self) -> Document:
        return {
            "exact": False,
            "prompts": len(self._prompts),
            "rounds": self._settings.rounds,
            "blocks": self._models.engine.max_blocks,
            "compute_ratio": self._models.compute_ratio,
            "commits": "eager" if self._settings.eager_commits else "when needed",
            "time": "processor" if self._settings.processor_time else "wall",
            "block_ms": self.passes,
            "base": _json(self.base),
            "gates": _json(self.gates),
            "chosen": self.chosen,
            "controls": _json(self.controls),
            "first_block_share": self.first_block,
            "hardware": machine.hardware("cpu"),
            "versions": machine.versions(),
            "commit": machine.commit(),
        }

    def show(self, document: Document, console: Console) -> None:
        console.print(
            summary_table(f"Gates, {document['prompts']} prompts ([red]not exact[/red])", self.base + self.gates)
        )
        console.print(summary_table(f"Controls of {self.chosen}", self.controls))
        times = ", ".join(f"{name} {ms:.2f}" for name, ms in document["block_ms"].items())
        console.print(f"ms of a block: {times}", highlight=False)
        console.print(
            f"a pass of the target takes {document['compute_ratio']:.1f} times the drafter's work", highlight=False
        )
        if self.first_block is not None:
            share = f"{100 * self.first_block:.0f} %"
            console.print(f"the first block of the target alone brings {share} of the gate's gain", highlight=False)

    def plot(self, file: Path, document: Document) -> None:
        strides = [each for each in self.controls if each.router.startswith("stride")]
        others = [each for each in self.controls if not each.router.startswith("stride")]
        groups: list[tuple[str, str, bool, list[Summary]]] = [
            ("quality gate", "o", True, self.gates),
            ("stride", "s", True, strides),
            *((each.router, "x", False, [each]) for each in others),
            *((each.router, "D", False, [each]) for each in self.base),
        ]
        draw_plot(groups, file)


def _json(summaries: list[Summary]) -> list[Document]:
    return [each.to_json() for each in summaries]


def _passes(trials: list[Trial], target: str) -> dict[str, float]:
    """Return the milliseconds of the parts of a block."""
    routers = group_by(trials, lambda trial: trial.router)
    own, drafting = routers[target], routers[DrafterOnly().name]
    spent = total_seconds(own)
    blocks = sum(trial.blocks for trial in own)
    scored = sum(trial.scored for trial in trials)
    return {
        "generate": 1e3 * spent.generate / blocks,
        "commit": 1e3 * spent.commit / max(1, blocks - len(own)),  # the last block of an output is not committed
        "draft": 1e3 * total_seconds(drafting).draft / sum(trial.blocks for trial in drafting),
        "decode": 1e3 * spent.decode / blocks,
        "score": 1e3 * total_seconds([trial for trial in trials if trial.scored]).score / max(1, scored),
    }
