"""Measure the default proposer with k auto against plain decoding, category by category.

python benchmarks/real/default_gain.py models/smollm2.gguf --prompts FILE --pairs 12

Both engines share one target. Each prompt runs in turns: plain, default, plain. The ratio compares the default with the
mean of both plain runs. The control compares the plain runs with each other, which tells the noise of the machine. A
default must not lose, so the lowest median is printed last. The last line is one JSON document.
"""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import typer

from outrider import LLM, SamplingParams
from outrider.core.config import EngineConfig
from outrider.core.planner import FixedPlanner
from outrider.core.prompts import Prompt, read_prompts
from outrider.drafting.propose.registry import find_proposer
from outrider.engine.build import assemble, make_setup
from outrider.runtime.machine import commit, hardware, versions


def main(
    target: Annotated[Path, typer.Argument(help="A GGUF file or a model folder.")],
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="JSON lines. Default: an embedded set.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Prompts of each category.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    minutes: Annotated[float, typer.Option(help="Stop after this time, between two prompts.")] = 60.0,
) -> None:
    """Print the ratio of each category, and one JSON document."""
    default = LLM(target, max_num_seqs=1, max_model_len=2048, threads=threads, prefix_caching=False)
    plain = _plain(default)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    categories: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in read_prompts(prompts, limit=pairs):
        categories[prompt.category].append(prompt)
    turns = [
        prompt for number in range(pairs) for group in categories.values() for prompt in group[number : number + 1]
    ]
    ratios: dict[str, list[float]] = defaultdict(list)
    controls: dict[str, list[float]] = defaultdict(list)
    _seconds(plain, turns[0], params)  # warm up
    began = perf_counter()
    for prompt in turns:
        if perf_counter() - began > 60 * minutes:
            break
        before, took, after = (_seconds(llm, prompt, params) for llm in (plain, default, plain))
        ratios[prompt.category].append((before + after) / 2 / took)
        controls[prompt.category].append(before / after)
    for category, values in ratios.items():
        print(f"{category}: {_spread(values)}; control {_spread(controls[category])}; {len(values)} pairs")
    lowest = min(map(median, ratios.values()))
    print(f"lowest median: {lowest:.2f}")
    document = {
        "benchmark": "gain of the default",
        "target": target.name,
        "proposer": default.parts.proposer_spec,
        "kernels": default.parts.target.kernels,
        "ratios": ratios,
        "controls": controls,
        "lowest_median": lowest,
        "hardware": hardware("cpu"),
        "versions": versions(),
        "commit": commit(),
    }
    print(json.dumps(document))


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _plain(llm: LLM) -> LLM:
    """Return an engine without drafts that shares the target."""
    parts = llm.parts
    planner = FixedPlanner(0)
    proposer = find_proposer("none", make_setup(parts.loaded, parts.verifier.draw, EngineConfig()))
    engine = assemble(parts.loaded, proposer=proposer, verifier=parts.verifier, planner=planner)
    return LLM.from_parts(replace(parts, engine=engine, proposer=proposer, planner=planner))


def _seconds(llm: LLM, prompt: Prompt, params: SamplingParams) -> float:
    """Complete a prompt, and return the time."""
    text = llm.encode_chat(prompt.messages) if prompt.messages else prompt.prompt
    began = perf_counter()
    llm.generate([text], params)
    return perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
