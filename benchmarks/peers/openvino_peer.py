"""A worker for OpenVINO GenAI: `LLMPipeline` alone, with a draft model, or with prompt lookup."""

import os
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import worker
from worker import NGRAM_SIZE, PEER_MODES, Arguments, Mode, Precision, Run, end_ids

_DEVICE = "CPU"
_GGUF = (Precision.F16, Precision.Q8_0, Precision.Q4_0)  # types that its reader of GGUF files supports


class OpenVino:
    """A pipeline over models of `optimum-cli export openvino`, or over GGUF files."""

    packages: Sequence[str] = ("openvino-genai", "openvino")

    def __init__(self, args: Arguments) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found]

        args.require(PEER_MODES, (Precision.BF16, Precision.INT8, *_GGUF))
        suffix = ".gguf" if args.dtype in _GGUF else ""
        # Where the instruction set is limited, there are no bfloat16 instructions.
        precision = "f32" if "ONEDNN_MAX_CPU_ISA" in os.environ else "bf16"
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": args.threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # the default on a CPU is u8, which no other engine here uses
            "PERFORMANCE_HINT": "LATENCY",
        }
        options: dict[str, Any] = {}
        ends = set() if args.ignore_eos else set(end_ids(args.target))
        self._config = genai.GenerationConfig(do_sample=False, stop_token_ids=ends, ignore_eos=args.ignore_eos)
        if args.mode is Mode.DRAFT:
            draft = args.converted_model(args.draft_folder(), suffix)
            options["draft_model"] = genai.draft_model(str(draft), _DEVICE, **properties)
            self._config.num_assistant_tokens = args.draft_length()
        elif args.mode is Mode.NGRAM:
            options["prompt_lookup"] = True
            self._config.num_assistant_tokens = args.draft_length()
            self._config.max_ngram_size = NGRAM_SIZE
        model = args.converted_model(args.target, suffix)
        self._pipeline = genai.LLMPipeline(str(model), _DEVICE, **properties, **options)
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
