"""The command `layers`: find the layers that a target can skip when it drafts for itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.measure.prompts import read_prompts
from outrider.report.console import counted
from outrider.system import machine
from outrider.tools.layer_search import Figures, LayerSearch, Timing, halves, measure, write

_ROWS = 4  # sequences at once


def run_layers(
    llm: LLM, *, prompts: str | None, limit: int | None, max_trials: int, max_tokens: int, seed: int, progress: Console
) -> dict[str, Any]:
    """Run the search and report figures of held-out prompts.

    Args:
        llm: the target, without a proposer.
        prompts: a file with JSON lines; None: the embedded set.
        limit: prompts of each category.
        max_trials: most sets of layers to try.
        max_tokens: most output tokens per prompt.
        seed: the seed of the split of the prompts.
        progress: the console of the progress bar.

    Returns:
        The JSON document.

    Raises:
        OutriderError: there are not enough prompts, or the target has too few layers.
    """
    target = llm.parts.target
    with progress.status("writing texts") as status:
        parts = halves(read_prompts(prompts, limit=limit), seed)
        ours, held = (write(llm, part, max_tokens) for part in parts)
        if not ours or not held:
            raise OutriderError("the target ends its texts at once; give prompts that it goes on with")
        search = LayerSearch(target, ours, max_trials=max_trials, told=status.update)
        found = {each.expression: each for each in (search.best_exit(), search.best_skip()) if each}
        reported = [search.report(each, held) for each in found.values()]
        timed = [measure(target, each, held[0]) for each in reported]
    return {
        "benchmark": "outrider layers",
        "layers": search.layers,
        "tried": search.tried,
        "max_trials": max_trials,
        "prompts": {"searched": len(ours), "held_out": len(held)},
        "seed": seed,
        "kernels": target.kernels,
        "dtype": str(llm.parts.dtype).removeprefix("torch."),
        "hardware": machine.hardware(str(llm.parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "found": [_entry(*each) for each in zip(found.values(), reported, timed, strict=True)],
    }


def _entry(searched: Figures, held: Figures, timing: Timing) -> dict[str, Any]:
    return {
        **asdict(held),
        "speedup": held.speedup,
        "speedup_searched": searched.speedup,
        "guess_ms": timing.draft,
        "plain_ms": timing.plain,
        "verify_ms": timing.verify,
        "speedup_by_time": timing.speedup(held),
    }


def show_layers(document: dict[str, Any], console: Console) -> None:
    """Print a table and the proposer expression to use."""
    table = Table(title="The target as its own draft, on held-out prompts", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("proposer", no_wrap=True)
    for name in ("k", "layers", "agrees, %", "tau", "guess, passes", "speedup", "guess, ms", "pass, ms", "by time"):
        table.add_column(name, justify="right")
    for each in document["found"]:
        table.add_row(
            each["expression"],
            str(each["k"]),
            f"{len(each['accepted'])} of {document['layers']}",
            f"{100 * each['agreement']:.0f}",
            f"{each['tau']:.2f}",
            f"{each['cost']:.2f}",
            f"{each['speedup']:.2f}",
            f"{each['guess_ms']:.2f}",
            f"{each['plain_ms']:.2f}",
            f"{each['speedup_by_time']:.2f}",
        )
    console.print(table)
    counts = document["prompts"]
    console.print(
        f"{counted(document['tried'], 'set')} of layers tried on {counted(counts['searched'], 'prompt')}; the figures"
        f" are of {counted(counts['held_out'], 'other')}, greedy. speedup: expected where a pass takes as long as its"
        " weights take to read; by time: from the passes' times here, which the search does not look at.",
        highlight=False,
    )
    best = max(document["found"], key=lambda each: each["speedup"])
    if max(best["speedup"], best["speedup_by_time"]) > 1:
        use = f"--proposer {best['expression']} --k {best['k']}"
        console.print(f"Use it as: {use}. What it is worth in the end, `outrider bench` measures.", highlight=False)
    else:
        console.print(
            "No part of this target is expected to pay as its draft; a trained draft or ngram will do better.",
            highlight=False,
        )
