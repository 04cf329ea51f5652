"""Runs the same prompts through `generate` of transformers."""

from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from outrider.lab.common.clock import DecodeSpeed, EmitEvent, decode_speed
from outrider.lab.common.jobs import Job
from outrider.models.loader.quiet import quiet_transformers


class _Recorder(StoppingCriteria):  # type: ignore[misc]
    """Records when tokens are emitted. It never stops the generation."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self.events = [EmitEvent(at=perf_counter(), emitted=(0,))]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.events.append(EmitEvent(at=perf_counter(), emitted=(input_ids.shape[1] - self._prompt_tokens,)))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Peer:
    """`model.generate`, or assisted generation with a draft model, both with the defaults of transformers."""

    def __init__(self, model: Any, *, assistant: Any = None) -> None:
        self._model = model
        self._assistant = assistant

    def run(self, job: Job) -> DecodeSpeed:
        torch.manual_seed(job.seed)
        tokens = torch.tensor([job.prompt], device=self._model.device)
        recorder = _Recorder(len(job.prompt))
        do_sample = job.params.temperature > 0
        sampling = {"temperature": job.params.temperature, "top_k": 0, "top_p": 1.0} if do_sample else {}
        with quiet_transformers():
            self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=job.params.max_tokens,
                do_sample=do_sample,
                stopping_criteria=StoppingCriteriaList([recorder]),
                assistant_model=self._assistant,
                **sampling,
            )
        return decode_speed(recorder.events)
