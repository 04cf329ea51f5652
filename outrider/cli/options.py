"""The options of the command line. Each is declared once for all commands that have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from outrider.core.config import ONCE
from outrider.core.option import MEASURE, MODEL, OUTPUT, SAMPLING
from outrider.core.params import AUTO
from outrider.core.text import is_utf8
from outrider.drafting.propose.options import DraftPlacement, DraftQuantize, DraftWindow
from outrider.errors import OutriderError

PromptText = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="What to complete. Without it: standard input, or a prompt on a terminal."),
]

Target = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Folder of a language model, a GGUF file, or a model of the Hugging Face Hub: org/name, org/name@revision"
        " or org/name:Q4_K_M. Default: @mini, an embedded model.",
        rich_help_panel=MODEL,
    ),
]
Proposer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What drafts. Without a model: none, ngram[:MIN-MAX], suffix[:TOKENS], recycle, lookahead[:WxNxG],"
        " group[:TOKENS], retrieval:DIR[:MIN]. A draft model or a trained head: draft:DIR, tree:DIR, cascade:DIR; with"
        " another vocabulary: draft-tokens:DIR, draft-text:DIR. The target itself: mtp, quantized:int4, exit:LAYERS,"
        " skip:A+B. Your own: pkg.module:Class. Combinations: best(A,B), merge(A,B), first(A,B), switch(A,B). See"
        " docs/how-to/choose-a-proposer.md. DIR may also be a model of the Hugging Face Hub."
        " Default: the embedded draft model for the embedded target; for any other, the first of"
        " best(suffix:100000,mtp), best(suffix:100000,quantized:int4) and ngram that fits.",
        rich_help_panel=MODEL,
    ),
]


def parse_draft_length(text: str | int) -> int | str:
    """Parse a number or auto."""
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of draft tokens; use for example 4, or {AUTO}") from None


DraftLength = Annotated[
    Any,
    typer.Option(
        "--k",
        parser=parse_draft_length,
        metavar="N",
        help="Draft tokens per round, up to 256. 0: plain decoding. auto: chosen in each round from measured costs.",
        rich_help_panel=MODEL,
    ),
]
BenchDraftLength = Annotated[
    Any,
    typer.Option(
        "--k",
        parser=parse_draft_length,
        metavar="N",
        help="Draft tokens per round, from 1 to 256; plain decoding is always measured. auto: chosen in each round from"
        " measured costs.",
        rich_help_panel=MODEL,
    ),
]
Verifier = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="walk, coupled, rejection, block, siblings or traversal; typical and lenient are not exact. Relaxed rules"
        " are not exact either, and declare a bound: lantern:delta=D, gsd:clusters=N, pcg:k=N, bins:distance=R and"
        " blend:share=S, with"
        " more options after commas, such as table=FILE. Default: block for chains of a draft model, traversal for its"
        " trees and for merges, walk for all other proposers.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL)]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=MODEL)]
Kernels = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, native or torch. auto: the fastest that support the model. The native kernels run on CPUs in"
        " bfloat16 and float32; a C++ compiler builds them once per machine.",
        rich_help_panel=MODEL,
    ),
]
Check = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="once, always or never: when the logits of a model are compared with those of transformers at load. once:"
        " per checkpoint, version and machine.",
        rich_help_panel=MODEL,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="int8 or int4 weights for the target, on a CPU. The quantized model is then the target, exactly. Default:"
        " the weights as stored.",
        rich_help_panel=MODEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads. Default: OMP_NUM_THREADS, or else the physical cores of one NUMA node.",
        rich_help_panel=MODEL,
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp",
        metavar="N",
        min=1,
        help="Split the target over N processes that torchrun has started: torchrun --nproc-per-node N -m outrider ...",
        rich_help_panel=MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Tokens of prompt and completion together. Default: the limit of the model, at most 8192.",
        rich_help_panel=MODEL,
    ),
]

Chat = Annotated[
    bool,
    typer.Option("--chat", help="Apply the model's chat template. On a terminal, keep the conversation."),
]
System = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="With --chat: a system message, which stands before the conversation."),
]
Show = Annotated[
    bool, typer.Option("--show", help="Color accepted draft tokens and tokens of the target.", rich_help_panel=OUTPUT)
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document as the last line of output.", rich_help_panel=OUTPUT),
]

PromptFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="JSON lines with prompt or messages, and optionally category. Default: an embedded set.",
        rich_help_panel=MEASURE,
    ),
]
PromptOrSourceFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="JSON lines with prompt or messages, or for an encoder-decoder target source, and optionally category."
        " Default: an embedded set.",
        rich_help_panel=MEASURE,
    ),
]
Limit = Annotated[int | None, typer.Option(help="Prompts of each category. Default: all.", rich_help_panel=MEASURE)]
BenchTokens = Annotated[int, typer.Option("--max-tokens", help="Most output tokens.", rich_help_panel=SAMPLING)]
BenchJson = Annotated[
    bool, typer.Option("--json", help="Print the JSON document on a terminal, too.", rich_help_panel=OUTPUT)
]
BenchSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of all sampling.", rich_help_panel=SAMPLING)]
MaxTrials = Annotated[int, typer.Option("--max-trials", help="Most sets of layers to try.", rich_help_panel=MEASURE)]
LayersLimit = Annotated[int, typer.Option("--limit", help="Prompts of each category.", rich_help_panel=MEASURE)]
Samples = Annotated[int, typer.Option(help="Samples of each statistical test.", rich_help_panel=MEASURE)]

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILES", help="Texts, a document each; *.jsonl and *.ndjson hold a document in each line."),
]
Out = Annotated[str, typer.Option(metavar="DIR", help="Folder to write.", rich_help_panel=OUTPUT)]
DraftFolder = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="Folder of a trained draft head, in any supported format, or its name on the Hub."
    ),
]
HeadTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="DIR",
        help="Folder of the model that the draft belongs to, or its name on the Hugging Face Hub.",
        rich_help_panel=MODEL,
    ),
]
TargetFormat = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="Name of the format; docs/reference/formats.md lists them.",
        rich_help_panel=OUTPUT,
    ),
]
Field = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Field of a JSON line that holds its text or messages. Default: the first of text, prompt and messages"
        " that exists.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a datastore that is there already.", rich_help_panel=OUTPUT)
]

Plan = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="With --k auto: load what the planner has learned from this file, and save it at the end.",
        rich_help_panel=MODEL,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Read settings from a JSON file: fields of EngineConfig, or what `outrider tune --out` or `outrider fit`"
        " wrote. Options on the command line take precedence.",
        rich_help_panel=MODEL,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to load."""

    target: Target = None
    proposer: Proposer = None
    k: BenchDraftLength = AUTO
    verifier: Verifier = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    kernels: Kernels = "auto"
    check: Check = ONCE
    quantize: Quantize = None
    threads: Threads = None
    draft_window: DraftWindow = None
    draft_quantize: DraftQuantize = None
    plan: Plan = None
    tp: TensorParallel = 1
    draft_placement: DraftPlacement = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(EngineOptions):
    """What to load, and the context of a sequence."""

    k: DraftLength = AUTO
    max_model_len: MaxModelLen = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Whether the prompts are messages of a conversation, and what stands before them."""

    chat: Chat = False
    system: System = None

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise OutriderError("--system is a message of a conversation; add --chat, or leave it out")
        if self.system is not None and not is_utf8(self.system):
            raise OutriderError("--system is not UTF-8 text; give UTF-8 text")

    def messages(self) -> list[dict[str, str]]:
        """Return the messages before the first prompt."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]
