"""Lists of requests as JSON lines in, [tokens, seconds] of each list out: the bare engine, asked by `house.Bare`."""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Annotated, Any

import typer

from outrider.llm import LLM
from outrider.params import SamplingParams


def main(
    *,
    target: Annotated[str | None, typer.Option()] = None,
    proposer: Annotated[str | None, typer.Option()] = None,
    dtype: Annotated[str, typer.Option()] = "auto",
    threads: Annotated[int | None, typer.Option()] = None,
    context: Annotated[int | None, typer.Option()] = None,
    rows: Annotated[int, typer.Option()] = 1,
) -> None:
    """Answer until standard input ends."""
    llm = LLM(target, proposer=proposer, dtype=dtype, threads=threads, context=context, rows=rows)
    for line in sys.stdin:
        bodies, tokens, began = json.loads(line), 0, perf_counter()
        for body in bodies:
            prompt = llm.chat(body["messages"]) if "messages" in body else body["prompt"]
            (done,) = llm.generate([prompt], _params(body))
            tokens += len(done.tokens)
        print(json.dumps([tokens, perf_counter() - began]), flush=True)


def _params(body: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        ignore_eos=body.get("ignore_eos", False),
        guesses=body.get("k"),
        scope=body.get("user", ""),
    )


if __name__ == "__main__":
    typer.run(main)
