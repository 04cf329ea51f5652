"""Write a small trained Llama in the dimensions of a large one: the large one's cost, the small one's text.

python benchmarks/gpu/inflate_model.py --model DIR --out DIR --like 8b
python benchmarks/gpu/inflate_model.py --model DIR --out DIR --hidden 1024 --layers 8 --heads 16 --kv-heads 4 --ffn 4096

Of a pair inflate both, each to the dimensions it stands for, and give both the same --vocab. A dimension that is not
given is the preset's, and without one the small model's. With --check, the greedy texts of the small model are scored
by both. The last line is one JSON document.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from inflate.check import Agreement, compare, greedy, load
from inflate.files import Inflated, inflate_folder
from inflate.model import PRESETS, Dims
from rich.console import Console
from rich.table import Table

from outrider import OutriderError
from outrider.measure.prompts import read_prompts
from outrider.system import machine

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Size = Annotated[int | None, typer.Option(min=1)]


def main(
    *,
    model: Annotated[Path, typer.Option(help="Folder of the small model.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    like: Annotated[str | None, typer.Option(help="Dimensions of Llama 3: 8b or 1b.")] = None,
    hidden: Size = None,
    layers: Size = None,
    heads: Size = None,
    kv_heads: Size = None,
    head_dim: Size = None,
    ffn: Size = None,
    vocab: Annotated[int | None, typer.Option(help="Llama 3 has 128256; added tokens never win.", min=1)] = None,
    untie: Annotated[bool, typer.Option("--untie", help="Give tied embeddings a head of its own.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    seed: int = 0,
    check: Annotated[int, typer.Option(help="Tokens of each greedy text to compare on; 0 for none.", min=0)] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: torch's choice.")] = None,
) -> None:
    """Write a small trained Llama in the dimensions of a large one."""
    given: dict[str, Any] = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
        "vocab": vocab,
        "untie": untie or None,
    }
    try:
        dims = replace(_preset(like), **{name: value for name, value in given.items() if value is not None})
        if dtype not in _DTYPES:
            raise OutriderError(f"dtype {dtype!r} is unknown; use {', '.join(_DTYPES)}")
        if threads:
            torch.set_num_threads(threads)
        start = perf_counter()
        made = inflate_folder(model, out, dims, seed=seed, dtype=_DTYPES[dtype])
        seconds = perf_counter() - start
    except OutriderError as error:
        Console(stderr=True).print(f"[red]error:[/] {error}", highlight=False)
        raise typer.Exit(1) from error
    agreements = _check(model, out, _DTYPES[dtype], check) if check else {}
    _show(made, seconds, agreements)
    print(json.dumps(_document(made, seconds, agreements) | {"seed": seed, "dtype": dtype}))


def _preset(name: str | None) -> Dims:
    if name is None:
        return Dims()
    if name not in PRESETS:
        raise OutriderError(f"no preset {name!r}; use {', '.join(PRESETS)}")
    return PRESETS[name]


def _check(small: Path, large: Path, dtype: torch.dtype, count: int) -> dict[str, Agreement]:
    """The large against the small, and beside it what the precision alone does to the small."""
    same, exact = load(small, dtype), load(small, torch.float32)
    texts = greedy(same, small, read_prompts(), count)
    floor = compare(exact, same, texts)
    big = load(large, dtype)
    return {
        "small, from float32": floor,
        "inflated, from float32": compare(exact, big, texts),
        "inflated, from small": compare(same, big, texts),
    }


def _document(made: Inflated, seconds: float, agreements: dict[str, Agreement]) -> dict[str, object]:
    config = made.config
    return {
        "dims": {key: getattr(config, key) for key in _KEYS},
        "parameters": made.parameters,
        "zero_share": made.zeros / made.parameters,
        "bytes": made.bytes,
        "seconds": seconds,
        "agreement": {name: asdict(each) for name, each in agreements.items()},
        "hardware": machine.hardware("cpu"),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }


_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "tie_word_embeddings",
)


def _show(made: Inflated, seconds: float, agreements: dict[str, Agreement]) -> None:
    console = Console()
    console.print(
        f"{made.parameters / 1e6:.0f}M parameters, {made.bytes / 1e9:.2f} GB in {made.files} file(s), "
        f"{made.zeros / made.parameters:.2%} zero, {seconds:.1f} s",
        highlight=False,
    )
    if not agreements:
        return
    table = Table("difference of", "same token", "same text", "mean |logit|", "worst", "KL")
    for name, each in agreements.items():
        table.add_row(
            name,
            f"{each.same}/{each.positions}",
            f"{each.same_texts}/{each.texts}",
            f"{each.mean_logit:.2g}",
            f"{each.worst_logit:.2g}",
            f"{each.kl:.2g}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
