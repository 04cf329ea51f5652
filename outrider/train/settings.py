"""What `outrider train` is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from outrider.errors import OutriderError

_WHAT, _DATA, _HOW = "Draft", "Data", "Training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options, each once."""

    out: Annotated[str, typer.Option(metavar="DIR", help="Folder to write; training goes on from what lies there.")]
    data: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="JSON lines with prompt or messages. Repeatable.", rich_help_panel=_DATA),
    ]
    target: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the target. Default: the embedded one.")
    ] = None
    held_out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts to measure on. Default: some of the data.", rich_help_panel=_DATA),
    ] = None
    limit: Annotated[int | None, typer.Option(help="Prompts of the data. Default: all.", rich_help_panel=_DATA)] = None
    epochs: Annotated[int, typer.Option(min=1, help="How often each prompt is answered.", rich_help_panel=_DATA)] = 1
    answer_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.", rich_help_panel=_DATA)] = 256
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the target's answers.", rich_help_panel=_DATA)] = 1.0
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Answer past end-of-text, to the last token.", rich_help_panel=_DATA)
    ] = False
    everything: Annotated[
        bool, typer.Option("--everything", help="Learn from prompts as well as from answers.", rich_help_panel=_DATA)
    ] = False
    depth: Annotated[int, typer.Option(min=1, help="Decoder layers, or independent heads.", rich_help_panel=_WHAT)] = 1
    ffn: Annotated[
        int, typer.Option(min=0, help="Width of the perceptrons; 0 = as Llama's.", rich_help_panel=_WHAT)
    ] = 0
    draft_vocab: Annotated[
        int, typer.Option(min=0, help="Tokens that can be guessed, the likeliest; 0 = all.", rich_help_panel=_WHAT)
    ] = 0
    steps: Annotated[int, typer.Option(min=1, help="Guesses in a row that are trained.", rich_help_panel=_HOW)] = 4
    decay: Annotated[
        float, typer.Option(min=0.0, help="Weight of a guess, beside the one before.", rich_help_panel=_HOW)
    ] = 0.8
    loss: Annotated[
        str, typer.Option(help="ce, kl, rkl, jsd, tv, nla, hybrid, length; or ce:0.1,tv:0.9.", rich_help_panel=_HOW)
    ] = "ce"
    lr: Annotated[float, typer.Option(help="Learning rate at its height.", rich_help_panel=_HOW)] = 1e-3
    batch: Annotated[int, typer.Option(min=1, help="Texts of a step, on each device.", rich_help_panel=_HOW)] = 16
    part: Annotated[int, typer.Option(min=1, help="Tokens at once in a step.", rich_help_panel=_HOW)] = 2048
    rows: Annotated[int, typer.Option(min=1, help="Prompts answered at once.", rich_help_panel=_HOW)] = 32
    waves: Annotated[int, typer.Option(min=1, help="Steps between two rounds of answers.", rich_help_panel=_HOW)] = 8
    check_every: Annotated[
        int, typer.Option(min=0, help="Waves between measurements of tau; 0 = at the end alone.", rich_help_panel=_HOW)
    ] = 8
    k: Annotated[
        int, typer.Option("--k", min=1, help="Guesses a round where tau is measured.", rich_help_panel=_HOW)
    ] = 5
    seed: Annotated[int, typer.Option(help="Of weights, order and answers.", rich_help_panel=_HOW)] = 0
    proposer: Annotated[str, typer.Option(help="Who guesses while the target answers.", rich_help_panel=_DATA)] = (
        "suffix:100000"
    )
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...", rich_help_panel=_HOW)] = "auto"
    threads: Annotated[int | None, typer.Option(help="CPU threads.", rich_help_panel=_HOW)] = None
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Begin anew where a training with other options lies.", rich_help_panel=_HOW),
    ] = False
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write events beside the log; takes pip install tensorboard.")
    ] = False

    def __post_init__(self) -> None:
        if not self.data:
            raise OutriderError("train needs prompts; add --data FILE with JSON lines that hold a prompt")
        if not 0 < self.lr < 1 or not 0 < self.decay <= 1:
            raise OutriderError(f"lr is {self.lr} and decay {self.decay}; use an lr in (0, 1) and a decay in (0, 1]")

    def identity(self) -> dict[str, Any]:
        """What a training that goes on must have in common with the one before."""
        apart = {"out", "restart", "tensorboard", "threads", "device", "check_every", "rows", "proposer", "part"}
        return {name: value for name, value in asdict(self).items() if name not in apart}
