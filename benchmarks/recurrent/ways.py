"""Compare the two ways to process a few tokens of a recurrent layer: by the state after each, and by their inputs.

    python benchmarks/recurrent/ways.py

A round is one pass over E staged tokens and a commit of all but the last one. The time is the CPU time of the fastest
of several rounds, in turns. The chosen way is that of `outrider.models.torch.recurrent`.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.models.torch.recurrent import delta_rule, state_space
from outrider.models.torch.recurrent.layer import Staged
from outrider.models.torch.recurrent.rows import Rows, chain_rows
from outrider.models.torch.recurrent.staging import keeps_states

ROUNDS = 30
# By name: sequences, heads, and the two sizes of a state matrix.
SIZES = {
    "small hybrid": (1, 6, 64, 64),
    "small hybrid, 2 sequences": (2, 6, 64, 64),
    "small hybrid, 4 sequences": (4, 6, 64, 64),
    "small hybrid, 8 sequences": (8, 6, 64, 64),
    "Nemotron-H 8B": (1, 128, 64, 128),
    "Qwen3-Next 80B": (1, 32, 128, 128),
}
ENTRIES = (1, 2, 3, 4, 6, 8, 12)


def main() -> None:
    """Print a table with the times of both ways."""
    table = Table("layer", "rule", "tokens", "by states, ms", "by inputs, ms", "chosen", "chosen / better")
    worst = 1.0
    torch.set_num_threads(1)
    for name, sizes in SIZES.items():
        for module, make in ((state_space, _state_space_round), (delta_rule, _delta_round)):
            for entries in ENTRIES:
                seconds = _measure(module, make(*sizes, entries))
                base = torch.empty(sizes)
                by_states = keeps_states(base, entries, module._COSTS)
                chosen = "states" if by_states else "inputs"
                ratio = seconds[chosen] / min(seconds.values())
                worst = max(worst, ratio)
                table.add_row(
                    name,
                    module.__name__.rpartition(".")[2],
                    str(entries),
                    f"{1e3 * seconds['states']:.3f}",
                    f"{1e3 * seconds['inputs']:.3f}",
                    chosen,
                    f"{ratio:.2f}",
                )
    console = Console(width=120)
    console.print(table)
    console.print(f"worst chosen / better: {worst:.2f}")


def _measure(module: Any, run: Callable[[], None]) -> dict[str, float]:
    """Return the seconds of a round by way."""
    choose = module._keeps_states
    best = {"states": float("inf"), "inputs": float("inf")}
    for _ in range(ROUNDS):
        for way in best:
            module._keeps_states = lambda *_, way=way: way == "states"
            begin = time.thread_time()
            run()
            best[way] = min(best[way], time.thread_time() - begin)
    module._keeps_states = choose
    return best


def _state_space_round(batch: int, heads: int, dim: int, state: int, entries: int) -> Callable[[], None]:
    base = torch.randn(batch, heads, dim, state)
    x, b, c = (torch.randn(batch, entries, heads, size) for size in (dim, state, state))
    decay = -torch.rand(batch, entries, heads)
    rows, last = _rows(batch, entries)

    def run() -> None:
        staged = Staged(base={state_space.STATE: base})
        state_space.advance(staged, x, decay, b, c, rows)
        base.copy_(state_space.state_after(staged, rows, last)[state_space.STATE])

    return run


def _delta_round(batch: int, heads: int, dim: int, state: int, entries: int) -> Callable[[], None]:
    base = torch.randn(batch, heads, dim, state)
    query, key = (torch.nn.functional.normalize(torch.randn(batch, entries, heads, dim), dim=-1) for _ in range(2))
    value = torch.randn(batch, entries, heads, state)
    decay, beta = -torch.rand(batch, entries, heads), torch.rand(batch, entries, heads)
    rows, last = _rows(batch, entries)

    def run() -> None:
        staged = Staged(base={delta_rule.STATE: base})
        delta_rule.advance(staged, query, key, value, decay, beta, rows)
        base.copy_(delta_rule.state_after(staged, rows, last)[delta_rule.STATE])

    return run


def _rows(batch: int, entries: int) -> tuple[Rows, torch.Tensor]:
    """Return chains, and the entry that a commit ends with."""
    return chain_rows(batch, entries, torch.device("cpu")), torch.full((batch,), max(entries - 2, 0))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
