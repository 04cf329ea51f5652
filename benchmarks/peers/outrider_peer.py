"""A worker for Outrider itself: its Python API with the defaults."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import worker
from worker import Arguments, Mode, Precision, Run

_GGUF = (Precision.Q8_0, Precision.Q4_0)  # types of a file in --converted; the other precisions load the target
_OPTIONS: Mapping[Precision, dict[str, Any]] = {
    Precision.BF16: {"dtype": "bfloat16"},
    Precision.INT8: {"quantize": "int8"},
    Precision.INT4: {"quantize": "int4"},
}
_PROPOSERS = {
    Mode.PLAIN: "none",
    Mode.NGRAM: "ngram",
    Mode.MERGE: "merge(suffix,recycle)",
    Mode.QUANTIZED: "quantized:int4",
}


class Outrider:
    """`LLM.stream`. A chunk has the tokens that one round has committed."""

    packages: Sequence[str] = ("outrider", "torch", "transformers")

    def __init__(self, args: Arguments) -> None:
        args.require(tuple(Mode), (*_OPTIONS, *_GGUF))
        proposer = _PROPOSERS.get(args.mode)
        if proposer is None:
            proposer = f"{args.mode}:{args.draft_folder()}"
        in_file = args.dtype in _GGUF
        precision = {} if in_file else _OPTIONS[args.dtype]
        target = args.converted_model(args.target, ".gguf") if in_file else args.target

        from outrider import LLM, SamplingParams  # after the checks, because it takes seconds

        self._params_class = SamplingParams
        self._llm = LLM(
            target,
            proposer=proposer,
            k=args.k,
            threads=args.threads,
            max_num_seqs=1,
            max_model_len=args.context(),
            prefix_caching=False,
            **precision,
        )
        self._ignore_eos = args.ignore_eos
        verifier = self._llm.parts.verifier.name
        self.settings: Mapping[str, Any] = precision | {"proposer": proposer.partition(":")[0], "verifier": verifier}

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        params = self._params_class(max_tokens=max_tokens, temperature=0.0, ignore_eos=self._ignore_eos)
        chunks = []
        began = perf_counter()
        for chunk in self._llm.stream(prompt, params):
            if chunk.token_ids:
                chunks.append((perf_counter(), chunk.token_ids))
        return Run.of_chunks(prompt, chunks, began)


if __name__ == "__main__":
    worker.main(Outrider)
