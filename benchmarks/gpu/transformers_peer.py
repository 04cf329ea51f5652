"""Runs the same prompts through `generate` of transformers."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from outrider.errors import OutriderError
from outrider.lab.common.clock import DecodeSpeed, EmitEvent, decode_speed
from outrider.lab.common.jobs import Job
from outrider.llm import LLM
from outrider.models.loader.model_class import auto_class
from outrider.models.loader.paths import is_gguf
from outrider.models.loader.quiet import quiet_transformers
from outrider.models.loader.transformers_checkpoint import read_transformers_config


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

    def __init__(self, name: str, model: Any, *, assistant: Any = None) -> None:
        self.name = name
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


def load_peers(llm: LLM, target: Path, draft: Path | None) -> list[Peer]:
    """Load separate copies of the models, in the precision and on the device of `llm`."""
    with quiet_transformers():
        model = _load(target, llm)
        assistant = _load(draft, llm) if draft else None
    peers = [Peer("transformers", model)]
    if assistant is not None:
        peers.append(Peer("transformers_assisted", model, assistant=assistant))
    return peers


def _load(folder: Path, llm: LLM) -> Any:
    if is_gguf(folder):
        raise OutriderError(f"{folder} does not run on transformers here; leave --peers out, or give a folder")
    model_class = auto_class(read_transformers_config(folder))
    model = model_class.from_pretrained(folder, dtype=llm.parts.dtype, local_files_only=True)
    return model.to(llm.parts.device).eval()
