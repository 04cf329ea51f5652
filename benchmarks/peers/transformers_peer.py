"""transformers: `generate`, its assisted generation, and its prompt lookup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import worker
from worker import NGRAM_SIZE, Arguments, Mode, PeerError, Precision, Run


class Transformers:
    """`model.generate` on torch's own kernels."""

    packages: Sequence[str] = ("transformers", "torch")

    def __init__(self, args: Arguments) -> None:
        args.refuse_converted()
        if args.dtype is Precision.INT8:
            raise PeerError("transformers has no int8 weights without a further package; use --dtype bf16")
        import torch

        torch.set_num_threads(args.threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._torch = torch
        self._model = _read(args.target, device)
        self._options: dict[str, Any] = {}
        if args.mode is Mode.DRAFT:
            assistant = _read(args.draft_folder(), device)
            # k is the most it guesses: by its default it stops earlier where the draft is unsure, which pays.
            assistant.generation_config.num_assistant_tokens = args.k
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self._options = {"assistant_model": assistant}
        elif args.mode is Mode.NGRAM:
            self._options = {"prompt_lookup_num_tokens": args.k, "max_matching_ngram_size": NGRAM_SIZE}
        shown = {name: value for name, value in self._options.items() if name != "assistant_model"}
        self.settings: Mapping[str, Any] = {"device": device, "dtype": "bfloat16"} | shown

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        torch = self._torch
        tokens = torch.tensor([list(prompt)], device=self._model.device)
        seen, marks = len(prompt), []

        def watch(text: Any, scores: Any, **_: Any) -> Any:
            """A stopping criterion that stops nothing: it notes when tokens come, once a round."""
            nonlocal seen
            if text.is_cuda:
                torch.cuda.synchronize()
            new, seen = text[0, seen:], text.shape[1]
            marks.append((perf_counter(), new))
            return torch.zeros(1, dtype=torch.bool, device=text.device)

        asked = perf_counter()
        with torch.inference_mode():
            self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                do_sample=False,
                stopping_criteria=[watch],
                **self._options,
            )
        return Run.of_marks(prompt, [(at, new.tolist()) for at, new in marks], asked)


def _read(folder: Any, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    return model.to(device).eval()


if __name__ == "__main__":
    worker.main(Transformers)
