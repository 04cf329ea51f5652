"""What a pass costs here, as the planner sees it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.bench.rates import measure_rates
from outrider.llm import LLM
from outrider.plan.calibrate import cost_file, known_costs
from outrider.plan.pass_cost import PassCost
from outrider.propose.registry import draft_model
from outrider.system import machine


def run_calibration(llm: LLM, *, progress: Console) -> dict[str, Any]:
    """Measure the costs anew, keep them for `--k auto`, and return them, fit for JSON."""
    parts = llm.parts
    draft = draft_model(parts.proposer)
    with progress.status("measuring passes"):
        rates = measure_rates(parts.device, parts.dtype)
        costs = known_costs(parts.target, draft, fresh=True)
    return {
        "benchmark": "outrider bench --calibrate",
        "kernels": parts.target.kernels,
        "dtype": str(parts.dtype).removeprefix("torch."),
        "hardware": machine.hardware(str(parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "rates": rates.as_dict(),
        "weight_bytes": parts.target.bytes(),
        "file": cost_file(parts.target, draft).name,
        "costs": asdict(costs),
    }


def show_calibration(document: dict[str, Any], console: Console) -> None:
    """A table for people."""
    costs = document["costs"]
    passes = {name: PassCost(**costs[name]) for name in ("target", "draft") if costs[name]}
    table = Table(title="A pass, milliseconds", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("columns", justify="right")
    for name in passes:
        table.add_column(name, justify="right")
        table.add_column("a column", justify="right")
    for columns in passes["target"].tokens:
        seconds = [each(columns, rows=1, cached=0) for each in passes.values()]
        cells = [f"{1e3 * value:.2f}" for took in seconds for value in (took, took / columns)]
        table.add_row(str(columns), *cells)
    console.print(table)
    for name, cost in passes.items():
        read, met = (1e6 * cost.entry, 1e6 * cost.pair)
        console.print(f"{name}: 1000 cached tokens add {read:.3f} ms a row, and {met:.3f} ms for each column.")
    console.print(f"A column is a token that is fed or guessed. Kernels: {document['kernels']}.")
