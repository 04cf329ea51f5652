"""A worker for llama.cpp in llama-cpp-python: `Llama.generate` alone, or with prompt lookup."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import worker
from worker import LLAMACPP_TYPES, NGRAM_SIZE, Arguments, Mode, Run, end_ids


class LlamaCppPython:
    """`Llama.generate` in this process. It returns one token at a time, also if a pass has verified several."""

    packages: Sequence[str] = ("llama-cpp-python", "numpy")

    def __init__(self, args: Arguments) -> None:
        args.require((Mode.PLAIN, Mode.NGRAM), LLAMACPP_TYPES)
        import llama_cpp  # type: ignore[import-not-found]
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]

        options: dict[str, Any] = {
            "n_ctx": args.context(),
            "n_threads": args.threads,
            "n_threads_batch": args.threads,
            "flash_attn": True,
        }
        lookup: dict[str, Any] = {}
        if args.mode is Mode.NGRAM:
            lookup = {"max_ngram_size": NGRAM_SIZE, "num_pred_tokens": args.draft_length()}
            options["logits_all"] = True  # verification needs the logits of all positions
        self._llama = llama_cpp.Llama(
            str(args.converted_model(args.target, ".gguf")),
            draft_model=LlamaPromptLookupDecoding(**lookup) if lookup else None,
            verbose=False,
            **options,
        )
        self._ends = set() if args.ignore_eos else set(end_ids(args.target))
        system = llama_cpp.llama_print_system_info().decode().strip(" |")
        self.settings: Mapping[str, Any] = options | lookup | {"system": system}

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        self._llama.reset()  # or else it would reuse a shared prefix
        chunks: list[tuple[float, Sequence[int]]] = []
        began = perf_counter()
        for token in self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            chunks.append((perf_counter(), [token]))
            if token in self._ends or len(chunks) >= max_tokens:
                break
        return Run.of_chunks(prompt, chunks, began)


if __name__ == "__main__":
    worker.main(LlamaCppPython)
