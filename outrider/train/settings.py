"""What `outrider train` is asked for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from outrider.errors import OutriderError

DRAFT = "draft"  # the kind that is no head, but a small model
_LONGEST, _GUESSER = 256, "suffix:100000"  # tokens of an answer; who guesses meanwhile
_FAR, _WIDE, _SEEDS = 256, 1 << 20, 1 << 62  # at most: guesses or layers, a width, seeds
_WHAT, _DATA, _HOW, _OUT = "Draft", "Data", "Training", "Output"
_APART = frozenset(  # places, whose contents count instead; and what changes nothing of the weights that come out
    {
        "out",
        "target",
        "draft",
        "draft_target",
        "data",
        "held_out",
        "restart",
        "tensorboard",
        "report",
        "threads",
        "device",
        "check_every",
        "save_every",
        "k",
        "rows",
        "proposer",
        "part",
        "cache",
        "cache_gb",
    }
)
_LATER = frozenset(
    {"mask_token", "with_target", "width"}
)  # which trainings that are still going on may have begun without


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options, each once."""

    out: Annotated[str, typer.Option(metavar="DIR", help="Folder to write; training goes on from what lies there.")]
    data: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="JSON lines with prompt or messages. Repeatable.", rich_help_panel=_DATA),
    ]
    target: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the target. Default: @mini, which comes along.")
    ] = None
    held_out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts to measure on. Default: some of the data.", rich_help_panel=_DATA),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts of the data. Default: all.", rich_help_panel=_DATA)
    ] = None
    epochs: Annotated[int, typer.Option(min=1, help="How often a prompt is learned from.", rich_help_panel=_DATA)] = 1
    answers: Annotated[
        int,
        typer.Option(
            min=0, help="Different answers to a prompt, in turns; 0 = one for each epoch.", rich_help_panel=_DATA
        ),
    ] = 0
    answer_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.", rich_help_panel=_DATA)] = _LONGEST
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the target's answers.", rich_help_panel=_DATA)] = 1.0
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Answer past end-of-text, to the last token.", rich_help_panel=_DATA)
    ] = False
    everything: Annotated[
        bool, typer.Option("--everything", help="Learn from prompts as well as from answers.", rich_help_panel=_DATA)
    ] = False
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="What to go on with: a trained draft of the same kind, or for the kind draft a small model.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    draft_target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="What --draft was trained for, if that is another target: how it sees this one is found anew.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    depth: Annotated[
        int,
        typer.Option(
            min=0, help="Decoder layers, or independent heads; 0 = one layer, four heads.", rich_help_panel=_WHAT
        ),
    ] = 0
    ffn: Annotated[
        int, typer.Option(min=0, help="Width of the perceptrons; 0 = as Llama's.", rich_help_panel=_WHAT)
    ] = 0
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of a draft that reads three layers of the target. Default: the target's, and half of it for slim.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    draft_vocab: Annotated[
        int, typer.Option(min=0, help="Tokens that can be guessed, the likeliest; 0 = all.", rich_help_panel=_WHAT)
    ] = 0
    own_head: Annotated[
        bool | None,
        typer.Option(
            "--own-head/--shared-head",
            help="An output layer of the draft's own, or the target's. Default: own where three layers are read.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    guesses: Annotated[
        int, typer.Option(min=0, help="Of the kinds that make all of them in one pass; 0 = 7.", rich_help_panel=_WHAT)
    ] = 0
    mask_token: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Mask a block by this token's embedding, as other formats do. Default: a mask that is learned.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    modules: Annotated[
        int,
        typer.Option(
            min=1, help="Of mtp: each makes one guess; 1 alone is applied again and again.", rich_help_panel=_WHAT
        ),
    ] = 1
    with_target: Annotated[
        float | None,
        typer.Option(
            metavar="WEIGHT",
            help="Train the target too, on the data's own texts; mtp's loss counts so much, for example 0.3.",
            rich_help_panel=_HOW,
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Guesses in a row that are trained. Default: all of heads, modules or a pass, 1 of a model, else 4.",
            rich_help_panel=_HOW,
        ),
    ] = None
    later: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of places that train guesses after the first too, or a block.",
            rich_help_panel=_HOW,
        ),
    ] = 1.0
    decay: Annotated[
        float, typer.Option(min=0.0, help="Weight of a guess, beside the one before.", rich_help_panel=_HOW)
    ] = 0.8
    loss: Annotated[
        str, typer.Option(help="ce, kl, rkl, jsd, tv, nla, hybrid, length; or ce:0.1,tv:0.9.", rich_help_panel=_HOW)
    ] = "ce"
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate at its height. Default: 1e-3, or 1e-4 for a whole model.", rich_help_panel=_HOW
        ),
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Texts of a step, on each device.", rich_help_panel=_HOW)] = 16
    part: Annotated[int, typer.Option(min=1, help="Tokens at once in a step.", rich_help_panel=_HOW)] = 2048
    rows: Annotated[int, typer.Option(min=1, help="Prompts answered at once.", rich_help_panel=_HOW)] = 32
    waves: Annotated[int, typer.Option(min=1, help="Steps between two rounds of answers.", rich_help_panel=_HOW)] = 8
    check_every: Annotated[
        int, typer.Option(min=0, help="Waves between measurements of tau; 0 = at the end alone.", rich_help_panel=_HOW)
    ] = 8
    save_every: Annotated[int, typer.Option(min=1, help="Waves between two saves.", rich_help_panel=_HOW)] = 1
    k: Annotated[
        int, typer.Option("--k", min=1, help="Guesses a round where tau is measured.", rich_help_panel=_HOW)
    ] = 5
    seed: Annotated[int, typer.Option(help="Of weights, order and answers.", rich_help_panel=_HOW)] = 0
    proposer: Annotated[str, typer.Option(help="Who guesses while the target answers.", rich_help_panel=_DATA)] = (
        _GUESSER
    )
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Keep answers and states there, to be read instead of made.", rich_help_panel=_DATA
        ),
    ] = None
    cache_gb: Annotated[
        float | None,
        typer.Option("--cache-gb", help="Of the cache at most. Default: 10.", rich_help_panel=_DATA),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...", rich_help_panel=_HOW)] = "auto"
    threads: Annotated[int | None, typer.Option(help="CPU threads.", rich_help_panel=_HOW)] = None
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Begin anew where a training with other options lies.", rich_help_panel=_HOW),
    ] = False
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Write events beside the log; takes pip install tensorboard.", rich_help_panel=_OUT
        ),
    ] = False
    report: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Write a page with plots, for example report.html. Takes pip install "outrider\\[report]".',
            rich_help_panel=_OUT,
        ),
    ] = None

    def __post_init__(self) -> None:
        if not self.data:
            raise OutriderError("train needs prompts; add --data FILE with JSON lines that hold a prompt")
        if (self.lr is not None and not 0 < self.lr < 1) or not 0 < self.decay <= 1:
            raise OutriderError(f"lr is {self.lr} and decay {self.decay}; use an lr in (0, 1) and a decay in (0, 1]")
        self._check_sizes()
        if self.draft_target is not None and self.draft is None:
            raise OutriderError("--draft-target says what --draft was trained for; add --draft DIR, or leave it out")
        if not self.later:
            raise OutriderError("later is 0, and no guess after the first would be trained; use --steps 1 for that")
        if self.cache_gb is not None and (self.cache is None or not self.cache_gb > 0):
            raise OutriderError("--cache-gb bounds a cache; use it above 0 and with --cache DIR")
        if self.with_target is not None:
            self._check_given(self.with_target)

    def _check_sizes(self) -> None:
        """Nothing is begun that no machine could hold or finish."""
        far = {"steps": self.steps or 0, "depth": self.depth, "guesses": self.guesses, "modules": self.modules}
        for name, size, most in (
            *((name, size, _FAR) for name, size in far.items()),
            ("ffn", self.ffn, _WIDE),
            ("width", self.width or 0, _WIDE),
        ):
            if size > most:
                raise OutriderError(f"--{name} is {size}; use {most} at most")
        if not -_SEEDS <= self.seed < _SEEDS:
            raise OutriderError(f"--seed is {self.seed}; use a number of fewer than 19 digits")

    def _check_given(self, weight: float) -> None:
        """Nothing is answered where texts are the data's own."""
        answered = {
            "--answers": self.answers,
            "--answer-tokens": self.answer_tokens != _LONGEST,
            "--temperature": self.temperature != 1.0,
            "--go-on": self.go_on,
            "--everything": self.everything,
            "--cache": self.cache,
            "--proposer": self.proposer != _GUESSER,
        }
        if found := [name for name, given in answered.items() if given]:
            raise OutriderError(
                f"--with-target learns from the data's own texts, and nothing is answered; leave {found[0]} out"
            )
        if not 0 < weight < math.inf:
            raise OutriderError(
                f"--with-target is {weight}, the weight of the draft's loss; use one above 0, such as 0.3"
            )

    def identity(self) -> dict[str, Any]:
        """What a training that goes on must have in common with the one before, besides its files."""
        unused = {name for name in _LATER if getattr(self, name) is None}
        return {name: value for name, value in asdict(self).items() if name not in _APART | unused}
