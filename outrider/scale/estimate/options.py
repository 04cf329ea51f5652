"""The options of `outrider project`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

_MODELS = "Models"
_MACHINE = "Machine"
_SPECULATION = "Speculation"
_EFFICIENCY = "Efficiency of the software"
_RL = "Reinforcement learning"
_LAYOUT = "Several devices"
_SEPARATE = "Prefill and decode on separate devices"

Target = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|SIZE",
        help="Folder with a config.json, a name on the Hub, or a size: 8B, 70B, 30B-A3B.",
        rich_help_panel=_MODELS,
    ),
]
Proposer = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="ngram, draft:DIR, draft:SIZE, head:SHARE (one pass for each draft token, which reads this share of the"
        " target, as EAGLE does) or block:SHARE (one pass for all draft tokens).",
        rich_help_panel=_MODELS,
    ),
]
WeightBits = Annotated[float, typer.Option(help="Bits of the target's weights.", rich_help_panel=_MODELS)]
DraftBits = Annotated[
    float | None, typer.Option(help="Bits of a draft model's weights. Default: 16.", rich_help_panel=_MODELS)
]
CacheBits = Annotated[float, typer.Option(help="Bits of the KV cache.", rich_help_panel=_MODELS)]

MachineName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="H100, RTX-4090, ...; an unknown name lists all.", rich_help_panel=_MACHINE),
]
Devices = Annotated[int, typer.Option(help="Devices of tensor parallelism.", rich_help_panel=_MACHINE)]
Bandwidth = Annotated[
    float | None, typer.Option(help="GB/s of one device. Default: its datasheet.", rich_help_panel=_MACHINE)
]
Flops = Annotated[
    float | None, typer.Option(help="TFLOP/s of one device. Default: its datasheet.", rich_help_panel=_MACHINE)
]
Memory = Annotated[
    float | None, typer.Option(help="GB of one device. Default: its datasheet.", rich_help_panel=_MACHINE)
]

Alpha = Annotated[
    str | None,
    typer.Option(
        metavar="RATES",
        help="Acceptance: one value for all positions, such as 0.8, or one for each, such as 0.85,0.8,0.7.",
        rich_help_panel=_SPECULATION,
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Read the acceptance from the output of outrider bench.",
        rich_help_panel=_SPECULATION,
    ),
]
Category = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Category of that benchmark. Default: all.", rich_help_panel=_SPECULATION),
]
Nodes = Annotated[
    float | None,
    typer.Option(
        help="Draft tokens verified per position: 1 for chains, more for trees.", rich_help_panel=_SPECULATION
    ),
]
Batch = Annotated[str, typer.Option(metavar="LIST", help="Batch sizes.", rich_help_panel=_SPECULATION)]
Context = Annotated[
    str, typer.Option(metavar="LIST", help="Cached tokens of each sequence.", rich_help_panel=_SPECULATION)
]
Depths = Annotated[
    str | None,
    typer.Option(
        "--k",
        metavar="LIST",
        help="Draft tokens per round to choose from. Default: up to 12.",
        rich_help_panel=_SPECULATION,
    ),
]

_CASES = "One figure, or three: pessimistic, middle, optimistic. Default: by the machine's kind."
BandwidthShare = Annotated[
    str | None,
    typer.Option(metavar="LIST", help=f"Share of the bandwidth reached. {_CASES}", rich_help_panel=_EFFICIENCY),
]
ArithmeticShare = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Share of the arithmetic throughput reached.", rich_help_panel=_EFFICIENCY),
]
Exposed = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Share of the shorter of memory and arithmetic time that does not overlap with the longer.",
        rich_help_panel=_EFFICIENCY,
    ),
]
RoundMs = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Milliseconds of a round outside its passes.", rich_help_panel=_EFFICIENCY),
]
LayerUs = Annotated[
    str | None, typer.Option(metavar="LIST", help="Microseconds of overhead per layer.", rich_help_panel=_EFFICIENCY)
]
DraftPassUs = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Microseconds of overhead of a draft's pass, or of ngram per round: its launch, and the choice of its"
        " token.",
        rich_help_panel=_EFFICIENCY,
    ),
]
AllreduceUs = Annotated[
    str | None, typer.Option(metavar="LIST", help="Microseconds of all-reduces per layer.", rich_help_panel=_EFFICIENCY)
]
DraftUs = Annotated[
    float | None,
    typer.Option(
        help="Measured microseconds of drafting: of one pass of a draft model, head or block, or of ngram per sequence"
        " and round. Default: the estimate; for ngram, 20 and --draft-pass-us once a round.",
        rich_help_panel=_EFFICIENCY,
    ),
]
RL = Annotated[
    float | None,
    typer.Option(
        "--rl",
        metavar="SHARE",
        help="Share of generation in a training step without speculation, such as 0.7. Adds the speedup of the step.",
        rich_help_panel=_RL,
    ),
]
RLOverlap = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Asynchronous training: the share of such a step during which other work hides generation. Default: 0.",
        rich_help_panel=_RL,
    ),
]


Pipeline = Annotated[
    int, typer.Option(help="Stages of a pipeline, each of --devices devices.", rich_help_panel=_LAYOUT)
]
ExpertParallel = Annotated[
    int, typer.Option(help="Devices that share the experts. Other weights are on each.", rich_help_panel=_LAYOUT)
]
LinkOption = Annotated[
    float | None,
    typer.Option(
        help="GB/s that a device sends to others. With --devices alone it replaces --allreduce-us.",
        rich_help_panel=_LAYOUT,
    ),
]
LinkUs = Annotated[float | None, typer.Option(help="Microseconds of a message. Default: 5.", rich_help_panel=_LAYOUT)]
Stages = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="bound: each device holds the weights of its stage. streamed: any device runs any stage, and reads its"
        " weights over the link (RoundPipe).",
        rich_help_panel=_LAYOUT,
    ),
]
Fill = Annotated[
    bool,
    typer.Option(
        "--fill", help="Fill idle stages with draft tokens, one per step of a stage.", rich_help_panel=_LAYOUT
    ),
]
DraftMachine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="A machine for the draft alone. Default: the target's devices.", rich_help_panel=_LAYOUT
    ),
]
OverlapOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The draft machine's work during verification. none: it waits. continue: it goes on after its draft"
        " (PEARL, AMUSD). guess:SHARE: it drafts for likely outcomes, which are right with this share (SSD).",
        rich_help_panel=_LAYOUT,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(metavar="RATE", help="Requests/s. Adds prefill on its own devices.", rich_help_panel=_SEPARATE),
]
PromptTokens = Annotated[
    int | None, typer.Option(help="With --rate: tokens of a prompt. Default: 1024.", rich_help_panel=_SEPARATE)
]
OutputTokens = Annotated[
    int | None, typer.Option(help="With --rate: tokens of an output. Default: 256.", rich_help_panel=_SEPARATE)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectOptions:
    """The options of `outrider project`, as strings and numbers of the command line."""

    target: Target = None
    proposer: Proposer = "ngram"
    weight_bits: WeightBits = 16.0
    draft_bits: DraftBits = None
    cache_bits: CacheBits = 16.0
    machine: MachineName = None
    devices: Devices = 1
    bandwidth: Bandwidth = None
    flops: Flops = None
    memory: Memory = None
    alpha: Alpha = None
    source: From = None
    category: Category = None
    nodes: Nodes = None
    batch: Batch = "1,2,4,8,16,32,64,128"
    context: Context = "2048"
    k: Depths = None
    bandwidth_share: BandwidthShare = None
    arithmetic_share: ArithmeticShare = None
    exposed: Exposed = None
    round_ms: RoundMs = None
    layer_us: LayerUs = None
    draft_pass_us: DraftPassUs = None
    allreduce_us: AllreduceUs = None
    draft_us: DraftUs = None
    rl: RL = None
    rl_overlap: RLOverlap = None
    pipeline: Pipeline = 1
    expert_parallel: ExpertParallel = 1
    link: LinkOption = None
    link_us: LinkUs = None
    stages: Stages = "bound"
    fill: Fill = False
    draft_machine: DraftMachine = None
    overlap: OverlapOption = "none"
    rate: Rate = None
    prompt_tokens: PromptTokens = None
    output_tokens: OutputTokens = None
