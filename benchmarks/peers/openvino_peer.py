"""A worker for OpenVINO GenAI: `LLMPipeline` alone, with a draft model, or with prompt lookup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import worker
from worker import NGRAM_SIZE, Arguments, Mode, Run, end_ids

_DEVICE = "CPU"


class OpenVino:
    """A pipeline over models of `optimum-cli export openvino`."""

    packages: Sequence[str] = ("openvino-genai", "openvino")

    def __init__(self, args: Arguments) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found]

        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": args.threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",  # the default on a CPU is u8, which no other engine here uses
            "PERFORMANCE_HINT": "LATENCY",
        }
        options: dict[str, Any] = {}
        self._config = genai.GenerationConfig(do_sample=False, stop_token_ids=set(end_ids(args.target)))
        if args.mode is Mode.DRAFT:
            draft = args.converted_model(args.draft_folder())
            options["draft_model"] = genai.draft_model(str(draft), _DEVICE, **properties)
            self._config.num_assistant_tokens = args.k
        elif args.mode is Mode.NGRAM:
            options["prompt_lookup"] = True
            self._config.num_assistant_tokens = args.k
            self._config.max_ngram_size = NGRAM_SIZE
        self._pipeline = genai.LLMPipeline(str(args.converted_model(args.target)), _DEVICE, **properties, **options)
        self.settings: Mapping[str, Any] = properties
        self._genai = genai

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        import numpy as np
        import openvino as ov  # type: ignore[import-not-found]

        chunks: list[tuple[float, Sequence[int]]] = []

        class Recorder(self._genai.StreamerBase):  # type: ignore[name-defined,misc]
            """Records the tokens and the time of each round."""

            def write(self, tokens: int | Sequence[int]) -> Any:
                chunks.append((perf_counter(), [tokens] if isinstance(tokens, int) else list(tokens)))
                return running

            def end(self) -> None: ...

        running = self._genai.StreamingStatus.RUNNING
        ids = np.array([list(prompt)], dtype=np.int64)
        inputs = self._genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        self._config.max_new_tokens = max_tokens
        began = perf_counter()
        self._pipeline.generate(inputs, self._config, Recorder())
        return Run.of_chunks(prompt, chunks, began)


if __name__ == "__main__":
    worker.main(OpenVino)
