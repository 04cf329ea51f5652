"""`outrider serve`, whose engine also runs without the server around it: asked by `launch.Server.bare`.

What stands on the command line goes to `outrider`. Lists of requests come in as JSON lines, [tokens, seconds] of each
list go out; nothing may be asked of the server meanwhile. Two processes would differ by more than a server costs.
"""

from __future__ import annotations

import json
import sys
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any

import outrider.serve.async_llm
from outrider.cli.app import app
from outrider.core.params import SamplingParams


class Driver(outrider.serve.async_llm.AsyncLLM):
    """One that takes lists of requests from standard input, too."""

    def start(self) -> None:
        super().start()
        Thread(target=self._obey, daemon=True).start()

    def _obey(self) -> None:
        done = SimpleQueue[tuple[int, float]]()
        for line in sys.stdin:
            bodies = json.loads(line)
            self._notes.put(lambda bodies=bodies: done.put(self._bare(bodies)))
            print(json.dumps(done.get()), flush=True)

    def _bare(self, bodies: list[dict[str, Any]]) -> tuple[int, float]:
        """Tokens and seconds of such requests, one after another, with nobody told of them."""
        llm, watch, tokens, began = self._llm, self._llm.engine.on_round, 0, perf_counter()
        llm.engine.on_round = None
        for body in bodies:
            prompt = llm.encode_chat(body["messages"]) if "messages" in body else body["prompt"]
            (completion,) = llm.generate([prompt], _params(body))
            tokens += len(completion.token_ids)
        llm.engine.on_round = watch
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
    outrider.serve.async_llm.AsyncLLM = Driver  # type: ignore[misc]
    app()
