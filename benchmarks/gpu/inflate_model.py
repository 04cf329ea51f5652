"""Inflate a small trained Llama to the dimensions of a large one: the cost of the large one, the text of the small one.

python benchmarks/gpu/inflate_model.py --model DIR --out DIR --like 8b
python benchmarks/gpu/inflate_model.py --model DIR --out DIR --hidden 1024 --layers 8 --heads 16 --kv-heads 4 --ffn 4096

To inflate a pair, inflate the target and the draft to their own dimensions, and give both the same --vocab. A dimension
that is not given is that of the preset, or without a preset that of the small model. With --check, both models score
greedy outputs of the small model. The last line is one JSON document.
"""

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
from outrider.core.prompts import read_prompts
from outrider.runtime import machine

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Size = Annotated[int | None, typer.Option(min=1)]


def main(
    *,
    model: Annotated[Path, typer.Option(help="Folder of the small model.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    like: Annotated[str | None, typer.Option(help="Dimensions of Llama 3: 8b or 1b.")] = None,
    hidden: Size = None,
    layers: Size = None,
    heads: Size = None,
    kv_heads: Size = None,
    head_dim: Size = None,
    ffn: Size = None,
    vocab: Annotated[int | None, typer.Option(help="Llama 3 has 128256; added tokens are never chosen.", min=1)] = None,
    untie: Annotated[bool, typer.Option("--untie", help="Give tied embeddings a separate LM head.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    seed: int = 0,
    check: Annotated[int, typer.Option(help="Tokens of each greedy output to compare; 0 for none.", min=0)] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: torch's choice.")] = None,
) -> None:
    """Inflate a small trained Llama to the dimensions of a large one."""
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
        began = perf_counter()
        inflated = inflate_folder(model, out, dims, seed=seed, dtype=_DTYPES[dtype])
        seconds = perf_counter() - began
    except OutriderError as error:
        Console(stderr=True).print(f"[red]error:[/] {error}", highlight=False)
        raise typer.Exit(1) from error
    agreements = _check(model, out, _DTYPES[dtype], check) if check else {}
    _show(inflated, seconds, agreements)
    print(json.dumps(_document(inflated, seconds, agreements) | {"seed": seed, "dtype": dtype}))


def _preset(name: str | None) -> Dims:
    if name is None:
        return Dims()
    if name not in PRESETS:
        raise OutriderError(f"preset {name!r} is unknown; use {', '.join(PRESETS)}")
    return PRESETS[name]


def _check(small: Path, large: Path, dtype: torch.dtype, count: int) -> dict[str, Agreement]:
    """Compare the large model with the small one, and for reference the small one with itself in float32."""
    small_model = load(small, dtype)
    small_float32 = load(small, torch.float32)
    outputs = greedy(small_model, small, read_prompts(), count)
    small_from_float32 = compare(small_float32, small_model, outputs)
    large_model = load(large, dtype)
    return {
        "small, from float32": small_from_float32,
        "inflated, from float32": compare(small_float32, large_model, outputs),
        "inflated, from small": compare(small_model, large_model, outputs),
    }


def _document(inflated: Inflated, seconds: float, agreements: dict[str, Agreement]) -> dict[str, object]:
    config = inflated.config
    return {
        "dims": {key: getattr(config, key) for key in _KEYS},
        "parameters": inflated.parameters,
        "zero_share": inflated.zeros / inflated.parameters,
        "bytes": inflated.bytes,
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


def _show(inflated: Inflated, seconds: float, agreements: dict[str, Agreement]) -> None:
    console = Console()
    console.print(
        f"{inflated.parameters / 1e6:.0f}M parameters, {inflated.bytes / 1e9:.2f} GB in {inflated.files} file(s), "
        f"{inflated.zeros / inflated.parameters:.2%} zero, {seconds:.1f} s",
        highlight=False,
    )
    if not agreements:
        return
    table = Table("difference of", "same token", "same output", "mean |logit|", "largest", "KL")
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
