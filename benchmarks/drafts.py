"""How far drafts of one target get: tokens a pass by category, and acceptance by position.

    python benchmarks/drafts.py --target DIR --prompts FILE draft:DIR draft:@mtp draft:@medusa

Every draft makes chains of --k guesses on the same prompts, greedy and at temperature 1, beside nothing that is timed:
the figures are of the drafts alone, and the same on any machine. Prints a table for each temperature and, as the last
line, a JSON document.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cache.base import Caching
from outrider.console import standard_output
from outrider.llm import LLM
from outrider.machine import versions
from outrider.names import short
from outrider.params import SamplingParams
from outrider.prompts import Prompt, read_prompts
from outrider.stats import Stats


def main(
    drafts: Annotated[list[str], typer.Argument(help="Proposers.")],
    *,
    target: Annotated[str | None, typer.Option(help="Folder of the target. Default: the embedded one.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with category and prompt.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each category.")] = None,
    k: Annotated[int, typer.Option("--k", help="Guesses a round.")] = 5,
    max_tokens: int = 128,
    rows: Annotated[int, typer.Option(help="At once.")] = 8,
) -> None:
    """Measure drafts against each other."""
    found = read_prompts(prompts, limit=limit)
    out: list[dict[str, Any]] = []
    for draft in drafts:
        llm = LLM(target, proposer=draft, k=k, rows=rows, caching=Caching(share=False))
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1)
            out += [
                {"draft": draft, "temperature": temperature, "category": name, **_figures(stats)}
                for name, stats in _by_category(llm, found, params).items()
            ]
    _show(out)
    print(json.dumps({"benchmark": "drafts", "k": k, "prompts": len(found), "versions": versions(), "scores": out}))


def _by_category(llm: LLM, prompts: list[Prompt], params: SamplingParams) -> dict[str, Stats]:
    texts = [llm.chat(prompt.messages) if prompt.messages else prompt.prompt or "" for prompt in prompts]
    done = zip(prompts, llm.generate(texts, params), strict=True)
    ordered = sorted(((prompt.category, completion.stats) for prompt, completion in done), key=lambda pair: pair[0])
    each = {name: _sum(stats for _, stats in group) for name, group in groupby(ordered, key=lambda pair: pair[0])}
    return {**each, "all": _sum(each.values())}


def _sum(parts: Any) -> Stats:
    return sum(parts, Stats())


def _figures(stats: Stats) -> dict[str, Any]:
    return {"tau": round(stats.tau, 3), "acceptance": [round(rate, 3) for rate in stats.acceptance]}


def _show(scores: list[dict[str, Any]]) -> None:
    people = standard_output()
    names = list(dict.fromkeys(score["category"] for score in scores))
    for temperature in (0.0, 1.0):
        people.print(f"\ntemperature {temperature:g}: tokens a pass")
        for draft in dict.fromkeys(score["draft"] for score in scores):
            mine = {s["category"]: s for s in scores if s["draft"] == draft and s["temperature"] == temperature}
            taus = "  ".join(f"{name} {mine[name]['tau']:.2f}" for name in names)
            kept = " ".join(f"{rate:.2f}" for rate in mine["all"]["acceptance"])
            people.print(f"{short(draft)}: {taus}; kept by position {kept}", markup=False)


if __name__ == "__main__":
    typer.run(main)
