"""Measure speculation and prefill by the length of the context.

    python benchmarks/long_context.py decode --target DIR --draft DIR --draft DIR2 --window 512
    python benchmarks/long_context.py prefill --target DIR

`decode` runs plain decoding and each proposer in turns over a prompt of each length, with one target whose cache keeps
the prompt. Each draft model reads the whole context and, in further variants, a window. It prints tau, tokens/s, the
speedup over plain decoding of the same turn (median and range), and the bytes of keys and values that an output token
reads. With one thread, the speeds are those of CPU time.

`prefill` runs passes of 512 prompt tokens behind so many cached tokens, in turns with a matrix product of the same
type. It prints the tokens/s and the share of the FLOP/s of that product, which is the limit of a prompt pass.

Models read contexts beyond their own limit with a larger rotary base (NTK-aware scaling), since no larger model is at
hand. Texts are then worse than those of a model that was trained for such contexts, so tau beyond the limit holds for
this pair only. The last line is one JSON document.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider.core import tree
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.prompts import read_prompts
from outrider.core.target import SelfDraftTarget
from outrider.core.types import Batch, DraftBudget, SequenceState
from outrider.drafting.propose.draft_model.window import find_window
from outrider.drafting.propose.leaves import draft_model
from outrider.engine.build import LoadedTarget, build_engine, load_target
from outrider.llm import LLM
from outrider.runtime import machine
from outrider.train.data.prompts import encode_prompt

app = typer.Typer(add_completion=False, help=__doc__)
Folder = Annotated[str, typer.Option(help="Folder of the target.")]
Lengths = Annotated[str, typer.Option(help="Context lengths in tokens.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
_CHUNK = 512  # prompt tokens of a pass
_SCOPE = "benchmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One proposer of a comparison."""

    name: str
    proposer: str
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The runs of one variant at one length."""

    context: int
    variant: str
    tau: float
    tokens_per_second: float  # median
    speedup: tuple[float, float, float]  # over plain decoding of the same turn: median, least, largest
    target_kv_bytes: float  # per output token
    draft_kv_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Prompt passes behind so many cached tokens."""

    context: int
    tokens_per_second: float  # of CPU time; median
    flops: float  # per second of CPU time
    product_flops: float  # of a matrix product in the same turns; median
    share: tuple[float, float, float]  # of the product's FLOP/s: median, least, largest


@app.command()
def decode(
    *,
    target: Folder,
    draft: Annotated[list[str], typer.Option(help="Folder of a draft model. Repeatable.")] = [],  # noqa: B006
    window: Annotated[list[int], typer.Option(help="Draft window in tokens. Repeatable.")] = [512],  # noqa: B006
    contexts: Lengths = "256,1024,4096",
    k: Annotated[int, typer.Option(help="Draft tokens per round.")] = 4,
    tokens: Annotated[int, typer.Option(help="Output tokens of a run.")] = 64,
    repeats: Annotated[int, typer.Option(help="Turns of each length.")] = 5,
    threads: Threads = 1,
) -> None:
    """Measure acceptance and speed of proposers by context length."""
    with ExitStack() as stack:
        folders = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results = []
        for context in map(int, contexts.split(",")):
            stretched = [_stretched(folder, context + tokens + 1, folders) for folder in (target, *draft)]
            variants = _variants(draft, stretched[1:], window, context)
            loaded = load_target(
                EngineConfig(target=stretched[0], max_num_seqs=1, max_model_len=context + tokens + 1, threads=threads)
            )
            torch.set_num_threads(threads)
            results += _decode(loaded, variants, context=context, k=k, tokens=tokens, repeats=repeats)
    table = Table("context", "proposer", "tau", "tokens/s", "speedup", "KV of target, MB", "KV of draft, MB")
    for row in results:
        middle, least, most = row.speedup
        table.add_row(
            str(row.context),
            row.variant,
            f"{row.tau:.2f}",
            f"{row.tokens_per_second:.1f}",
            f"{middle:.2f} ({least:.2f} to {most:.2f})",
            f"{row.target_kv_bytes / 1e6:.2f}",
            f"{row.draft_kv_bytes / 1e6:.2f}",
        )
    _print(table, "long_context decode", results)


def _variants(drafts: Sequence[str], stretched: Sequence[str], windows: Sequence[int], context: int) -> list[Variant]:
    variants = [
        Variant(name="plain", proposer="none"),
        Variant(name="ngram", proposer="ngram"),
        Variant(name="suffix", proposer="suffix"),
    ]
    for folder, longer in zip(drafts, stretched, strict=True):
        name = Path(folder).name
        variants.append(Variant(name=f"{name}, whole context", proposer=f"draft:{longer}"))
        if longer != folder:
            variants.append(Variant(name=f"{name}, its own window", proposer=f"draft:{folder}"))
        variants += [
            Variant(name=f"{name}, window {size}", proposer=f"draft:{folder}", window=size)
            for size in windows
            if size < context
        ]
    return variants


def _decode(
    loaded: LoadedTarget, variants: Sequence[Variant], *, context: int, k: int, tokens: int, repeats: int
) -> list[Decoded]:
    """Run all variants in turns. The first turn warms up: it prefills the target's cache."""
    llms = {
        variant.name: LLM.from_parts(
            build_engine(
                loaded,
                EngineConfig(proposer=variant.proposer, k=k, draft_window=variant.window, max_num_seqs=1),
            )
        )
        for variant in variants
    }
    # Caches were cleared when the engines were made. All engines use the same one of the target.
    prompt = _prompt(llms["plain"], context)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, scope=_SCOPE)
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    passes: dict[str, int] = {}
    texts = set()
    for turn in range(1 + repeats):
        for name, llm in llms.items():
            before = llm.stats
            run = _timed(llm, prompt, params)
            texts.add(run.token_ids)
            passes[name] = llm.stats.passes - before.passes
            if turn:
                speeds[name].append(run.tokens_per_second)
    if len(texts) > 1:
        raise RuntimeError("the outputs of the variants differ")
    token_bytes = loaded.model.cache.usage().token_bytes
    results = []
    for name, llm in llms.items():
        ratios = sorted(own / plain for own, plain in zip(speeds[name], speeds["plain"], strict=True))
        per_token = passes[name] / tokens
        results.append(
            Decoded(
                context=context,
                variant=name,
                tau=tokens / max(passes[name], 1),
                tokens_per_second=median(speeds[name]),
                speedup=(median(ratios), ratios[0], ratios[-1]),
                target_kv_bytes=per_token * context * token_bytes,
                draft_kv_bytes=per_token * k * _draft_bytes(llm, context),
            )
        )
    return results


def _draft_bytes(llm: LLM, context: int) -> float:
    """Return the bytes of the draft model's KV cache that a draft token reads. 0: there is no draft model."""
    model = draft_model(llm.parts.proposer)
    if model is None:
        return 0.0
    sliding = find_window(model)
    length = context if sliding is None else min(context, sliding.mean_length)
    return float(length * model.cache.usage().token_bytes)


class _Run(NamedTuple):
    token_ids: tuple[int, ...]
    tokens_per_second: float  # from the first token on


def _timed(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> _Run:
    # Other processes disturb the CPU time of one thread less than the time on the clock.
    clock = process_time if torch.get_num_threads() == 1 else perf_counter
    times: list[float] = []
    tokens: list[tuple[int, ...]] = []
    for chunk in llm.stream(list(prompt), params):
        if chunk.token_ids:
            times.append(clock())
            tokens.append(chunk.token_ids)
    later = sum(map(len, tokens[1:]))
    return _Run(sum(tokens, ()), later / (times[-1] - times[0]))


def _prompt(llm: LLM, length: int) -> list[int]:
    """Return a prompt of so many tokens: prompts of the embedded set, one after another."""
    prompts = read_prompts()
    random.Random(0).shuffle(prompts)
    tokens: list[int] = []
    for prompt in cycle(prompts):
        tokens += encode_prompt(llm.parts.tokenizer, prompt)
        if len(tokens) >= length:
            break
    return tokens[-length:]


@app.command()
def prefill(
    *, target: Folder, contexts: Lengths = "256,1024,4096,16384", repeats: int = 5, threads: Threads = 1
) -> None:
    """Measure prompt passes behind cached tokens beside the matrix products of the machine."""
    lengths = [int(length) for length in contexts.split(",")]
    with tempfile.TemporaryDirectory() as folders:
        folder = _stretched(target, max(lengths) + 1, Path(folders))
        loaded = load_target(
            EngineConfig(target=folder, max_num_seqs=1, max_model_len=max(lengths) + 1, threads=threads)
        )
    torch.set_num_threads(threads)
    results = [_prefill(loaded, length, repeats) for length in lengths]
    table = Table("context", "tokens/s", "GFLOP/s", "GFLOP/s of a product", "share")
    for row in results:
        middle, least, most = row.share
        table.add_row(
            str(row.context),
            f"{row.tokens_per_second:.0f}",
            f"{row.flops / 1e9:.0f}",
            f"{row.product_flops / 1e9:.0f}",
            f"{middle:.0%} ({least:.0%} to {most:.0%})",
        )
    _print(table, "long_context prefill", results)


@torch.inference_mode()
def _prefill(loaded: LoadedTarget, length: int, repeats: int) -> Prefilled:
    """Measure the last pass of a prompt of `length` tokens.

    The entries before it are not computed but arbitrary numbers, which take as long to attend to.
    """
    model = loaded.model
    assert isinstance(model, SelfDraftTarget)
    config = loaded.checkpoint.model.config
    size = min(_CHUNK, length)
    start = length - size
    chance = random.Random(0)
    ids = [chance.randrange(model.vocab) for _ in range(length)]
    seq = SequenceState.of(ids[:1])
    model.cache.admit(0, (0,))
    seq.token_ids[:] = ids
    batch = Batch(seqs=(seq,), start=(start,), feed=(tuple(ids[start:]),), budget=DraftBudget((0,)))
    layers, _ = model.read_bytes()
    weights = sum(layers) / loaded.checkpoint.dtype.itemsize
    pairs = size * start + size * (size + 1) / 2  # of a token and an entry that it attends to
    width = config.num_attention_heads * (getattr(config, "head_dim", 0) or config.hidden_size)
    flops = 2 * weights * size + 4 * width * len(layers) * pairs
    product = _product(size, config.hidden_size, config.intermediate_size, loaded.checkpoint.dtype)
    empty = tree.empty(1, model.device)
    model.score(batch, empty)
    pass_flops = []
    product_flops = []
    for _ in range(repeats):
        product_flops.append(product())
        pass_flops.append(flops / _cpu_seconds(lambda: model.score(batch, empty)))
    model.cache.release(0)
    shares = sorted(own / limit for own, limit in zip(pass_flops, product_flops, strict=True))
    return Prefilled(
        context=length,
        tokens_per_second=median(pass_flops) / flops * size,
        flops=median(pass_flops),
        product_flops=median(product_flops),
        share=(median(shares), shares[0], shares[-1]),
    )


def _product(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> Callable[[], float]:
    """Return a function that measures the FLOP/s of a product of [rows, inputs] and [inputs, 2 outputs]."""
    x = torch.randn(rows, inputs).to(dtype)
    weight = torch.randn(2 * outputs, inputs).to(dtype)

    def measure() -> float:
        count = 10
        seconds = _cpu_seconds(lambda: [torch.nn.functional.linear(x, weight) for _ in range(count)])
        return count * 2 * rows * inputs * 2 * outputs / seconds

    measure()
    return measure


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of all threads. Other processes disturb it less than the time on the clock."""
    begin = process_time()
    work()
    return process_time() - begin


def _stretched(folder: str, context: int, root: Path) -> str:
    """Return a folder of the model that takes so many tokens: its own, or a copy with a larger rotary base."""
    config = json.loads((Path(folder) / "config.json").read_text())
    own = config["max_position_embeddings"]
    if own >= context:
        return folder
    copy = root / f"{Path(folder).name}-{context}"
    if not copy.exists():
        shutil.copytree(folder, copy)
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rope = config["rope_parameters"]
        rope["rope_theta"] *= (context / own) ** (dim / (dim - 2))
        (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return str(copy)


def _print(table: Table, name: str, results: Sequence[Decoded] | Sequence[Prefilled]) -> None:
    Console(width=120).print(table)
    rows = [asdict(row) for row in results]
    print(json.dumps({"benchmark": name, "machine": machine.hardware("cpu"), "results": rows}))


if __name__ == "__main__":
    app()
