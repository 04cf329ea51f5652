"""A worker for transformers: `generate` alone, with assisted generation, or with prompt lookup."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import worker
from worker import NGRAM_SIZE, PEER_MODES, Arguments, Mode, Precision, Run

_TYPES = {Precision.BF16: "bfloat16", Precision.F32: "float32"}


class Transformers:
    """`model.generate` on torch kernels."""

    packages: Sequence[str] = ("transformers", "torch")

    def __init__(self, args: Arguments) -> None:
        args.refuse_converted()
        args.require(PEER_MODES, tuple(_TYPES))
        import torch

        torch.set_num_threads(args.threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._torch = torch
        dtype = _TYPES[args.dtype]
        self._model = _load(args.target, dtype, device)
        if args.ignore_eos:
            self._model.generation_config.eos_token_id = None
        self._options: dict[str, Any] = {}
        if args.mode is Mode.DRAFT:
            assistant = _load(args.draft_folder(), dtype, device)
            # k is a maximum: by default the assistant stops earlier at a low confidence, which makes it faster.
            assistant.generation_config.num_assistant_tokens = args.draft_length()
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self._options = {"assistant_model": assistant}
        elif args.mode is Mode.NGRAM:
            self._options = {"prompt_lookup_num_tokens": args.draft_length(), "max_matching_ngram_size": NGRAM_SIZE}
        options = {name: value for name, value in self._options.items() if name != "assistant_model"}
        self.settings: Mapping[str, Any] = {"device": device, "dtype": dtype} | options

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        torch = self._torch
        tokens = torch.tensor([list(prompt)], device=self._model.device)
        num_seen = len(prompt)
        chunks = []

        def record(input_ids: Any, scores: Any, **_: Any) -> Any:
            """Record the tokens and the time of each round. As a stopping criterion it never stops."""
            nonlocal num_seen
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            chunk = input_ids[0, num_seen:]
            num_seen = input_ids.shape[1]
            chunks.append((perf_counter(), chunk))
            return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

        began = perf_counter()
        with torch.inference_mode():
            self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                do_sample=False,
                stopping_criteria=[record],
                **self._options,
            )
        return Run.of_chunks(prompt, [(at, chunk.tolist()) for at, chunk in chunks], began)


def _load(folder: Any, dtype: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return model.to(device).eval()


if __name__ == "__main__":
    worker.main(Transformers)
