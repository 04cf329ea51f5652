"""Compare two ranks of tensor parallelism with one process, on the torch kernels of a CPU.

Each measurement starts new processes, which complete a prompt several times. One process and two ranks alternate. All
processes have one thread. The result is the ratio of the CPU time of all processes, and of the wall-clock time, which
depends on other load.

    python benchmarks/scale/rank_overhead.py --target DIR
"""

import argparse
import json
import os
import re
import subprocess
import sys
from statistics import median
from time import perf_counter, process_time

PROMPT = "def add(a, b):"


def main() -> None:
    """Measure and print a JSON document, or, in a process that was started for it, one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of a model")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a completion")
    parser.add_argument("--completions", type=int, default=5, help="completions of a measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind")
    parser.add_argument("--tp", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.tp:
        measure(asked)
        return
    ratios: dict[str, list[float]] = {"cpu": [], "wall": []}
    for round in range(asked.rounds):
        took = {tp: start(asked, tp) for tp in ((1, 2) if round % 2 else (2, 1))}
        for name, values in ratios.items():
            values.append(took[2][name] / took[1][name])
    figures = {
        name: {"median": round_to(median(values)), "all": list(map(round_to, values))}
        for name, values in ratios.items()
    }
    print(json.dumps({"two_ranks_over_one_process": figures, "target": asked.target, "tokens": asked.tokens}))


def round_to(value: float) -> float:
    """Round a ratio for the document."""
    return round(value, 3)


def start(asked: argparse.Namespace, tp: int) -> dict[str, float]:
    """Run the measurement in `tp` processes. Return their CPU seconds and the wall-clock seconds of the first."""
    launcher = [] if tp == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp}"]
    words = [
        __file__,
        "--target",
        asked.target,
        "--tokens",
        asked.tokens,
        "--completions",
        asked.completions,
        "--tp",
        tp,
    ]
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    # Two ranks may write to the same line.
    documents = [json.loads(text) for text in re.findall(r"\{.*?\}", done.stdout)]
    return {"cpu": sum(each["cpu"] for each in documents), "wall": documents[0]["wall"]}


def measure(asked: argparse.Namespace) -> None:
    """Print the CPU and wall-clock seconds of this process."""
    from outrider import LLM, SamplingParams
    from outrider.runtime.ranks import current

    llm = LLM(asked.target, proposer="none", k=0, kernels="torch", dtype="float32", tp=asked.tp, threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=asked.tokens, ignore_eos=True)
    llm.generate([PROMPT], params)  # to warm up
    cpu, wall = process_time(), perf_counter()
    for _ in range(asked.completions):
        llm.generate([PROMPT], params)
    print(json.dumps({"cpu": process_time() - cpu, "wall": perf_counter() - wall}), flush=True)
    if ranks := current():
        ranks.leave()


if __name__ == "__main__":
    main()
