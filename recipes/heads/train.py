"""Trains a small draft head for a chat model in minutes on a GPU, or in hours on a CPU.

python -m recipes.heads.train MODEL --out head
"""

import json
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.train.run import Training
from outrider.train.settings import TRAINING_ENGINE, Settings
from recipes.family.train import say
from recipes.heads.prompts import make_prompts


def main(
    target: Annotated[Path, typer.Argument(help="Folder or GGUF file of a chat model.")],
    out: Annotated[Path, typer.Option(help="Folder for the head. The prompts are in OUT.prompts.jsonl.")],
    texts: Annotated[
        Path | None, typer.Option(help="Folder of Python files and documents. Default: the installed Python packages.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for answers and training steps.")] = 8.0,
    prompts: Annotated[int, typer.Option(min=64, help="Most prompts. They repeat if time is left.")] = 20_000,
    kind: Annotated[str, typer.Option(help="As in `outrider train`.")] = "eagle31",
    vocab: Annotated[int, typer.Option(min=0, help="Tokens that the head drafts. 0: all.")] = 16_384,
    eval_data: Annotated[Path | None, typer.Option(help="Held-out prompts. Default: some of the prompts.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train a head that shares the target's LM head. The same command resumes. The last line is one JSON document."""
    data = out.with_name(f"{out.name}.prompts.jsonl")
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        lines = make_prompts(texts or Path(sysconfig.get_path("purelib")), prompts, seed)
        data.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
        say(f"{len(lines)} prompts are in {data}")
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    engine = replace(TRAINING_ENGINE, target=str(target), device=device, threads=threads)
    settings = Settings(
        out=str(out),
        data=[str(data)],
        eval_data=None if eval_data is None else str(eval_data),
        engine=engine,
        own_lm_head=False,
        draft_vocab_size=vocab,
        loss="ce:0.1,tv:0.9",
        max_minutes=minutes,
        max_tokens=128,
        seed=seed,
    )
    if on_gpu:  # more sequences at a time, and two passes over the answers, which take longer than the steps
        settings = replace(
            settings,
            engine=replace(engine, max_num_seqs=256),
            batch_size=64,
            micro_batch_tokens=1 << 15,
            passes_per_generation=2,
            eval_every=16,
        )
    document, _ = Training(kind, settings).run()
    say(f"{out} has {(out / 'model.safetensors').stat().st_size / 1e6:.1f} MB; its card is {out / 'README.md'}")
    typer.echo(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)
