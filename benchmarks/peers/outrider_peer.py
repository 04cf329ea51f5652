"""Outrider itself, through its public door and with its defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import worker
from worker import Arguments, Mode, Precision, Run


class Outrider:
    """`LLM.stream`: a chunk is what one round committed."""

    packages: Sequence[str] = ("outrider", "torch", "transformers")

    def __init__(self, args: Arguments) -> None:
        from outrider import LLM, SamplingParams

        args.refuse_converted()
        proposers = {Mode.PLAIN: lambda: "none", Mode.NGRAM: lambda: "ngram", Mode.DRAFT: args.draft_folder}
        proposer = proposers[args.mode]()
        precision: dict[str, Any] = {
            Precision.BF16: {"dtype": "bfloat16"},
            Precision.INT8: {"quantize": "int8"},
        }[args.dtype]
        self._params = SamplingParams
        self._llm = LLM(
            args.target,
            proposer=f"draft:{proposer}" if args.mode is Mode.DRAFT else str(proposer),
            k=args.k,
            threads=args.threads,
            max_num_seqs=1,
            max_model_len=args.context(),
            prefix_caching=False,
            **precision,
        )
        self.settings: Mapping[str, Any] = precision | {"verifier": self._llm.parts.verifier.name}

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        asked = perf_counter()
        marks = []
        for chunk in self._llm.stream(prompt, self._params(max_tokens=max_tokens, temperature=0.0)):
            if chunk.token_ids:
                marks.append((perf_counter(), chunk.token_ids))
        return Run.of_marks(prompt, marks, asked)


if __name__ == "__main__":
    worker.main(Outrider)
