"""The options of several devices: from text to a layout and a machine for the draft."""

from collections.abc import Mapping, Sequence

from outrider.errors import OutriderError, either
from outrider.scale.estimate.equations import Machine, Model
from outrider.scale.estimate.layout import Layout, Link
from outrider.scale.estimate.machines import NAMES, MachineOverrides, efficiencies, find_machine
from outrider.scale.estimate.options import ProjectOptions
from outrider.scale.estimate.overlap import Overlap, parse_overlap
from outrider.scale.estimate.pair import DraftDevice, Drafting

_DEFAULT_LINK_US = 5.0
_MAX_FIGURE = 1e9
_STAGES = ("bound", "streamed")


def find_layout(
    options: ProjectOptions, target: Model, machine: Machine, ks: Sequence[int], *, given_k: bool
) -> Layout:
    """Return the layout of the options.

    Args:
        target: the model to spread.
        machine: one group of devices.
        ks: the draft lengths to compare.
        given_k: whether the user has chosen them.

    Raises:
        OutriderError: the options contradict each other, or do not fit the model.
    """
    if options.stages not in _STAGES:
        raise OutriderError(f"--stages is {options.stages!r}; use {either(_STAGES)}")
    if options.link_us is not None and options.link is None:
        raise OutriderError("--link-us is the latency of a link; give --link in GB/s as well")
    if options.link is not None and options.allreduce_us:
        raise OutriderError("--link and --allreduce-us both say what an all-reduce takes; give one of them")
    link_us = _DEFAULT_LINK_US if options.link_us is None else options.link_us
    for option, value, low in (("--link", options.link, 0.0), ("--link-us", link_us, -1.0)):
        if value is not None and not low < value <= _MAX_FIGURE:
            raise OutriderError(f"{option} is {value}; use a number above 0 and up to {_MAX_FIGURE:g}")
    layout = Layout(
        pipeline=options.pipeline,
        expert=options.expert_parallel,
        link=None if options.link is None else Link(bandwidth=options.link * 1e9, latency=link_us / 1e6),
        streamed=options.stages == "streamed",
        filled=options.fill,
    )
    alone = options.draft_machine is None
    layout.check(target, machine, needs_link=not alone)
    if options.fill and given_k and max(ks, default=0) >= options.pipeline:
        raise OutriderError(
            f"k is {max(ks)}, and a pipeline of {options.pipeline} stages has room for"
            f" {options.pipeline - 1} draft tokens; use --k 0..{options.pipeline - 1}"
        )
    if options.fill and (options.nodes or 1) != 1:
        raise OutriderError("--fill sends one draft token per step; leave --nodes out")
    if options.fill and options.overlap != Overlap.NONE:
        raise OutriderError("--fill drafts while the stages compute already; leave --overlap out")
    return layout


def find_draft_devices(
    options: ProjectOptions, drafting: Drafting, shares: Mapping[str, Sequence[float]]
) -> tuple[DraftDevice | None, ...]:
    """Return the machine of the draft in each case; None: the draft has no machine of its own.

    Raises:
        OutriderError: the machine is unknown, or there is no draft model that could use it.
    """
    overlap, hit = parse_overlap(options.overlap)
    if options.draft_machine is None:
        if overlap is not Overlap.NONE:
            raise OutriderError("--overlap needs a device for the draft alone; give --draft-machine")
        return (None,) * len(NAMES)
    if drafting.model is None:
        raise OutriderError(
            "--draft-machine is for a draft model; give --proposer draft:SIZE, head:SHARE or block:SHARE"
        )
    machine, sheet = find_machine(options.draft_machine, MachineOverrides())
    return tuple(
        DraftDevice(machine=machine, efficiency=case, overlap=overlap, hit=hit)
        for case in efficiencies(sheet.kind, shares)
    )
