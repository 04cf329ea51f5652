"""The options of `outrider project`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

_WHAT, _WHERE, _KEPT, _SHARES = "Models", "Machine", "Speculation", "What software makes of the machine"

Target = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|SIZE", help="Folder with a config.json, or a size: 8B, 70B, 30B-A3B.", rich_help_panel=_WHAT
    ),
]
Proposer = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="ngram, draft:DIR, draft:SIZE, head:SHARE (one pass for each draft token, which reads this share of the"
        " target, as EAGLE does) or block:SHARE (one pass for all draft tokens).",
        rich_help_panel=_WHAT,
    ),
]
WeightBits = Annotated[float, typer.Option(help="Bits of the target's weights.", rich_help_panel=_WHAT)]
DraftBits = Annotated[
    float | None, typer.Option(help="Bits of a draft model's weights. Default: 16.", rich_help_panel=_WHAT)
]
CacheBits = Annotated[float, typer.Option(help="Bits of the KV cache.", rich_help_panel=_WHAT)]

MachineName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="H100, RTX-4090, ...; an unknown one lists all.", rich_help_panel=_WHERE),
]
Devices = Annotated[int, typer.Option(help="Devices of tensor parallelism.", rich_help_panel=_WHERE)]
Bandwidth = Annotated[
    float | None, typer.Option(help="GB/s of one device. Default: its datasheet.", rich_help_panel=_WHERE)
]
Flops = Annotated[
    float | None, typer.Option(help="TFLOP/s of one device. Default: its datasheet.", rich_help_panel=_WHERE)
]
Memory = Annotated[float | None, typer.Option(help="GB of one device. Default: its datasheet.", rich_help_panel=_WHERE)]

Alpha = Annotated[
    str | None,
    typer.Option(
        metavar="RATES",
        help="Acceptance: one value for all positions, such as 0.8, or one for each, such as 0.85,0.8,0.7.",
        rich_help_panel=_KEPT,
    ),
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="FILE", help="Take it from the output of outrider bench.", rich_help_panel=_KEPT),
]
Category = Annotated[
    str | None, typer.Option(metavar="NAME", help="Category of that benchmark. Default: all.", rich_help_panel=_KEPT)
]
Nodes = Annotated[
    float | None,
    typer.Option(help="Guesses verified for each position: 1 for chains, more for trees.", rich_help_panel=_KEPT),
]
Batch = Annotated[str, typer.Option(metavar="LIST", help="Sequences at once.", rich_help_panel=_KEPT)]
Context = Annotated[str, typer.Option(metavar="LIST", help="Cached tokens of each sequence.", rich_help_panel=_KEPT)]
Depths = Annotated[
    str | None,
    typer.Option(
        "--k", metavar="LIST", help="Draft tokens per round to choose from. Default: up to 12.", rich_help_panel=_KEPT
    ),
]

_CASES = "One figure, or three: pessimistic, middle, optimistic. Default: by the machine's kind."
BandwidthShare = Annotated[
    str | None, typer.Option(metavar="LIST", help=f"Share of the bandwidth reached. {_CASES}", rich_help_panel=_SHARES)
]
ArithmeticShare = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Share of the arithmetic throughput reached.", rich_help_panel=_SHARES),
]
Exposed = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Share of the shorter of memory and arithmetic time that does not overlap with the longer.",
        rich_help_panel=_SHARES,
    ),
]
RoundMs = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Milliseconds of a round outside its passes.", rich_help_panel=_SHARES),
]
LayerUs = Annotated[
    str | None, typer.Option(metavar="LIST", help="Microseconds of overhead per layer.", rich_help_panel=_SHARES)
]
AllreduceUs = Annotated[
    str | None, typer.Option(metavar="LIST", help="Microseconds of all-reduces per layer.", rich_help_panel=_SHARES)
]
DraftUs = Annotated[
    float | None,
    typer.Option(help="Of the host's guessing by ngram, for each user. Default: 20.", rich_help_panel=_SHARES),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectOptions:
    """What to project, as it is written."""

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
    allreduce_us: AllreduceUs = None
    draft_us: DraftUs = None
