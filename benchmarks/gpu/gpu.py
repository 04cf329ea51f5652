"""How close a GPU's decoding comes to the machine's limit, with models of real dimensions.

python benchmarks/gpu/gpu.py step     # ms of the target's pass at 1, 4, 16, 64 nodes, beside bytes over bandwidth
python benchmarks/gpu/gpu.py race     # tokens/s: speculation, plain decoding, transformers' assisted generation
python benchmarks/gpu/gpu.py round    # what a round takes beyond the target's pass and the draft's steps
python benchmarks/gpu/gpu.py all      # the three, models loaded once

The models are a small trained pair (the embedded one, unless --target and --draft say otherwise), written in the
dimensions of Llama 3 8B and 1B with the same text and the large ones' cost; --inflated-target and --inflated-draft
take what an earlier run, or benchmarks/gpu/inflate_model.py, has written. Batch 1, greedy, medians of interleaved
rounds after a warm-up that compiles and records. --device cpu --like tiny tries it out anywhere. The last line is one
JSON document.
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
from outrider.bench.contestants import Job, OutriderRunner, SwitchPlanner, Variant
from outrider.bench.memory import bytes_per_pass, cache_bytes_per_token
from outrider.bench.peer import load_peers
from outrider.bench.rates import read_bandwidth
from outrider.core import tree
from outrider.core.types import Batch, Request, SequenceState
from outrider.loader.embedded import embedded
from outrider.measure.prompts import read_prompts
from outrider.models.base import Target
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.system import machine

_LIKE = {  # Llama 3, with its vocabulary
    "8b": tuple(replace(PRESETS[name], vocab=128256, untie=True) for name in ("8b", "1b")),
    "tiny": (Dims(), Dims()),
}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_REPEATS = 20  # passes that are timed together


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """What is measured, and how often."""

    llm: LLM
    planner: SwitchPlanner
    peers: list[Variant]
    weight_bytes: int  # that a pass of the target reads
    jobs: tuple[Job, ...]
    k: int
    nodes: tuple[int, ...]
    cached: int
    rounds: int

    @property
    def models(self) -> tuple[Target, Target]:
        """The target and the draft."""
        proposer = self.llm.parts.proposer
        assert isinstance(proposer, DraftModelProposer)
        return self.llm.parts.target, proposer.model


def main(
    row: Annotated[str, typer.Argument(help="step, race, round or all.")],
    *,
    target: Annotated[Path | None, typer.Option(help="Small trained Llama. Default: the embedded one.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Its draft. Default: the embedded one's.")] = None,
    inflated_target: Annotated[Path | None, typer.Option(help="Take this as it is.")] = None,
    inflated_draft: Annotated[Path | None, typer.Option(help="Take this as it is.")] = None,
    like: Annotated[str, typer.Option(help="8b (the draft is then like 1b) or tiny (as they are).")] = "8b",
    device: str = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    k: Annotated[int, typer.Option(help="Guesses a round.", min=1)] = 4,
    nodes: Annotated[str, typer.Option(help="Columns of the passes to time.")] = "1,4,16,64",
    cached: Annotated[int, typer.Option(help="Tokens that lie in the cache for these.", min=1)] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines. Default: one of each category.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    compiled: Annotated[bool, typer.Option(help="Compile the layers before recording.")] = True,
) -> None:
    """Measure one row of the table, or all."""
    console, wanted = Console(stderr=True), [row] if row != "all" else ["step", "race", "round"]
    given = {"like": like, "k": k, "cached": cached, "rounds": rounds, "max_tokens": max_tokens}
    try:
        if row not in (*ROWS, "all") or like not in _LIKE or dtype not in _DTYPES:
            raise OutriderError(f"{row}, {like} or {dtype} is unknown; see --help")
        with tempfile.TemporaryDirectory() as scratch, console.status("writing and loading models"):
            small, ready = (target or embedded("mini"), draft or embedded("nano")), (inflated_target, inflated_draft)
            folders = [done or Path(scratch) / str(i) for i, done in enumerate(ready)]
            for folder, source, done, dims in zip(folders, small, ready, _LIKE[like], strict=True):
                if done is None:
                    inflate_folder(source, folder, dims, dtype=_DTYPES[dtype])
            planner = SwitchPlanner()
            llm = _load(folders, device, dtype, planner)
            stand = Stand(
                llm=llm,
                planner=planner,
                peers=[peer for peer in load_peers(llm, *folders) if peer.name.endswith("assisted")],
                weight_bytes=bytes_per_pass(llm, folders[0]),
                jobs=_jobs(llm, prompts, max_tokens),
                k=k,
                nodes=tuple(int(count) for count in nodes.split(",")),
                cached=cached,
                rounds=rounds,
            )
    except OutriderError as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        raise typer.Exit(1) from error
    with console.status("warming up, then measuring"):
        document = {"benchmark": f"gpu {row}", "arguments": given, "warm_up": _warm(stand, compiled)}
        document |= {name: ROWS[name](stand) for name in wanted}
    _show(document)
    print(json.dumps(document | _about(stand)))


def _load(folders: Sequence[Path], device: str, dtype: str, planner: SwitchPlanner) -> LLM:
    # Not the CPU's own kernels: what is tried out on a CPU is what a GPU takes.
    kernels, spec = "torch" if device == "cpu" else "auto", f"draft:{folders[1]}"
    return LLM(
        folders[0],
        proposer=spec,
        dtype=dtype,
        device=device,
        kernels=kernels,
        max_num_seqs=1,
        planner=planner,
        prefix_caching=False,
    )


def _jobs(llm: LLM, file: Path | None, max_tokens: int) -> tuple[Job, ...]:
    prompts = read_prompts(file, limit=None if file else 1)
    texts = [llm.encode_chat(p.messages) if p.messages else llm.encode(p.prompt or "") for p in prompts]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return tuple(Job(prompt=text[max_tokens - llm.parts.context :], params=params) for text in texts)


def _warm(stand: Stand, compiled: bool) -> dict[str, Any]:
    """Compile and record all that will be measured; and, before and after it, the time to the first token."""
    house, seconds = stand.llm.parts, {}
    first = _first_token(stand)
    reach = max(*(len(job.prompt) + (job.params.max_tokens or 0) for job in stand.jobs), stand.cached + 80)
    for name, model in zip(("target", "draft"), stand.models, strict=True):
        if graphs := getattr(model, "graphs", None):
            columns = (1, 1 + stand.k, *stand.nodes) if name == "target" else (1, 2)
            vocab, steps = house.vocab if house.vocab < model.vocab else 0, (stand.k,) if name == "draft" else ()
            length = min(reach, model.context)
            graphs.warm(rows=1, length=length, columns=columns, steps=steps, vocab=vocab, compiled=compiled)
            seconds[name] = {"seconds": graphs.seconds, "recorded": len(graphs.buckets()), "compiled": graphs.compiled}
    for k in (0, stand.k):
        for job in stand.jobs:
            OutriderRunner("warm up", stand.llm, stand.planner, k=k).run([job])
    return {"models": seconds, "first_token_ms_cold": first, "first_token_ms": _first_token(stand)}


def _first_token(stand: Stand) -> float:
    """Median over the prompts of the time from asking to the first token."""
    stand.planner.k, took = stand.k, []
    for job in stand.jobs:
        began = perf_counter()
        stand.llm.generate([list(job.prompt)], replace(job.params, max_tokens=1))
        took.append(perf_counter() - began)
    return 1e3 * median(took)


def _step(stand: Stand) -> dict[str, Any]:
    """Passes of the target over one row; its bytes are the weights' and those of the cached text."""
    target, house = stand.models[0], stand.llm.parts
    before = max(read_bandwidth(house.device).values())
    passes = {count: _pass(target, stand.cached, count) for count in stand.nodes}
    took: dict[int, list[float]] = {count: [] for count in stand.nodes}
    for _ in range(stand.rounds):
        for count, run in passes.items():
            took[count].append(_seconds(run, house.device))
    bandwidth = max(before, *read_bandwidth(house.device).values())
    size = stand.weight_bytes + stand.cached * cache_bytes_per_token(stand.llm)
    limit = 1e3 * size / bandwidth
    return {
        "bytes": size,
        "read_bytes_per_s": bandwidth,
        "limit_ms": limit,
        "nodes": {
            count: {"ms": 1e3 * median(all), "limit_share": limit / (1e3 * median(all)), "all_seconds": all}
            for count, all in took.items()
        },
    }


def _race(stand: Stand) -> dict[str, Any]:
    own = [OutriderRunner(name, stand.llm, stand.planner, k=k) for name, k in (("plain", 0), ("speculative", stand.k))]
    contestants: list[Variant] = [*own, *stand.peers]
    for peer in stand.peers:
        peer.run(stand.jobs[:1])
    rates, taus = {each.name: list[float]() for each in contestants}, list[float]()
    for turn in range(stand.rounds):
        for each in contestants[:: 1 if turn % 2 == 0 else -1]:
            trials = [each.run([job]) for job in stand.jobs]
            rates[each.name].append(sum(t.pace.tokens for t in trials) / sum(t.pace.seconds for t in trials))
            if each.name == "speculative":
                taus += [trial.stats.tau for trial in trials if trial.stats]
    found: dict[str, Any] = {name: {"tokens_per_s": median(all), "all": all} for name, all in rates.items()}
    ours = found["speculative"]["tokens_per_s"]
    versus = {f"against_{name}": ours / all["tokens_per_s"] for name, all in found.items() if name != "speculative"}
    return found | versus | {"tau": sum(taus) / len(taus)}


def _round(stand: Stand) -> dict[str, Any]:
    """A whole round of speculation, and of it the target's pass and the draft's steps as they take by themselves."""
    (target, draft), house = stand.models, stand.llm.parts
    own = OutriderRunner("speculative", stand.llm, stand.planner, k=stand.k)
    took: dict[str, list[float]] = {"round": [], "target": [], "draft": []}
    for _ in range(stand.rounds):
        trials = [own.run([job]) for job in stand.jobs]
        count = sum(trial.stats.rounds for trial in trials if trial.stats)
        took["round"].append(sum(trial.pace.seconds for trial in trials) / max(count, 1))
        steps = partial(draft.draft_greedy, _text(draft, stand.cached, stand.k), house.vocab)
        took["target"].append(_seconds(_pass(target, stand.cached, 1 + stand.k), house.device))
        took["draft"].append(_seconds(steps, house.device))
    parts = {name: median(all) for name, all in took.items()}
    beyond = parts["round"] - parts["target"] - parts["draft"]
    return {
        **{f"{name}_ms": 1e3 * seconds for name, seconds in parts.items()},
        "beyond_ms": 1e3 * beyond,
        "beyond_percent": 100 * beyond / parts["round"],
        "all_seconds": took,
    }


def _pass(target: Target, cached: int, columns: int) -> Callable[[], object]:
    """A pass over the last token of a text and `columns` - 1 guesses behind it."""
    batch = _text(target, cached, columns - 1)
    draft = tree.chain(torch.ones(1, columns - 1, dtype=torch.int64, device=target.device), (columns - 1,))
    return lambda: target.score(batch, draft)


@torch.inference_mode()
def _text(model: Target, cached: int, budget: int) -> Batch:
    """A row in slot 0 with `cached` tokens in the cache and one more to feed."""
    text = [3 + i % 100 for i in range(cached + 1)]
    request = Request(
        id=0, prompt_token_ids=tuple(text), params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=1
    )
    row = SequenceState(request=request, slot=0, token_ids=text)
    model.cache.admit(0, text)
    none = tree.empty(1, model.device)
    feed = Batch(seqs=(row,), start=(0,), feed=(tuple(text[:-1]),), draft_budget=(0,))
    model.cache.commit(tree.prefill_round(feed, none, model.score(feed, none)))
    return Batch(seqs=(row,), start=(cached,), feed=(tuple(text[-1:]),), draft_budget=(budget,))


@torch.inference_mode()
def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call, among several that the device does one after another."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else list
    for _ in range(3):
        run()
    wait()
    began = perf_counter()
    for _ in range(_REPEATS):
        run()
    wait()
    return (perf_counter() - began) / _REPEATS


def _about(stand: Stand) -> dict[str, Any]:
    models = {
        name: {
            "kernels": model.kernels,
            "weight_bytes": model.bytes(),
            "cache_bytes": model.cache.bytes(),
            "graph_bytes": getattr(model, "graph_bytes", lambda: 0)(),
        }
        for name, model in zip(("target", "draft"), stand.models, strict=True)
    }
    return {
        "models": models,
        "prompts": len(stand.jobs),
        "dtype": str(stand.llm.parts.dtype).removeprefix("torch."),
        "hardware": machine.hardware(str(stand.llm.parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }


def _show(document: dict[str, Any]) -> None:
    for count, each in document.get("step", {}).get("nodes", {}).items():
        print(f"{count:4} nodes  {each['ms']:8.3f} ms  {each['limit_share']:.0%} of the limit")
    for name in (name for name, each in document.get("race", {}).items() if isinstance(each, dict)):
        print(f"{name:24} {document['race'][name]['tokens_per_s']:8.1f} tokens/s")
    if took := document.get("round"):
        parts = ", ".join(f"{name} {took[f'{name}_ms']:.3f} ms" for name in ("round", "target", "draft"))
        print(f"{parts}; beyond these two {took['beyond_percent']:.1f}%")


ROWS: dict[str, Callable[[Stand], dict[str, Any]]] = {"step": _step, "race": _race, "round": _round}

if __name__ == "__main__":
    typer.run(main)
