"""Compare two servers with OpenAI's API, such as `outrider scale` with one replica and `outrider serve`.

Both servers run at the same time, on the same model. Requests alternate between them, so that other load of the
machine affects both. The result is the median of the ratios of neighboring measurements.

    python benchmarks/scale/server_overhead.py http://127.0.0.1:8000/v1 http://127.0.0.1:8001/v1
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import httpx

PROMPT = "def add(a, b):"
# Servers close idle connections after 5 seconds. A request on a connection that is being closed is lost.
LIMITS = httpx.Limits(keepalive_expiry=1.0)


def main() -> None:
    """Measure and print a JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="URL of the server that is the baseline, with /v1")
    parser.add_argument("other", help="URL of the other server, with /v1")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each server and concurrency")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4], help="requests at once")
    asked = parser.parse_args()
    results = {}
    milliseconds = {}
    with httpx.Client(timeout=300, limits=LIMITS) as client:
        for streams in asked.streams:
            ratios: dict[str, list[float]] = {"seconds": [], "first_token": []}
            firsts: dict[str, list[float]] = {asked.base: [], asked.other: []}
            for turn in range(asked.rounds + 1):
                order = (asked.base, asked.other) if turn % 2 else (asked.other, asked.base)
                took = {url: _measure(client, url, streams, asked.tokens, turn) for url in order}
                if turn:  # the first one warms up
                    for i, name in enumerate(ratios):
                        ratios[name].append(took[asked.other][i] / took[asked.base][i])
                    for url, values in firsts.items():
                        values.append(took[url][1])
            results[str(streams)] = {name: round_figures(values) for name, values in ratios.items()}
            milliseconds[str(streams)] = [round(1000 * median(values), 1) for values in firsts.values()]
    print(
        json.dumps(
            {
                "other_over_base_by_streams": results,
                "first_token_ms_of_base_and_other": milliseconds,
                "tokens": asked.tokens,
                "rounds": asked.rounds,
            }
        )
    )


def round_figures(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of ratios."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    named = {"median": median(ordered), "lower_quartile": ordered[quarter], "upper_quartile": ordered[-1 - quarter]}
    return {name: round(value, 3) for name, value in named.items()}


def _measure(client: httpx.Client, url: str, streams: int, tokens: int, salt: int) -> tuple[float, float]:
    """Return the seconds of `streams` requests at once, and the mean seconds to their first tokens."""
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        firsts = list(pool.map(lambda i: _stream(client, url, tokens, f"{salt} {i} {PROMPT}"), range(streams)))
    return time.perf_counter() - began, sum(firsts) / len(firsts)


def _stream(client: httpx.Client, url: str, tokens: int, prompt: str) -> float:
    """Read a stream to its end. Return the seconds until its first event."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    first = 0.0
    with client.stream("POST", f"{url}/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and not first:
                first = time.perf_counter() - began
    return first


if __name__ == "__main__":
    main()
