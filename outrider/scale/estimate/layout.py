"""How a model is spread over devices: tensor, pipeline and expert parallelism, and what their messages cost."""

from dataclasses import dataclass, replace
from typing import TypedDict

from outrider.errors import OutriderError
from outrider.scale.estimate.equations import Efficiency, Machine, Model, Pass, loaded_experts, one_pass, roofline_pass
from outrider.scale.estimate.pipeline import heaviest_stage, pipeline_round

_BYTES = 2.0  # of a number of a hidden state between devices
_DISPATCH_BYTES = 1.0  # of a number that is sent to an expert (8 bits); the answer has `_BYTES`
MAX_DEVICES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection of a device to the others."""

    bandwidth: float  # bytes/s that a device sends
    latency: float = 0.0  # seconds of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model is spread over groups of devices. Each group is a `Machine` with its own tensor parallelism."""

    pipeline: int = 1  # stages, one group each
    expert: int = 1  # groups that share the experts; attention and other weights are on each of them
    link: Link | None = None  # None: messages cost `Efficiency.allreduce_seconds` per layer
    streamed: bool = False  # a stage runs on any group, which first reads its weights over the link (RoundPipe)
    filled: bool = False  # draft tokens of one sequence fill the stages, one token per step

    @property
    def groups(self) -> int:
        """The number of groups of devices."""
        return self.pipeline * self.expert

    def check(self, model: Model, machine: Machine, *, needs_link: bool = False) -> None:
        """Raise OutriderError if the model cannot be spread so. `needs_link`: a draft machine uses the link, too."""
        for option, count in (("--pipeline", self.pipeline), ("--expert-parallel", self.expert)):
            if not 1 <= count <= MAX_DEVICES:
                raise OutriderError(f"{option} is {count}; use a number from 1 to {MAX_DEVICES}")
        if self.pipeline > model.layers:
            raise OutriderError(
                f"--pipeline {self.pipeline} has more stages than {model.name} has layers; use at most {model.layers}"
            )
        if self.expert > 1 and model.experts is None:
            raise OutriderError(
                f"{model.name} has no experts; use --devices or --pipeline in place of --expert-parallel"
            )
        if self.expert > 1 and model.experts and self.expert > model.experts.count:
            raise OutriderError(
                f"--expert-parallel {self.expert} has more groups than {model.name} has experts;"
                f" use at most {model.experts.count}"
            )
        if self.expert > 1 and self.pipeline > 1:
            raise OutriderError("--pipeline and --expert-parallel are not estimated together; give one of them")
        if self.expert > 1 and machine.devices > 1:
            raise OutriderError("--devices and --expert-parallel are not estimated together; give one of them")
        if self.groups > 1 and self.link is None:
            raise OutriderError("several groups of devices need a link; give --link in GB/s, such as 50")
        if self.link and self.groups == 1 and machine.devices == 1 and not needs_link:
            raise OutriderError(
                "--link connects several devices; give --devices, --pipeline, --expert-parallel or --draft-machine too"
            )
        if (self.streamed or self.filled) and self.pipeline == 1:
            raise OutriderError("--stages and --fill are for a pipeline; give --pipeline with 2 or more stages")


def allreduce_seconds(size: float, devices: int, link: Link) -> float:
    """Return 2 (n - 1) / n S / B + 2 (n - 1) L, a ring all-reduce of S bytes (Patarasuk and Yuan 2009).

    Args:
        size: S, bytes of the reduced tensor.
        devices: n.
        link: B and L, the bandwidth and the latency of a message.
    """
    return 2 * (devices - 1) * (size / devices / link.bandwidth + link.latency)


def all_to_all_seconds(tokens: float, copies: float, hidden: float, link: Link, *, remote: float = 1.0) -> float:
    """Return (1 + 2) bytes x tokens x copies x hidden / B + 2 L: sending tokens to experts, and the answers back.

    The tokens have 8 bits and the answers 16 (DeepSeek-AI 2025, "Insights into DeepSeek-V3", section 2.3.2).

    Args:
        tokens: tokens of one device.
        copies: experts that each token is sent to.
        hidden: numbers of a hidden state.
        link: B and L, the bandwidth of a device and the latency of a message.
        remote: share of the copies whose expert is on another device.
    """
    return (_DISPATCH_BYTES + _BYTES) * tokens * copies * remote * hidden / link.bandwidth + 2 * link.latency


class Work(TypedDict):
    """The work of a pass, as in `one_pass`."""

    tokens: float
    seqs: float
    context: float


def layout_pass(model: Model, machine: Machine, efficiency: Efficiency, layout: Layout, work: Work) -> Pass:
    """Return the estimate of a pass in a layout.

    - Tensor parallel: two all-reduces of the hidden states per layer (Megatron-LM, Shoeybi et al. 2019, section 3).
    - Pipeline: see `pipeline_round`.
    - Expert parallel: each of G groups has 1 / G of the sequences and of the experts. It reads its share of the experts
      that all tokens use, and sends and receives each token once per expert (`all_to_all_seconds`).
    """
    if layout.expert > 1:
        return _expert_pass(model, machine, efficiency, layout, work)
    if layout.pipeline == 1:
        return _tensor_pass(model, machine, efficiency, layout.link, work)
    groups = min(layout.pipeline, work["seqs"])
    of_group = Work(tokens=work["tokens"] / groups, seqs=work["seqs"] / groups, context=work["context"])
    stage = stage_pass(model, machine, efficiency, layout, of_group)
    imbalance = 1.0 if layout.streamed else layout.pipeline * heaviest_stage(model, layout.pipeline)
    seconds = pipeline_round(stage.seconds, stages=layout.pipeline, groups=groups, imbalance=imbalance)
    return replace(stage, seconds=seconds)


def stage_pass(model: Model, machine: Machine, efficiency: Efficiency, layout: Layout, work: Work) -> Pass:
    """Return the estimate of a mean stage of a pipeline: its share of a pass, and sending the hidden states on.

    With `layout.streamed` the group reads the weights of the stage over the link, while it computes the stage before.
    """
    assert layout.link
    share = 1 / layout.pipeline
    tokens = work["tokens"]
    whole = _tensor_pass(_part(model, share), machine, efficiency, layout.link, work)
    seconds = whole.seconds + tokens * model.hidden * _BYTES / layout.link.bandwidth + layout.link.latency
    if layout.streamed:
        seconds = max(seconds, share * model.read_bytes(tokens) / layout.link.bandwidth)
    return replace(whole, seconds=seconds)


def _part(model: Model, share: float) -> Model:
    """Return a model with a share of the layers. Its number of layers may be a fraction."""
    attention = tuple(
        replace(layers, numbers=layers.numbers * share, products=layers.products * share) for layers in model.attention
    )
    experts = model.experts and replace(model.experts, weights=model.experts.weights * share)
    return replace(
        model, layers=model.layers * share, weights=model.weights * share, attention=attention, experts=experts
    )


def _tensor_pass(model: Model, machine: Machine, efficiency: Efficiency, link: Link | None, work: Work) -> Pass:
    if link is None or machine.devices == 1:
        return one_pass(model, machine, efficiency, **work)
    without = replace(efficiency, allreduce_seconds=0.0)
    computed = one_pass(model, machine, without, **work)
    message = allreduce_seconds(work["tokens"] * model.hidden * _BYTES, machine.devices, link)
    return replace(computed, seconds=computed.seconds + 2 * model.layers * message)


def _expert_pass(model: Model, machine: Machine, efficiency: Efficiency, layout: Layout, work: Work) -> Pass:
    """Return the pass of the busiest group, and its messages in each layer."""
    tokens, seqs, context = work["tokens"], work["seqs"], work["context"]
    assert layout.link
    assert model.experts
    experts = model.experts
    busy = min(layout.expert, seqs)  # groups that have a sequence
    read = loaded_experts(experts.count, experts.active, tokens) / layout.expert
    routed = tokens * experts.active / layout.expert  # products of this group with experts, spread evenly
    dense = replace(model, experts=None)
    operations = tokens / busy * dense.operations(context) + 2 * routed * experts.weights
    computed = roofline_pass(
        machine,
        efficiency,
        read_bytes=dense.read_bytes(tokens)
        + read * experts.weights * model.bits / 8
        + seqs / busy * model.cache_bytes(context),
        operations=operations,
        layers=model.layers,
        int8=model.int8,
    )
    remote = 1 - 1 / layout.expert
    message = all_to_all_seconds(tokens / busy, experts.active, model.hidden, layout.link, remote=remote)
    return replace(computed, seconds=computed.seconds + model.layers * message)
