"""Measures how fast a pair of `recipes.correction.train` corrects held-out texts, with plain decoding and speculation.

python -m recipes.correction.measure PAIR
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, Any

import typer

from outrider import LLM, SamplingParams
from outrider.core.stats import Stats
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
    expected = _check_same_texts(engines, sources, batch)
    before = {name: llm.stats for name, llm in engines.items()}
    clock = process_time if processor_time else perf_counter
    rates = _measure(engines, sources, batch, rounds=rounds, clock=clock)
    report: dict[str, Any] = {
        "texts": len(sources),
        "corrected": sum(text == line["text"] for text, line in zip(expected, lines, strict=True)),
        "with_errors": sum(line["source"] != line["text"] for line in lines),
    }
    for name, llm in engines.items():
        report[name] = _figures(rates[name], rates[_PLAIN], before[name], llm.stats)
    typer.echo(json.dumps(report))


def _check_same_texts(engines: dict[str, LLM], sources: list[str], batch: int) -> list[str]:
    """Return the corrected texts, which must be those of plain decoding with every proposer.

    Raises:
        typer.BadParameter: a proposer gives other texts.
    """
    outputs = {}
    for name, llm in engines.items():
        _correct(llm, sources[:_WARM_UP], _WARM_UP)
        outputs[name] = _correct(llm, sources, batch)
    expected = outputs[_PLAIN]
    for name, texts in outputs.items():
        if texts != expected:
            raise typer.BadParameter(f"{name} gives other texts than plain decoding; report this as a bug")
    return expected


def _measure(
    engines: dict[str, LLM], sources: list[str], batch: int, *, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the tokens per second of each proposer in each round. Every second round has the reverse order."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        names = list(engines) if number % 2 == 0 else list(engines)[::-1]
        for name in names:
            tokens = engines[name].stats.output_tokens
            start = clock()
            _correct(engines[name], sources, batch)
            rates[name].append((engines[name].stats.output_tokens - tokens) / (clock() - start))
        say(f"round {number + 1} of {rounds}")
    return rates


def _figures(rates: list[float], plain: list[float], before: Stats, after: Stats) -> dict[str, float]:
    """Return the figures of a proposer from the rates of all rounds and the counts before and after them."""
    ratios = [fast / slow for fast, slow in zip(rates, plain, strict=True)]
    return {
        "tokens_per_s": round(median(rates), 1),
        "speedup": round(median(ratios), 2),
        "lowest": round(min(ratios), 2),
        "highest": round(max(ratios), 2),
        "tau": round((after.output_tokens - before.output_tokens) / (after.passes - before.passes), 2),
    }


def _correct(llm: LLM, sources: list[str], batch: int) -> list[str]:
    """Return the corrected texts."""
    texts = []
    for begin in range(0, len(sources), batch):
        group = sources[begin : begin + batch]
        texts += [each.text for each in llm.generate(sources=group, params=SamplingParams(max_tokens=200))]
    return texts


if __name__ == "__main__":
    typer.run(main)
