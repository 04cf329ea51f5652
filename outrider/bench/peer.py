"""The same prompts through transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from outrider.bench.contestants import Job, Trial
from outrider.llm import LLM
from outrider.measure.clock import EmitEvent, decode_pace, token_gaps


class _Watch(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing: notes when tokens appear."""

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self.marks = [EmitEvent(at=perf_counter(), emitted=(0,))]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.marks.append(EmitEvent(at=perf_counter(), emitted=(input_ids.shape[1] - self._prompt,)))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Peer:
    """`model.generate`, with a draft model also its assisted generation, both with transformers' own defaults."""

    def __init__(self, name: str, model: Any, *, assistant: Any = None) -> None:
        self.name = name
        self._model, self._assistant = model, assistant

    def run(self, jobs: Sequence[Job]) -> Trial:
        (job,) = jobs
        torch.manual_seed(job.params.seed or 0)
        tokens = torch.tensor([job.prompt], device=self._model.device)
        watch = _Watch(len(job.prompt))
        sampled = job.params.temperature > 0
        law = {"temperature": job.params.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
        with _quiet():
            self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=job.params.max_tokens,
                do_sample=sampled,
                stopping_criteria=StoppingCriteriaList([watch]),
                assistant_model=self._assistant,
                **law,
            )
        return Trial(pace=decode_pace(watch.marks), inter_token_latencies=tuple(token_gaps(watch.marks)))


def load_peers(llm: LLM, target: Path, draft: Path | None) -> list[Peer]:
    """Instances of their own, in the precision and on the device of `llm`."""
    with _quiet():
        model, assistant = (_load(folder, llm) if folder else None for folder in (target, draft))
    peers = [Peer("transformers", model)]
    if assistant is not None:
        peers.append(Peer("transformers_assisted", model, assistant=assistant))
    return peers


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and advice out of a benchmark's progress."""
    shown, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()


def _load(folder: Path, llm: LLM) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=llm.parts.dtype, local_files_only=True)
    return model.to(llm.parts.device).eval()
