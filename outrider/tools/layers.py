"""The command `layers`: find the layers that a target can skip when it drafts for itself."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.core.prompts import read_prompts
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.runtime import machine
from outrider.runtime.progress import stage
from outrider.runtime.report.console import count_text
from outrider.tools.layer_search import Figures, LayerSearch, Timing, generate_texts, measure, split_prompts
from outrider.tools.settings import LayersSettings


def run_layers(settings: LayersSettings) -> dict[str, Any]:
    """Run the search and report figures of held-out prompts.

    Args:
        settings: the target, the prompts, and how many sets of layers to try.

    Returns:
        The JSON document.

    Raises:
        OutriderError: there are not enough prompts, or the target has too few layers.
    """
    llm = LLM(config=settings.engine)
    target = llm.parts.target
    if llm.parts.source_rules is not None:
        raise OutriderError("layers does not support encoder-decoder targets; use a decoder-only target")
    with stage("generating texts") as search_stage:
        search_prompts, held_out_prompts = split_prompts(
            read_prompts(settings.prompts, limit=settings.limit), settings.seed
        )
        search_texts = generate_texts(llm, search_prompts, settings.max_tokens)
        held_out_texts = generate_texts(llm, held_out_prompts, settings.max_tokens)
        if not search_texts or not held_out_texts:
            raise OutriderError("the target generates no tokens after these prompts; give other prompts")
        search = LayerSearch(target, search_texts, max_trials=settings.max_trials, on_progress=search_stage.describe)
        best = list(filter(None, (search.best_exit(), search.best_skip())))
        searched = {figures.expression: figures for figures in best}
        held_out = [search.report(figures, held_out_texts) for figures in searched.values()]
        timings = [measure(target, figures, held_out_texts[0]) for figures in held_out]
    return {
        "benchmark": "outrider layers",
        "layers": search.layers,
        "tried": search.tried,
        "max_trials": settings.max_trials,
        "prompts": {"searched": len(search_texts), "held_out": len(held_out_texts)},
        "seed": settings.seed,
        "kernels": target.kernels,
        **llm.parts.precision.as_dict(),
        "hardware": machine.hardware(str(llm.parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "found": [_entry(*results) for results in zip(searched.values(), held_out, timings, strict=True)],
    }


def _entry(searched: Figures, held_out: Figures, timing: Timing) -> dict[str, Any]:
    return {
        **asdict(held_out),
        "speedup": held_out.speedup,
        "speedup_searched": searched.speedup,
        "draft_ms": timing.draft,
        "plain_ms": timing.plain,
        "verify_ms": timing.verify,
        "speedup_by_time": timing.speedup(held_out),
    }


def show_layers(document: dict[str, Any], console: Console) -> None:
    """Print a table and the proposer expression to use."""
    table = Table(title="The target as its own draft, on held-out prompts", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("proposer", no_wrap=True)
    columns = ("k", "layers", "agreement, %", "tau", "draft cost", "speedup", "draft, ms", "pass, ms", "by time")
    for name in columns:
        table.add_column(name, justify="right")
    for entry in document["found"]:
        table.add_row(
            entry["expression"],
            str(entry["k"]),
            f"{len(entry['layers'])} of {document['layers']}",
            f"{100 * entry['agreement']:.0f}",
            f"{entry['tau']:.2f}",
            f"{entry['cost']:.2f}",
            f"{entry['speedup']:.2f}",
            f"{entry['draft_ms']:.2f}",
            f"{entry['plain_ms']:.2f}",
            f"{entry['speedup_by_time']:.2f}",
        )
    console.print(table)
    counts = document["prompts"]
    console.print(
        f"{count_text(document['tried'], 'set')} of layers tried on {count_text(counts['searched'], 'prompt')}. The"
        f" figures are from {count_text(counts['held_out'], 'other')}, greedy. draft cost: of one draft token, in"
        " passes of the target. speedup: expected if a pass takes the time to read its weights. by time: from measured"
        " pass times.",
        highlight=False,
    )
    best = max(document["found"], key=lambda entry: entry["speedup"])
    if max(best["speedup"], best["speedup_by_time"]) > 1:
        options = f"--proposer {best['expression']} --k {best['k']}"
        console.print(f"Use it with {options}. Measure the speedup with `outrider bench`.", highlight=False)
    else:
        console.print(
            "No part of this target is expected to pay as its draft. Use a trained draft or ngram.", highlight=False
        )
