"""Run `outrider serve` with an engine that also completes requests without the server (see `launch.Server.bare`).

The command line is that of `outrider`. Each line of standard input is a JSON list of requests. The answer is a line
[tokens, seconds] on standard output. The server must be idle meanwhile. Server and engine are measured in one process,
because two processes would differ by more than the overhead of the server.
"""

import json
import sys
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any

import outrider.serve.async_llm
from outrider.cli.app import app
from outrider.core.params import SamplingParams


class BenchmarkLLM(outrider.serve.async_llm.AsyncLLM):
    """An `AsyncLLM` that also takes lists of requests from standard input."""

    def start(self) -> None:
        super().start()
        Thread(target=self._serve_stdin, daemon=True).start()

    def _serve_stdin(self) -> None:
        results = SimpleQueue[tuple[int, float]]()
        for line in sys.stdin:
            bodies = json.loads(line)
            self._commands.put(lambda bodies=bodies: results.put(self._complete(bodies)))
            print(json.dumps(results.get()), flush=True)

    def _complete(self, bodies: list[dict[str, Any]]) -> tuple[int, float]:
        """Complete requests one after another, without the callback of the server. Return tokens and seconds."""
        llm = self._llm
        on_round = llm.engine.on_round
        tokens = 0
        began = perf_counter()
        llm.engine.on_round = None
        for body in bodies:
            prompt = llm.encode_chat(body["messages"]) if "messages" in body else body["prompt"]
            (completion,) = llm.generate([prompt], _params(body))
            tokens += len(completion.token_ids)
        llm.engine.on_round = on_round
        return tokens, perf_counter() - began


def _params(body: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        ignore_eos=body.get("ignore_eos", False),
        k=body.get("k"),
        scope=body.get("user", ""),
    )


if __name__ == "__main__":
    outrider.serve.async_llm.AsyncLLM = BenchmarkLLM  # type: ignore[misc]
    app()
