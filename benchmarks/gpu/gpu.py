"""Measure how close decoding on a GPU comes to the limit of the machine, with models of real dimensions.

python benchmarks/gpu/gpu.py step     # ms of the target's pass at 1, 4, 16, 64 nodes, and bytes over bandwidth
python benchmarks/gpu/gpu.py race     # tokens/s: speculation, plain decoding, transformers' assisted generation
python benchmarks/gpu/gpu.py round    # what a round takes beyond the target's pass and the draft's steps
python benchmarks/gpu/gpu.py all      # the three, models loaded once

The models are a small trained pair (the embedded one, unless --target and --draft name another). They are inflated to
the dimensions of Llama 3 8B and 1B, so that they generate the same text at the cost of the large models.
--inflated-target and --inflated-draft name models that an earlier run, or benchmarks/gpu/inflate_model.py, has written.
The batch size is 1, and decoding is greedy. The results are medians of interleaved rounds, after a warm-up that
compiles the layers and records the CUDA graphs. Use --device cpu --like tiny to try the script without a GPU. The last
line is one JSON document.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from inflate.files import inflate_folder
from inflate.model import PRESETS, Dims
from rich.console import Console

from outrider import LLM, OutriderError, SamplingParams
from outrider.bench.pass_work import bytes_per_pass, cache_bytes_per_token
from outrider.bench.peer import load_peers
from outrider.bench.rates import read_bandwidth
from outrider.bench.variants import OutriderRunner, SwitchPlanner, Variant
from outrider.benchmarking.jobs import Job, encode_prompt
from outrider.core import tree
from outrider.core.types import Batch, Request, SequenceState
from outrider.loader.embedded import embedded
from outrider.measure.prompts import read_prompts
from outrider.models.base import Target
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.system import machine

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
    planner: SwitchPlanner
    peers: list[Variant]
    weight_bytes: int  # read by a pass of the target
    jobs: tuple[Job, ...]
    k: int
    nodes: tuple[int, ...]
    cached: int
    rounds: int

    @property
    def models(self) -> tuple[Target, Target]:
        """The target and the draft model."""
        proposer = self.llm.parts.proposer
        assert isinstance(proposer, DraftModelProposer)
        return self.llm.parts.target, proposer.model


def main(
    measurement: Annotated[str, typer.Argument(help="step, race, round or all.")],
    *,
    target: Annotated[Path | None, typer.Option(help="Small trained Llama. Default: the embedded one.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Its draft model. Default: the embedded one.")] = None,
    inflated_target: Annotated[Path | None, typer.Option(help="Inflated target, used as it is.")] = None,
    inflated_draft: Annotated[Path | None, typer.Option(help="Inflated draft model, used as it is.")] = None,
    like: Annotated[str, typer.Option(help="8b (the draft is then like 1b) or tiny (as they are).")] = "8b",
    device: str = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    k: Annotated[int, typer.Option(help="Draft tokens per round.", min=1)] = 4,
    nodes: Annotated[str, typer.Option(help="Tokens of the passes to time.")] = "1,4,16,64",
    cached: Annotated[int, typer.Option(help="Cached tokens during these passes.", min=1)] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines. Default: one of each category.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    compiled: Annotated[bool, typer.Option(help="Compile the layers before recording.")] = True,
) -> None:
    """Run one measurement, or all."""
    console = Console(stderr=True)
    names = [measurement] if measurement != "all" else ["step", "race", "round"]
    arguments = {"like": like, "k": k, "cached": cached, "rounds": rounds, "max_tokens": max_tokens}
    try:
        if measurement not in (*MEASUREMENTS, "all"):
            raise OutriderError(f"{measurement} is unknown; see --help")
        with console.status("writing and loading models"):
            setup = prepare(
                small=(target or embedded("mini"), draft or embedded("nano")),
                inflated=(inflated_target, inflated_draft),
                like=like,
                device=device,
                dtype=dtype,
                k=k,
                nodes=tuple(int(count) for count in nodes.split(",")),
                cached=cached,
                rounds=rounds,
                prompts=prompts,
                max_tokens=max_tokens,
            )
    except OutriderError as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        raise typer.Exit(1) from error
    with console.status("warming up, then measuring"):
        document = {"benchmark": f"gpu {measurement}", "arguments": arguments, "warm_up": warm_up(setup, compiled)}
        document |= {name: MEASUREMENTS[name](setup) for name in names}
    _show(document)
    print(json.dumps(document | conditions(setup)))


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
    with_peers: bool = True,
) -> Setup:
    """Write the models that are not `inflated` already from the `small` ones, and load them.

    Raises:
        OutriderError: a name is unknown, or a model cannot be loaded.
    """
    if like not in _DIMS_LIKE or dtype not in _DTYPES:
        raise OutriderError(f"{like} or {dtype} is unknown; see --help")
    with tempfile.TemporaryDirectory() as scratch:
        folders = [folder or Path(scratch) / str(i) for i, folder in enumerate(inflated)]
        for source, given, folder, dims in zip(small, inflated, folders, _DIMS_LIKE[like], strict=True):
            if given is None:
                inflate_folder(source, folder, dims, dtype=_DTYPES[dtype])
        planner = SwitchPlanner()
        llm = _load(folders, device, dtype, planner)
        peers = load_peers(llm, *folders) if with_peers else []
        return Setup(
            llm=llm,
            planner=planner,
            peers=[peer for peer in peers if peer.name.endswith("assisted")],
            weight_bytes=bytes_per_pass(llm, folders[0]).dense,
            jobs=_jobs(llm, prompts, max_tokens),
            k=k,
            nodes=nodes,
            cached=cached,
            rounds=rounds,
        )


def _load(folders: Sequence[Path], device: str, dtype: str, planner: SwitchPlanner) -> LLM:
    return LLM(
        folders[0],
        proposer=f"draft:{folders[1]}",
        dtype=dtype,
        device=device,
        # On a CPU use torch rather than the native kernels, because a GPU uses torch.
        kernels="torch" if device == "cpu" else "auto",
        max_num_seqs=1,
        planner=planner,
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
            OutriderRunner("warm up", setup.llm, setup.planner, k=k).run([job])
    return {"models": models, "first_token_ms_cold": first_token_cold, "first_token_ms": _first_token_ms(setup)}


def _first_token_ms(setup: Setup) -> float:
    """Return the median time from the request to the first token, over the prompts."""
    setup.planner.k = setup.k
    seconds = []
    for job in setup.jobs:
        began = perf_counter()
        setup.llm.generate([list(job.prompt)], replace(job.params, max_tokens=1))
        seconds.append(perf_counter() - began)
    return 1e3 * median(seconds)


def _measure_step(setup: Setup) -> dict[str, Any]:
    """Time passes of the target over one sequence. A pass reads the weights and the cached keys and values."""
    target = setup.models[0]
    device = setup.llm.parts.device
    bandwidth_before = max(read_bandwidth(device).values())
    passes = {count: pass_over(target, setup.cached, count) for count in setup.nodes}
    seconds: dict[int, list[float]] = {count: [] for count in setup.nodes}
    for _ in range(setup.rounds):
        for count, run in passes.items():
            seconds[count].append(_seconds(run, device))
    bandwidth = max(bandwidth_before, *read_bandwidth(device).values())
    size = setup.weight_bytes + setup.cached * cache_bytes_per_token(setup.llm)
    limit = 1e3 * size / bandwidth
    return {
        "bytes": size,
        "read_bytes_per_s": bandwidth,
        "limit_ms": limit,
        "nodes": {
            count: {"ms": 1e3 * median(times), "limit_share": limit / (1e3 * median(times)), "all_seconds": times}
            for count, times in seconds.items()
        },
    }


def _measure_race(setup: Setup) -> dict[str, Any]:
    """Measure the tokens/s of plain decoding, speculation and the peers in turns."""
    variants: list[Variant] = [
        OutriderRunner("plain", setup.llm, setup.planner, k=0),
        OutriderRunner("speculative", setup.llm, setup.planner, k=setup.k),
        *setup.peers,
    ]
    for peer in setup.peers:
        peer.run(setup.jobs[:1])  # to warm up
    rates = {variant.name: list[float]() for variant in variants}
    taus = list[float]()
    for round in range(setup.rounds):
        for variant in variants[:: 1 if round % 2 == 0 else -1]:
            trials = [variant.run([job]) for job in setup.jobs]
            tokens = sum(trial.speed.tokens for trial in trials)
            rates[variant.name].append(tokens / sum(trial.speed.seconds for trial in trials))
            if variant.name == "speculative":
                taus += [trial.stats.tau for trial in trials if trial.stats]
    results: dict[str, Any] = {name: {"tokens_per_s": median(all), "all": all} for name, all in rates.items()}
    speculative = results["speculative"]["tokens_per_s"]
    ratios = {
        f"against_{name}": speculative / result["tokens_per_s"]
        for name, result in results.items()
        if name != "speculative"
    }
    return results | ratios | {"tau": sum(taus) / len(taus)}


def _measure_round(setup: Setup) -> dict[str, Any]:
    """Time a round of speculation, and separately the target's pass and the draft's steps in it."""
    target, draft = setup.models
    parts = setup.llm.parts
    runner = OutriderRunner("speculative", setup.llm, setup.planner, k=setup.k)
    seconds: dict[str, list[float]] = {"round": [], "target": [], "draft": []}
    for _ in range(setup.rounds):
        trials = [runner.run([job]) for job in setup.jobs]
        rounds = sum(trial.stats.rounds for trial in trials if trial.stats)
        seconds["round"].append(sum(trial.speed.seconds for trial in trials) / max(rounds, 1))
        draft_steps = partial(draft.draft_greedy, _batch(draft, setup.cached, setup.k), parts.vocab)
        seconds["target"].append(_seconds(pass_over(target, setup.cached, 1 + setup.k), parts.device))
        seconds["draft"].append(_seconds(draft_steps, parts.device))
    medians = {name: median(times) for name, times in seconds.items()}
    beyond = medians["round"] - medians["target"] - medians["draft"]
    return {
        **{f"{name}_ms": 1e3 * value for name, value in medians.items()},
        "beyond_ms": 1e3 * beyond,
        "beyond_percent": 100 * beyond / medians["round"],
        "all_seconds": seconds,
    }


def pass_over(target: Target, cached: int, count: int) -> Callable[[], object]:
    """Return a function that runs a pass over `count` tokens: the last committed token and draft tokens after it."""
    batch = _batch(target, cached, count - 1)
    draft = tree.chain(torch.ones(1, count - 1, dtype=torch.int64, device=target.device), (count - 1,))
    return lambda: target.score(batch, draft)


@torch.inference_mode()
def _batch(model: Target, cached: int, budget: int) -> Batch:
    """Return a batch of one sequence in slot 0, with `cached` tokens in the cache and one token to feed."""
    tokens = [3 + i % 100 for i in range(cached + 1)]
    request = Request(
        id=0, prompt_token_ids=tuple(tokens), params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=1
    )
    seq = SequenceState(request=request, slot=0, token_ids=tokens)
    model.cache.admit(0, tokens)
    no_draft = tree.empty(1, model.device)
    prefill = Batch(seqs=(seq,), start=(0,), feed=(tuple(tokens[:-1]),), draft_budget=(0,))
    model.cache.commit(tree.prefill_round(prefill, no_draft, model.score(prefill, no_draft)))
    return Batch(seqs=(seq,), start=(cached,), feed=(tuple(tokens[-1:]),), draft_budget=(budget,))


@torch.inference_mode()
def _seconds(run: Callable[[], object], device: torch.device) -> float:
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


def _show(document: dict[str, Any]) -> None:
    for count, result in document.get("step", {}).get("nodes", {}).items():
        print(f"{count:4} nodes  {result['ms']:8.3f} ms  {result['limit_share']:.0%} of the limit")
    for name, result in document.get("race", {}).items():
        if isinstance(result, dict):
            print(f"{name:24} {result['tokens_per_s']:8.1f} tokens/s")
    if result := document.get("round"):
        parts = ", ".join(f"{name} {result[f'{name}_ms']:.3f} ms" for name in ("round", "target", "draft"))
        print(f"{parts}; {result['beyond_percent']:.1f}% of the round is neither")


MEASUREMENTS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "step": _measure_step,
    "race": _measure_race,
    "round": _measure_round,
}

if __name__ == "__main__":
    typer.run(main)
