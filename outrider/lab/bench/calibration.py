"""Measures the time of forward passes, from which the planner computes what a round costs."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.drafting.plan.known_costs import cost_file, known_costs
from outrider.drafting.plan.pass_cost import PassCost
from outrider.drafting.propose.leaves import draft_model
from outrider.lab.bench.rates import measure_rates
from outrider.llm import LLM
from outrider.runtime import machine
from outrider.runtime.progress import stage


def run_calibration(llm: LLM) -> dict[str, Any]:
    """Measure the pass costs again, store them for `--k auto`, and return them as a JSON document."""
    parts = llm.parts
    draft = draft_model(parts.proposer)
    with stage("measuring passes"):
        rates = measure_rates(parts.device, parts.dtype)
        (costs,) = known_costs(parts.target, [draft], whole=True)
    return {
        "benchmark": "outrider bench --calibrate",
        "kernels": parts.target.kernels,
        **parts.precision.as_dict(),
        "hardware": machine.hardware(str(parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "rates": rates.as_dict(),
        "weight_bytes": parts.target.bytes(),
        "file": cost_file(parts.target).name,
        "costs": asdict(costs),
    }


def show_calibration(document: dict[str, Any], console: Console) -> None:
    """Print the pass costs as a table."""
    costs = document["costs"]
    pass_costs = {name: PassCost(**costs[name]) for name in ("target", "draft") if costs[name]}
    table = Table(title="Time of a pass, ms", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("tokens", justify="right")
    for name in pass_costs:
        table.add_column(name, justify="right")
        table.add_column("per token", justify="right")
    target = pass_costs["target"]
    experts = dict(zip(target.tokens, target.experts, strict=False))
    if target.full_tokens:
        table.add_column(f"target, of each of {target.slots} sequences", justify="right")
    if experts:
        table.add_column("experts", justify="right")
    for tokens in target.tokens:
        cells = []
        for cost in pass_costs.values():
            seconds = cost(tokens, seqs=1, cached=0)
            cells += [f"{1e3 * seconds:.2f}", f"{1e3 * seconds / tokens:.2f}"]
        if target.full_tokens:
            cells.append(f"{1e3 * target.base(tokens * target.slots, seqs=target.slots):.2f}")
        if experts:
            cells.append(f"{experts[tokens]:.1f}")
        table.add_row(str(tokens), *cells)
    console.print(table)
    for name, cost in pass_costs.items():
        per_seq = 1e6 * cost.entry
        per_token = 1e6 * cost.pair
        console.print(
            f"{name}: 1000 cached tokens add {per_seq:.3f} ms per sequence and {per_token:.3f} ms per token of a pass."
        )
    if experts:
        console.print(
            "experts: distinct experts of a layer that a pass over random tokens uses. One more adds"
            f" {1e3 * target.expert:.3f} ms."
        )
    console.print(f"The tokens of a pass are fed tokens and draft tokens. Kernels: {document['kernels']}.")
