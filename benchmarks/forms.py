"""What constrained decoding costs the host, and what forced tokens bring: JSON of schemas, with and without guesses.

    python benchmarks/forms.py [--target DIR] [--draft DIR] [--rows 1]

Every way completes the same prompts under the same schemas, in turns, and must come to the same text. `unforced` is
the draft model alone, without what grammars force. `guide_ms` is the thread's own time a round for grammars and masks,
those that are new to a place included. Prints a table and, as its last line, a JSON document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter, thread_time
from typing import Annotated, Any

import typer

from outrider import engine
from outrider.constraint import Constraint
from outrider.embedded import embedded
from outrider.guide import Guided, guide
from outrider.llm import LLM, Prompt
from outrider.machine import hardware, versions
from outrider.params import SamplingParams
from outrider.types import Batch, Draft

FIGURES = ("tau", "tokens_per_second", "guide_ms", "host_ms")
_WORD, _WORDS = {"type": "string", "maxLength": 24}, {"type": "string", "maxLength": 120}
_PEOPLE = {
    "type": "object",
    "properties": {
        "first_name": _WORD,
        "last_name": _WORD,
        "date_of_birth": {"type": "string", "format": "date"},
        "occupation": {"enum": ["teacher", "engineer", "farmer", "doctor"]},
        "retired": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "date_of_birth", "occupation", "retired"],
    "additionalProperties": False,
}
_SCHEMAS = {
    "people": {"type": "array", "items": _PEOPLE, "minItems": 2, "maxItems": 2},
    "answer": {
        "type": "object",
        "properties": {"reasoning": _WORDS, "confidence": {"type": "integer", "minimum": 0, "maximum": 100}},
        "required": ["reasoning", "confidence"],
        "additionalProperties": False,
    },
    "review": {
        "type": "object",
        "properties": {
            "summary": _WORDS,
            "sentiment": {"enum": ["positive", "negative", "neutral"]},
            "topics": {"type": "array", "items": _WORD, "minItems": 1, "maxItems": 3},
        },
        "required": ["summary", "sentiment", "topics"],
        "additionalProperties": False,
    },
}
_ASK = "Two people met at the market: Anna, who is a doctor, and old Peter, who had a farm. Write JSON about it."


class _Timed:
    """Stands in for `guide`, and adds up what it takes."""

    def __init__(self) -> None:
        self.seconds, self.rounds, self.force = 0.0, 0, True

    def __call__(self, batch: Batch, draft: Draft, vocab: int) -> Guided:
        began = thread_time()
        out = guide(batch if self.force else replace(batch, room=()), draft, vocab)
        self.seconds += thread_time() - began
        self.rounds += 1
        return out


def main(
    target: Annotated[str, typer.Option()] = str(embedded("mini")),
    draft: Annotated[str, typer.Option()] = str(embedded("nano")),
    rows: Annotated[int, typer.Option(min=1)] = 1,
    turns: Annotated[int, typer.Option(min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(min=1)] = 160,
) -> None:
    """Measure, and print."""
    ways: dict[str, tuple[str, Any, bool]] = {
        "plain": ("none", 0, True),
        "forced alone": ("none", 4, True),
        "draft, unforced": (f"draft:{draft}", 4, False),
        "draft and forced": (f"draft:{draft}", 4, True),
        "auto": (f"draft:{draft}", "auto", True),
    }
    timed = _Timed()
    engine.guide = timed
    houses = {
        name: LLM(target, proposer=proposer, k=k, verifier="walk", rows=rows, context=1024)
        for name, (proposer, k, _) in ways.items()
    }
    prompt = houses["plain"].chat([{"role": "user", "content": _ASK}])
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for schema in _SCHEMAS.values():
            params = SamplingParams(constraint=Constraint.json_schema(schema), max_tokens=max_tokens)
            texts = set()
            for name, llm in houses.items():
                timed.force = ways[name][2]
                text, figures = _measured(llm, timed, [prompt] * rows, params)
                texts.add(text)
                if turn:  # the first one warms up
                    found[name].append(figures)
            assert len(texts) == 1, "guesses changed a text"
    document = {
        "rows": rows,
        "vocab": houses["plain"].house.vocab,
        "ways": {
            name: dict(zip(FIGURES, map(median, zip(*each, strict=True)), strict=True)) for name, each in found.items()
        },
        "hardware": hardware(str(houses["plain"].house.device)),
        "versions": versions(),
    }
    for name, shown in document["ways"].items():
        print(f"{name:18}", *(f"{figure} {value:8.2f}" for figure, value in shown.items()))
    print(json.dumps(document, default=str))


def _measured(
    llm: LLM, timed: _Timed, prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[tuple[tuple[int, ...], ...], tuple[float, float, float, float]]:
    """What was written, and the `FIGURES` of it."""
    timed.seconds, timed.rounds = 0.0, 0
    before, began = llm.stats, perf_counter()
    done = llm.generate(prompts, params)
    took = perf_counter() - began
    emitted = llm.stats.emitted - before.emitted
    tau = emitted / (llm.stats.passes - before.passes)
    host = (llm.stats.host_seconds - before.host_seconds) / timed.rounds
    text = tuple(each.tokens for each in done)
    return text, (tau, emitted / took, 1e3 * timed.seconds / timed.rounds, 1e3 * host)


if __name__ == "__main__":
    typer.run(main)
