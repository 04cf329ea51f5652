"""The options of the command line, each declared once for all verbs that take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from outrider.cli.sampling_options import SAMPLING
from outrider.core.params import AUTO

_MODEL, _MEASURE, _OUTPUT = "Models", "Measuring", "Output"

PromptText = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="What to complete. Without it: standard input, or a prompt on a terminal."),
]

Target = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Folder of a decoder-only model. Default: @mini, which comes along.", rich_help_panel=_MODEL
    ),
]
Proposer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Who guesses: none, ngram[:MIN-MAX], suffix[:TOKENS], recycle, lookahead[:WxNxG], retrieval:DIR[:MIN];"
        " by a draft model or a trained draft: draft:DIR, tree:DIR, cascade:DIR, and draft-tokens:DIR or draft-text:DIR"
        " for one of another vocabulary; by the target itself: exit:LAYERS, skip:A+B+C, quantized:int4; your own:"
        " pkg.module:Class; or several: merge(suffix,recycle), first(A,B), switch(A,B). docs/proposers has a page on"
        " each. Default: the embedded draft for the embedded target, ngram for any other.",
        rich_help_panel=_MODEL,
    ),
]


def _guesses(text: str | int) -> int | str:
    """A number, or auto."""
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number of guesses; use for example 4, or {AUTO}") from None


Guesses = Annotated[
    Any,
    typer.Option(
        "--k",
        parser=_guesses,
        metavar="N",
        help="Guesses a round; 0 is plain decoding, auto decides round by round from measured costs.",
        rich_help_panel=_MODEL,
    ),
]
BenchGuesses = Annotated[
    Any,
    typer.Option(
        "--k",
        parser=_guesses,
        metavar="N",
        help="Guesses a round, at least 1: plain decoding is measured anyway. auto decides round by round from measured"
        " costs.",
        rich_help_panel=_MODEL,
    ),
]
Calibrate = Annotated[
    bool,
    typer.Option(help="Measure what passes cost here, for --k auto, and print that alone.", rich_help_panel=_MEASURE),
]
Verifier = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="walk, coupled, rejection, block, siblings or traversal; typical and lenient are not exact. Default: block"
        " for a draft model's chains, traversal for its trees and merges, walk for all others.",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.", rich_help_panel=_MODEL)]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=_MODEL)]
Kernels = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, native or torch. auto takes the fastest that run the model here: on a CPU, in bfloat16 and float32,"
        " the native ones, which a C++ compiler builds once on a machine.",
        rich_help_panel=_MODEL,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="int8 or int4: fewer bits for the target's weights, on a CPU. What is then certified and reproduced is the"
        " text of the quantised model. Default: the weights as they are.",
        rich_help_panel=_MODEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads. Default: OMP_NUM_THREADS, or else the physical cores of one NUMA node.",
        rich_help_panel=_MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Tokens of prompt and completion together. Default: the model's own, 8192 at most.", rich_help_panel=_MODEL
    ),
]

Chat = Annotated[
    bool,
    typer.Option("--chat", help="Apply the model's chat template; a terminal's conversation is remembered."),
]
Show = Annotated[bool, typer.Option("--show", help="Colour each token by who wrote it.", rich_help_panel=_OUTPUT)]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document as the last line of output.", rich_help_panel=_OUTPUT),
]

PromptFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="JSON lines with prompt or messages, and a category if you like. Default: an embedded set.",
        rich_help_panel=_MEASURE,
    ),
]
Limit = Annotated[int | None, typer.Option(help="Prompts of each category. Default: all.", rich_help_panel=_MEASURE)]
Rounds = Annotated[int, typer.Option(help="How often each prompt is measured.", rich_help_panel=_MEASURE)]
Batches = Annotated[
    str,
    typer.Option("--batch", metavar="ROWS", help="Rows at once. A list, as 1,2,4, is swept.", rich_help_panel=_MEASURE),
]
Contexts = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="TOKENS",
        help="Tokens of prompt and completion together, at most. A list, as 512,2048, is swept: other prompts are put"
        " in front of each until it and its completion fill so many. Default: the model's own, 8192 at most.",
        rich_help_panel=_MODEL,
    ),
]
Temperatures = Annotated[
    str,
    typer.Option(
        "--temperature", metavar="T", help="0 is greedy. A list, as 0,0.7,1, is swept.", rich_help_panel=SAMPLING
    ),
]
Sweep = Annotated[
    str | None,
    typer.Option(
        metavar="k=LIST",
        help="Measure every k of a list, as k=0..12 or k=0,2,4,8, in turns with plain decoding. Each swept axis is"
        " measured with the others at their first value, k at --k, and prompts as they are.",
        rich_help_panel=_MEASURE,
    ),
]
Report = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help='Write a page with plots, for example report.html. Takes pip install "outrider\\[report]".',
        rich_help_panel=_OUTPUT,
    ),
]
Peer = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Measure another engine as well: transformers.", rich_help_panel=_MEASURE),
]
BenchTokens = Annotated[int, typer.Option("--max-tokens", help="Emitted at most.", rich_help_panel=SAMPLING)]
BenchJson = Annotated[
    bool, typer.Option("--json", help="Print the JSON document on a terminal, too.", rich_help_panel=_OUTPUT)
]
BenchSeed = Annotated[int, typer.Option("--seed", min=0, help="Of all sampling.", rich_help_panel=SAMPLING)]
SearchBudget = Annotated[int, typer.Option("--budget", help="Sets of layers to try at most.", rich_help_panel=_MEASURE)]
SearchLimit = Annotated[int, typer.Option("--limit", help="Prompts of each category.", rich_help_panel=_MEASURE)]
Samples = Annotated[int, typer.Option(help="Samples of each statistical test.", rich_help_panel=_MEASURE)]

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILES", help="Texts, a document each; *.jsonl and *.ndjson hold a document in each line."),
]
Out = Annotated[str, typer.Option(metavar="DIR", help="Folder to write.", rich_help_panel=_OUTPUT)]
DraftFolder = Annotated[str, typer.Argument(metavar="DIR", help="Folder of a trained draft, in any known format.")]
Owner = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="DIR", help="Folder of the model that the draft belongs to.", rich_help_panel=_MODEL
    ),
]
Form = Annotated[
    str, typer.Option("--to", metavar="FORMAT", help="The format; docs/formats.md.", rich_help_panel=_OUTPUT)
]
Field = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Field of a JSON line that holds its text or messages. Default: the first of text, prompt and messages"
        " that it has.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a datastore that is there already.", rich_help_panel=_OUTPUT)
]

Plan = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="With --k auto: go on from what was learned into this file before, and write it at the end.",
        rich_help_panel=_MODEL,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Take target, proposer, k, verifier and precision from what `outrider tune --out` wrote; options that are"
        " given win.",
        rich_help_panel=_MODEL,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to load."""

    target: Target = None
    proposer: Proposer = None
    k: BenchGuesses = AUTO
    verifier: Verifier = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    kernels: Kernels = "auto"
    quantize: Quantize = None
    threads: Threads = None
    plan: Plan = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(EngineOptions):
    """What to load, and how much a row holds."""

    k: Guesses = AUTO
    max_model_len: MaxModelLen = None


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Show typer each field of the dataclasses that a verb takes as an option of its own."""
    flat: list[Parameter] = []
    groups: dict[str, type[Any]] = {}
    kinds = get_type_hints(verb, include_extras=True)
    for parameter in signature(verb).parameters.values():
        kind = kinds[parameter.name]
        if not is_dataclass(kind):
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        assert isinstance(kind, type)
        groups[parameter.name] = kind
        hints = get_type_hints(kind, include_extras=True)
        flat += [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]

    @wraps(verb)
    def call(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        verb(**given)

    call.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call
