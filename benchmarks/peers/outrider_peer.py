"""A worker for Outrider itself: its Python API with the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import worker
from worker import Arguments, Mode, Precision, Run


class Outrider:
    """`LLM.stream`. A chunk has the tokens that one round has committed."""

    packages: Sequence[str] = ("outrider", "torch", "transformers")

    def __init__(self, args: Arguments) -> None:
        from outrider import LLM, SamplingParams

        args.refuse_converted()
        proposer = {Mode.PLAIN: "none", Mode.NGRAM: "ngram"}.get(args.mode)
        if proposer is None:
            proposer = f"draft:{args.draft_folder()}"
        precision: dict[str, Any] = {
            Precision.BF16: {"dtype": "bfloat16"},
            Precision.INT8: {"quantize": "int8"},
        }[args.dtype]
        self._params_class = SamplingParams
        self._llm = LLM(
            args.target,
            proposer=proposer,
            k=args.k,
            threads=args.threads,
            max_num_seqs=1,
            max_model_len=args.context(),
            prefix_caching=False,
            **precision,
        )
        self.settings: Mapping[str, Any] = precision | {"verifier": self._llm.parts.verifier.name}

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        params = self._params_class(max_tokens=max_tokens, temperature=0.0)
        chunks = []
        began = perf_counter()
        for chunk in self._llm.stream(prompt, params):
            if chunk.token_ids:
                chunks.append((perf_counter(), chunk.token_ids))
        return Run.of_chunks(prompt, chunks, began)


if __name__ == "__main__":
    worker.main(Outrider)
