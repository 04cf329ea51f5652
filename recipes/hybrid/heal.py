"""Trains the MTP module of a hybrid on the hybrid's own answers, with the other weights frozen.

python -m recipes.hybrid.heal HYBRID --data prompts.jsonl --out healed
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.store import read_head
from outrider.train.run import Training
from outrider.train.settings import TRAINING_ENGINE, Settings
from recipes.family.train import say
from recipes.hybrid.train import add_module


def main(
    hybrid: Annotated[Path, typer.Argument(help="Folder of a hybrid of `recipes.hybrid.train`.")],
    data: Annotated[Path, typer.Option(help="JSON lines with prompts, which the hybrid answers.")],
    out: Annotated[Path, typer.Option(help="Folder for the hybrid with the trained module.")],
    minutes: Annotated[float, typer.Option(help="Time for answers and training steps.")] = 10.0,
    steps: Annotated[int, typer.Option(min=1, help="Draft tokens that training unrolls.")] = 5,
    loss: Annotated[str, typer.Option(help="As in `outrider train`. kl2: forward KL at temperature 2.")] = "kl2",
) -> None:
    """Train the module of a hybrid. The last line of output is one JSON document."""
    head = out / "head"
    settings = Settings(
        out=str(head),
        data=[str(data)],
        engine=replace(TRAINING_ENGINE, target=str(hybrid)),
        init_from=str(hybrid),
        loss=loss,
        ttt_length=steps,
        max_minutes=minutes,
        max_tokens=160,
        steps_per_generation=16,
        eval_every=0,
    )
    document, _ = Training("mtp", settings).run()
    module = read_head(head, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert isinstance(module, AutoregressiveHead)
    for file in hybrid.iterdir():
        if file.is_file():
            shutil.copy(file, out / file.name)
    add_module(out, module)
    say(f"{out} is written")
    typer.echo(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)
