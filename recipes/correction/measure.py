"""Measures how fast a pair of `recipes.correction.train` corrects held-out texts, with plain decoding and speculation.

python -m recipes.correction.measure PAIR
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, Any

import typer

from outrider import LLM, SamplingParams
from recipes.family.train import say

_PLAIN = "none"
_WARM_UP = 4  # texts before the first round


def main(
    pair: Annotated[Path, typer.Argument(help="Folder with target/, draft/, held.jsonl and any head-*/.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all texts and proposers.")] = 5,
    limit: Annotated[int, typer.Option(min=1, help="Texts.")] = 32,
    k: Annotated[int, typer.Option(min=1, help="Most draft tokens per round.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Texts at once.")] = 1,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    processor_time: Annotated[
        bool, typer.Option("--processor-time", help="Count processor time, for a machine with other programs.")
    ] = False,
) -> None:
    """Correct every text with every proposer in each round, greedily. The last line of output is one JSON document."""
    lines = [json.loads(line) for line in (pair / "held.jsonl").read_text("utf-8").splitlines()][:limit]
    sources = [line["source"] for line in lines]
    drafts = {path.name: f"draft:{path}" for path in (pair / "draft", *sorted(pair.glob("head-*")))}
    proposers = {_PLAIN: _PLAIN, "ngram": "ngram", "suffix": "suffix", **drafts}
    engines = {
        name: LLM(
            pair / "target",
            proposer=proposer,
            k=0 if name == _PLAIN else k,
            dtype="float32",
            max_num_seqs=batch,
            max_model_len=256,
            threads=threads,
        )
        for name, proposer in proposers.items()
    }
    outputs = {}
    for name, llm in engines.items():
        llm.generate(sources=sources[:_WARM_UP], params=SamplingParams(max_tokens=200))
        outputs[name] = _correct(llm, sources, batch)
    expected = outputs[_PLAIN]
    for name, texts in outputs.items():
        if texts != expected:
            raise typer.BadParameter(f"{name} gives other texts than plain decoding; report this as a bug")
    clock = process_time if processor_time else perf_counter
    before = {name: llm.stats for name, llm in engines.items()}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        names = list(engines) if number % 2 == 0 else list(engines)[::-1]
        for name in names:
            tokens = engines[name].stats.output_tokens
            start = clock()
            _correct(engines[name], sources, batch)
            rates[name].append((engines[name].stats.output_tokens - tokens) / (clock() - start))
        say(f"round {number + 1} of {rounds}")
    report: dict[str, Any] = {
        "texts": len(sources),
        "corrected": sum(text == line["text"] for text, line in zip(expected, lines, strict=True)),
        "with_errors": sum(line["source"] != line["text"] for line in lines),
    }
    for name, llm in engines.items():
        ratios = [fast / plain for fast, plain in zip(rates[name], rates[_PLAIN], strict=True)]
        stats = llm.stats
        report[name] = {
            "tokens_per_s": round(median(rates[name]), 1),
            "speedup": round(median(ratios), 2),
            "lowest": round(min(ratios), 2),
            "highest": round(max(ratios), 2),
            "tau": round((stats.output_tokens - before[name].output_tokens) / (stats.passes - before[name].passes), 2),
        }
    typer.echo(json.dumps(report))


def _correct(llm: LLM, sources: list[str], batch: int) -> list[str]:
    """Return the corrected texts."""
    texts = []
    for begin in range(0, len(sources), batch):
        group = sources[begin : begin + batch]
        texts += [each.text for each in llm.generate(sources=group, params=SamplingParams(max_tokens=200))]
    return texts


if __name__ == "__main__":
    typer.run(main)
