"""The options of `outrider project`."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import MODEL, Option
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_figures, parse_whole

_MACHINE = "Machine"
_SPECULATION = "Speculation"
_EFFICIENCY = "Efficiency of the software"
_RL = "Reinforcement learning"
_LAYOUT = "Several devices"
_SEPARATE = "Prefill and decode on separate devices"
_MAX_NUMBER = 10**9  # largest batch size and context
_MAX_DRAFT_TOKENS = 1024  # largest k


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectOptions:
    """The options of `outrider project`. () selects the default of a list."""

    target: Annotated[str | None, Option("DIR|SIZE", MODEL)] = None
    """Folder with a config.json, a name on the Hub, or a size: 8B, 70B, 30B-A3B."""
    proposer: Annotated[str, Option("NAME", MODEL)] = "ngram"
    """ngram, draft:DIR, draft:SIZE, head:SHARE (one pass for each draft token, which reads this share of the target, as
    EAGLE does) or block:SHARE (one pass for all draft tokens)."""
    weight_bits: Annotated[float, Option(panel=MODEL)] = 16.0
    """Bits of the target's weights."""
    draft_bits: Annotated[float | None, Option(panel=MODEL)] = None
    """Bits of a draft model's weights. Default: 16."""
    cache_bits: Annotated[float, Option(panel=MODEL)] = 16.0
    """Bits of the KV cache."""
    machine: Annotated[str | None, Option("NAME", _MACHINE)] = None
    """H100, RTX-4090, ...; an unknown name lists all."""
    devices: Annotated[int, Option(panel=_MACHINE)] = 1
    """Devices of tensor parallelism."""
    bandwidth: Annotated[float | None, Option(panel=_MACHINE)] = None
    """GB/s of one device. Default: its datasheet."""
    flops: Annotated[float | None, Option(panel=_MACHINE)] = None
    """TFLOP/s of one device. Default: its datasheet."""
    memory: Annotated[float | None, Option(panel=_MACHINE)] = None
    """GB of one device. Default: its datasheet."""
    alpha: Annotated[tuple[float, ...], Option("RATES", _SPECULATION, parse=parse_figures)] = ()
    """Acceptance: one value for all positions, such as 0.8, or one for each, such as 0.85,0.8,0.7."""
    source: Annotated[str | None, Option("FILE", _SPECULATION, flags="--from")] = None
    """Read the acceptance from the output of outrider bench."""
    category: Annotated[str | None, Option("NAME", _SPECULATION)] = None
    """Category of that benchmark. Default: all."""
    nodes: Annotated[float | None, Option(panel=_SPECULATION)] = None
    """Draft tokens verified per position: 1 for chains, more for trees."""
    batch: Annotated[tuple[int, ...], Option("LIST", _SPECULATION, parse=parse_whole)] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Batch sizes."""
    context: Annotated[tuple[int, ...], Option("LIST", _SPECULATION, parse=parse_whole)] = (2048,)
    """Cached tokens of each sequence."""
    k: Annotated[tuple[int, ...], Option("LIST", _SPECULATION, parse=parse_whole)] = ()
    """Draft tokens per round to choose from. Default: up to 12."""
    bandwidth_share: Annotated[tuple[float, ...], Option("LIST", _EFFICIENCY, parse=parse_figures)] = ()
    """Share of the bandwidth reached. One figure, or three: pessimistic, middle, optimistic. Default: by the machine's
    kind."""
    arithmetic_share: Annotated[tuple[float, ...], Option("LIST", _EFFICIENCY, parse=parse_figures)] = ()
    """Share of the arithmetic throughput reached."""
    exposed: Annotated[tuple[float, ...], Option("LIST", _EFFICIENCY, parse=parse_figures)] = ()
    """Share of the shorter of memory and arithmetic time that does not overlap with the longer."""
    round_ms: Annotated[tuple[float, ...], Option("LIST", _EFFICIENCY, parse=parse_figures)] = ()
    """Milliseconds of a round outside its passes."""
    layer_us: Annotated[tuple[float, ...], Option("LIST", _EFFICIENCY, parse=parse_figures)] = ()
    """Microseconds of overhead per layer."""
    draft_pass_us: Annotated[tuple[float, ...], Option("LIST", _EFFICIENCY, parse=parse_figures)] = ()
    """Microseconds of overhead of a draft's pass, or of ngram per round: its launch, and the choice of its token."""
    allreduce_us: Annotated[tuple[float, ...], Option("LIST", _EFFICIENCY, parse=parse_figures)] = ()
    """Microseconds of all-reduces per layer."""
    draft_us: Annotated[float | None, Option(panel=_EFFICIENCY)] = None
    """Measured microseconds of drafting: of one pass of a draft model, head or block, or of ngram per sequence and
    round. Default: the estimate; for ngram, 20 and --draft-pass-us once a round."""
    rl: Annotated[float | None, Option("SHARE", _RL)] = None
    """Share of generation in a training step without speculation, such as 0.7. Adds the speedup of the step."""
    rl_overlap: Annotated[float | None, Option("SHARE", _RL)] = None
    """Asynchronous training: the share of such a step during which other work hides generation. Default: 0."""
    pipeline: Annotated[int, Option(panel=_LAYOUT)] = 1
    """Stages of a pipeline, each of --devices devices."""
    expert_parallel: Annotated[int, Option(panel=_LAYOUT)] = 1
    """Devices that share the experts. Other weights are on each."""
    link: Annotated[float | None, Option(panel=_LAYOUT)] = None
    """GB/s that a device sends to others. With --devices alone it replaces --allreduce-us."""
    link_us: Annotated[float | None, Option(panel=_LAYOUT)] = None
    """Microseconds of a message. Default: 5."""
    stages: Annotated[str, Option("NAME", _LAYOUT)] = "bound"
    """bound: each device holds the weights of its stage. streamed: any device runs any stage, and reads its weights
    over the link (RoundPipe)."""
    fill: Annotated[bool, Option(panel=_LAYOUT)] = False
    """Fill idle stages with draft tokens, one per step of a stage."""
    draft_machine: Annotated[str | None, Option("NAME", _LAYOUT)] = None
    """A machine for the draft alone. Default: the target's devices."""
    overlap: Annotated[str, Option("NAME", _LAYOUT)] = "none"
    """What the draft machine does during verification. none: it waits. continue: it goes on after its draft (PEARL,
    AMUSD). guess:SHARE: it drafts for likely outcomes, which are right with this share (SSD)."""
    rate: Annotated[float | None, Option("RATE", _SEPARATE)] = None
    """Requests/s. Adds prefill on its own devices."""
    prompt_tokens: Annotated[int | None, Option(panel=_SEPARATE)] = None
    """With --rate: tokens of a prompt. Default: 1024."""
    output_tokens: Annotated[int | None, Option(panel=_SEPARATE)] = None
    """With --rate: tokens of an output. Default: 256."""

    def __post_init__(self) -> None:
        for name, values, low, high in (
            ("batch", self.batch, 1, _MAX_NUMBER),
            ("context", self.context, 1, _MAX_NUMBER),
            ("k", self.k, 0, _MAX_DRAFT_TOKENS),
        ):
            if min(values, default=low) < low:
                raise OutriderError(f"{name} is {min(values)}; use at least {low}")
            if max(values, default=low) > high:
                raise OutriderError(f"{name} is {max(values)}; use at most {high}")

    @property
    def shares(self) -> dict[str, tuple[float, ...]]:
        """The efficiencies that are given, by the names of `machines.Kind`."""
        names = ("bandwidth_share", "arithmetic_share", "exposed", "round_ms", "layer_us", "draft_pass_us")
        given = {name: getattr(self, name) for name in (*names, "allreduce_us")}
        return {name.removesuffix("_share"): values for name, values in given.items() if values}
