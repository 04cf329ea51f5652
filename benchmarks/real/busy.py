"""Measure how much busy processes beside Outrider slow it down, compared with the processor time that they take.

The scheduler of Linux shares a processor by weight: 1024 at nice 0, 110 at nice 10. With T threads of Outrider and as
many processors, n busy processes slow it down by 1 + n w / T if nothing but processor time is lost, with w = weight /
1024. The script prints the measured slowdown, and its ratio to this one.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Annotated

import typer

from outrider import LLM, SamplingParams
from outrider.runtime import machine

_WEIGHTS = {0: 1024, 10: 110}  # of the scheduler, by niceness
_PROMPT = (5, 6, 7, 8)


def main(
    target: Annotated[str | None, typer.Option(metavar="DIR", help="Default: the embedded model.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once. Repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
) -> None:
    """Alternate between quiet and busy runs. Print one line per case, and one JSON document."""
    batches = batch or [1, 64]
    llm = LLM(target, proposer="none", k=0, max_num_seqs=max(batches), max_model_len=128, threads=threads)
    cases = [(size, count, nice) for size in batches for nice in _WEIGHTS for count in (1, 2)]
    slowdowns: dict[tuple[int, int, int], list[float]] = {case: [] for case in cases}
    for size in batches:
        _seconds(llm, size, max_tokens)  # warm up
    for _ in range(rounds):
        for case in cases:
            size, count, nice = case
            quiet = _seconds(llm, size, max_tokens)
            with _busy(count, nice):
                slowdowns[case].append(_seconds(llm, size, max_tokens) / quiet)
    results = [_result(case, values, threads) for case, values in slowdowns.items()]
    for each in results:
        print(
            "batch {batch:2}, {processes} at nice {nice:2}: {slowdown:.2f} ({low:.2f} to {high:.2f}),"
            " {ratio:.2f} of the lost share".format(**each)
        )
    print(json.dumps({"results": results, "threads": threads, "rounds": rounds, "hardware": machine.hardware("cpu")}))


def _seconds(llm: LLM, size: int, max_tokens: int) -> float:
    """Return the median time of three batches."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    times = []
    for _ in range(3):
        begin = perf_counter()
        llm.generate([list(_PROMPT)] * size, params)
        times.append(perf_counter() - begin)
    return statistics.median(times)


@contextmanager
def _busy(count: int, nice: int) -> Iterator[None]:
    """Run busy processes."""
    command = ["nice", "-n", str(nice), sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    sleep(0.3)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _result(case: tuple[int, int, int], slowdowns: Sequence[float], threads: int) -> dict[str, float]:
    size, count, nice = case
    explained = 1 + count * _WEIGHTS[nice] / 1024 / threads
    slowdown = statistics.median(slowdowns)
    return {
        "batch": size,
        "processes": count,
        "nice": nice,
        "slowdown": slowdown,
        "low": min(slowdowns),
        "high": max(slowdowns),
        "explained": explained,
        "ratio": slowdown / explained,
    }


if __name__ == "__main__":
    typer.run(main)
