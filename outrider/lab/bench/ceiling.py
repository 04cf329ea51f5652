"""Measures the speed of an engine whose draft costs nothing: recorded outputs, at chosen acceptances."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from outrider.core.planner import FixedPlanner
from outrider.core.prompts import read_prompts
from outrider.drafting.propose.lookup.replay import Recording, ReplayProposer
from outrider.engine.build import assemble
from outrider.lab.bench.figures import OVERALL, Spread, compare
from outrider.lab.bench.run import load
from outrider.lab.bench.settings import Settings
from outrider.lab.common.conversations import each_turn
from outrider.lab.common.jobs import Condition, PromptBatch, make_batches
from outrider.lab.common.timeline import run_jobs
from outrider.lab.common.trial import Trial, Variant
from outrider.lab.common.turns import Turns
from outrider.llm import LLM
from outrider.runtime import machine
from outrider.runtime.progress import stage
from outrider.runtime.report.console import NONE, new_table

_KS = (2, 4, 8, 16)  # unless --sweep gives others


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The figures of one acceptance, batch size and draft length."""

    acceptance: float  # of each draft token behind an accepted one
    batch: int
    k: int
    tokens_per_s: Spread | None
    speedup: Spread | None  # over plain decoding in the same repeat
    tau: float


def run_ceiling(settings: Settings) -> dict[str, Any]:
    """Record plain decoding, replay it with each acceptance, batch size and draft length, and return a JSON document.

    Raises:
        OutriderError: the prompts cannot be read, or do not fit the target.
    """
    prompts = read_prompts(settings.prompts, limit=settings.limit)
    with stage("loading models"):
        llm = load(replace(settings, engine=replace(settings.engine, proposer="none", plan=None)))
        prompts = each_turn(llm, prompts, max_tokens=settings.max_tokens)
    batches = {}
    for size in settings.batches:
        condition = Condition(batch=size, temperature=0.0)
        batches[condition] = make_batches(llm, prompts, condition, max_tokens=settings.max_tokens, seed=settings.seed)
    with stage("recording plain decoding"):
        engines = _Engines(llm, [each for group in batches.values() for each in group])
    trials: dict[Condition, list[Trial]] = {condition: [] for condition in batches}
    turns = Turns(
        batches=batches,
        variants=lambda condition: _variants(settings, condition),
        engine_for=engines.engine_for,
        repeats=settings.repeats,
    )
    for condition, group in turns.run():
        trials[condition] += group
    return {
        "benchmark": "outrider bench --ceiling",
        "arguments": settings.arguments(),
        "kernels": llm.parts.target.kernels,
        **llm.parts.precision.as_dict(),
        "hardware": machine.hardware(str(llm.parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "plain_tokens_per_s": {
            condition.batch: asdict(speed) if (speed := compare(group, 0)[OVERALL].plain.tokens_per_s) else None
            for condition, group in trials.items()
        },
        "ceilings": [asdict(each) for group in trials.values() for each in _ceilings(settings, group)],
    }


def show_ceiling(document: dict[str, Any], console: Console) -> None:
    """Print the speedups over plain decoding, with a column for each draft length."""
    ceilings: Sequence[dict[str, Any]] = document["ceilings"]
    ks = list(dict.fromkeys(each["k"] for each in ceilings))
    table = new_table("Speedup over plain decoding with a draft that costs nothing, and tau")
    for name in ("batch", "acceptance", "plain tokens/s", *(f"k {k}" for k in ks)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in range(0, len(ceilings), len(ks)):
        group = ceilings[row : row + len(ks)]
        plain = document["plain_tokens_per_s"][group[0]["batch"]]
        table.add_row(
            str(group[0]["batch"]),
            f"{group[0]['acceptance']:g}",
            f"{plain['median']:.0f}" if plain else NONE,
            *map(_cell, group),
        )
    console.print(table)
    console.print("A speedup is a median over repeats with its range, then tau. Each repeat measures all in turns.")


class _Engines:
    """Engines with the same loaded target. Each replays what the target decoded plainly."""

    def __init__(self, llm: LLM, batches: Sequence[PromptBatch]) -> None:
        """Record the outputs of all `batches`."""
        self._llm = llm
        recordings: dict[Recording, None] = {}  # each once
        for batch in batches:
            for seq in run_jobs(llm, batch.jobs).seqs:
                prompt = seq.request.prompt_token_ids
                recordings[Recording(prompt, tuple(seq.token_ids[len(prompt) :]))] = None
        self._recordings = tuple(recordings)

    def engine_for(self, variant: Variant) -> LLM:
        """Return the engine of plain decoding, or of one acceptance and draft length."""
        parts = self._llm.parts
        acceptance = 0.0 if variant.plain else float(variant.proposer.partition(":")[2])
        proposer = ReplayProposer(parts.setup, () if variant.plain else self._recordings, acceptance=acceptance)
        assert isinstance(variant.k, int)
        planner = FixedPlanner(variant.k)
        engine = assemble(parts.loaded, proposer=proposer, verifier=parts.verifier, planner=planner)
        return LLM.from_parts(replace(parts, engine=engine, proposer=proposer, planner=planner))


def _variants(settings: Settings, condition: Condition) -> list[Variant]:
    plain = Variant(proposer="", k=0, batch=condition.batch, temperature=condition.temperature)
    drafting = [
        replace(plain, proposer=f"replay:{acceptance:g}", k=k)
        for acceptance in settings.ceiling
        for k in settings.ks or _KS
    ]
    return [plain, *drafting]


def _ceilings(settings: Settings, trials: Sequence[Trial]) -> list[Ceiling]:
    """Return the figures of the trials of one batch size."""
    ceilings = []
    for variant in _variants(settings, Condition(batch=trials[0].variant.batch, temperature=0.0))[1:]:
        own = [trial for trial in trials if trial.variant.plain or trial.variant.proposer == variant.proposer]
        assert isinstance(variant.k, int)
        figures = compare(own, variant.k)[OVERALL].speculative
        ceilings.append(
            Ceiling(
                acceptance=float(variant.proposer.partition(":")[2]),
                batch=variant.batch,
                k=variant.k,
                tokens_per_s=figures.tokens_per_s,
                speedup=figures.speedup,
                tau=figures.stats.tau,
            )
        )
    return ceilings


def _cell(ceiling: dict[str, Any]) -> str:
    speedup = ceiling["speedup"]
    if speedup is None:
        return NONE
    return f"{speedup['median']:.2f} [dim]{speedup['min']:.2f}–{speedup['max']:.2f}[/dim], {ceiling['tau']:.1f}"
