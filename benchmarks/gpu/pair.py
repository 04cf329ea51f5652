"""The pair of models that the cells measure: a small trained one, inflated to the dimensions of a large one.

The models generate the text of the small pair at the cost of Llama 3 8B and 1B.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from inflate.files import inflate_folder
from inflate.model import PRESETS, Dims
from transformers_peer import Peer, load_peers

from outrider import LLM, OutriderError, SamplingParams
from outrider.core import tree
from outrider.core.planner import FixedPlanner
from outrider.core.prompts import read_prompts
from outrider.core.target import Target
from outrider.core.types import Batch, DraftBudget, Request, SequenceState
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.lab.bench.pass_work import bytes_per_pass
from outrider.lab.common.jobs import Job, encode_prompt
from outrider.lab.common.timeline import run_jobs
from outrider.lab.common.turns import with_planner
from outrider.runtime import machine

_DIMS_LIKE = {  # of target and draft; 8b: Llama 3 with its vocabulary
    "8b": tuple(replace(PRESETS[name], vocab=128256, untie=True) for name in ("8b", "1b")),
    "tiny": (Dims(), Dims()),
}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_REPEATS = 20  # passes that are timed together
_MARGIN = 80  # tokens after the cached ones for which the warm-up records graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The loaded models and the settings of the measurements."""

    llm: LLM
    peers: list[Peer]
    weight_bytes: int  # read by a pass of the target
    jobs: tuple[Job, ...]
    k: int
    nodes: tuple[int, ...]
    cached: int
    rounds: int

    def engine(self, k: int) -> LLM:
        """Return an engine with k draft tokens per round. k = 0 is plain decoding."""
        return with_planner(self.llm, FixedPlanner(k), plain=not k)

    @property
    def models(self) -> tuple[Target, Target]:
        """The target and the draft model."""
        proposer = self.llm.parts.proposer
        assert isinstance(proposer, DraftModelProposer)
        return self.llm.parts.target, proposer.model


def prepare(
    *,
    small: Sequence[Path],
    inflated: Sequence[Path | None],
    like: str,
    device: str,
    dtype: str,
    k: int,
    nodes: tuple[int, ...],
    cached: int,
    rounds: int,
    prompts: Path | None,
    max_tokens: int,
    with_peers: bool,
) -> Setup:
    """Write the models that are not `inflated` already from the `small` ones, and load them.

    Raises:
        OutriderError: a name is unknown, or a model cannot be loaded.
    """
    if like not in _DIMS_LIKE or dtype not in _DTYPES:
        raise OutriderError(f"{like} or {dtype} is unknown; use 8b or tiny, and bfloat16, float16 or float32")
    with tempfile.TemporaryDirectory() as scratch:
        folders = [folder or Path(scratch) / str(i) for i, folder in enumerate(inflated)]
        for source, given, folder, dims in zip(small, inflated, folders, _DIMS_LIKE[like], strict=True):
            if given is None:
                inflate_folder(source, folder, dims, dtype=_DTYPES[dtype])
        llm = _load(folders, device, dtype)
        peers = load_peers(llm, *folders) if with_peers else []
        return Setup(
            llm=llm,
            peers=[peer for peer in peers if peer.name.endswith("assisted")],
            weight_bytes=bytes_per_pass(llm, folders[0]).dense,
            jobs=_jobs(llm, prompts, max_tokens),
            k=k,
            nodes=nodes,
            cached=cached,
            rounds=rounds,
        )


def _load(folders: Sequence[Path], device: str, dtype: str) -> LLM:
    return LLM(
        folders[0],
        proposer=f"draft:{folders[1]}",
        dtype=dtype,
        device=device,
        # On a CPU use torch rather than the native kernels, because a GPU uses torch.
        kernels="torch" if device == "cpu" else "auto",
        max_num_seqs=1,
        planner=FixedPlanner(0),
        prefix_caching=False,
    )


def _jobs(llm: LLM, file: Path | None, max_tokens: int) -> tuple[Job, ...]:
    prompts = read_prompts(file, limit=None if file else 1)
    token_lists = [encode_prompt(llm, prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return tuple(Job(prompt=tokens[max_tokens - llm.parts.context :], params=params) for tokens in token_lists)


def warm_up(setup: Setup, compiled: bool) -> dict[str, Any]:
    """Compile and record everything that is measured. Return the times, and the time to the first token."""
    parts = setup.llm.parts
    first_token_cold = _first_token_ms(setup)
    longest_job = max(len(job.prompt) + (job.params.max_tokens or 0) for job in setup.jobs)
    max_length = max(longest_job, setup.cached + _MARGIN)
    models = {}
    for name, model in zip(("target", "draft"), setup.models, strict=True):
        graphs = getattr(model, "graphs", None)
        if graphs:
            graphs.warm(
                rows=1,
                length=min(max_length, model.context),
                columns=(1, 1 + setup.k, *setup.nodes) if name == "target" else (1, 2),
                steps=(setup.k,) if name == "draft" else (),
                vocab=parts.vocab if parts.vocab < model.vocab else 0,
                compiled=compiled,
            )
            models[name] = {"seconds": graphs.seconds, "recorded": len(graphs.buckets()), "compiled": graphs.compiled}
    for k in (0, setup.k):
        for job in setup.jobs:
            run_jobs(setup.engine(k), [job])
    return {"models": models, "first_token_ms_cold": first_token_cold, "first_token_ms": _first_token_ms(setup)}


def _first_token_ms(setup: Setup) -> float:
    """Return the median time from the request to the first token, over the prompts."""
    llm = setup.engine(setup.k)
    seconds = []
    for job in setup.jobs:
        began = perf_counter()
        llm.generate([list(job.prompt)], replace(job.params, max_tokens=1))
        seconds.append(perf_counter() - began)
    return 1e3 * median(seconds)


def pass_over(target: Target, cached: int, count: int) -> Callable[[], object]:
    """Return a function that runs a pass over `count` tokens: the last committed token and draft tokens after it."""
    batch = batch_of(target, cached, count - 1)
    draft = tree.chain(torch.ones(1, count - 1, dtype=torch.int64, device=target.device), (count - 1,))
    return lambda: target.score(batch, draft)


@torch.inference_mode()
def batch_of(model: Target, cached: int, budget: int) -> Batch:
    """Return a batch of one sequence in slot 0, with `cached` tokens in the cache and one token to feed."""
    tokens = [3 + i % 100 for i in range(cached + 1)]
    request = Request(
        id=0, prompt_token_ids=tuple(tokens), params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=1
    )
    seq = SequenceState(request=request, slot=0, token_ids=tokens)
    model.cache.admit(0, tokens)
    no_draft = tree.empty(1, model.device)
    prefill = Batch(seqs=(seq,), start=(0,), feed=(tuple(tokens[:-1]),), budget=DraftBudget((0,)))
    model.cache.commit(tree.prefill_round(prefill, no_draft, model.score(prefill, no_draft)))
    return Batch(seqs=(seq,), start=(cached,), feed=(tuple(tokens[-1:]),), budget=DraftBudget((budget,)))


@torch.inference_mode()
def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, the mean of several calls without a wait between them."""
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else list
    for _ in range(3):
        run()  # to warm up
    synchronize()
    began = perf_counter()
    for _ in range(_REPEATS):
        run()
    synchronize()
    return (perf_counter() - began) / _REPEATS


def conditions(setup: Setup) -> dict[str, Any]:
    models = {
        name: {
            "kernels": model.kernels,
            "weight_bytes": model.bytes(),
            "cache_bytes": model.cache.bytes(),
            "graph_bytes": getattr(model, "graph_bytes", lambda: 0)(),
        }
        for name, model in zip(("target", "draft"), setup.models, strict=True)
    }
    return {
        "models": models,
        "prompts": len(setup.jobs),
        "dtype": str(setup.llm.parts.dtype).removeprefix("torch."),
        "hardware": machine.hardware(str(setup.llm.parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }
