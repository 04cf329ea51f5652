"""Run a projection: from the options to the JSON document."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from outrider._version import __version__
from outrider.core.option import as_json
from outrider.errors import OutriderError
from outrider.runtime import machine
from outrider.scale.estimate.equations import Efficiency, Machine, Model, free_tokens
from outrider.scale.estimate.layout_options import find_draft_devices, find_layout
from outrider.scale.estimate.machines import Datasheet, MachineOverrides, efficiencies, find_machine
from outrider.scale.estimate.measured import read_bench
from outrider.scale.estimate.memory import MemoryBudget
from outrider.scale.estimate.models import Bits, find_model
from outrider.scale.estimate.options import ProjectOptions
from outrider.scale.estimate.pair import Acceptance, Drafting, Pair, head
from outrider.scale.estimate.rl import step_limit, step_speedup
from outrider.scale.estimate.separate import separate_prefill

USABLE = 0.9  # share of the memory for weights and caches; the rest is for buffers
_MAX_NUMBER = 10**9  # largest --draft-us
_DEFAULT_DRAFT_US = 20.0
_DEFAULT_DRAFT_BITS = 16.0
_DEFAULT_MAX_K = 12
NOTE = "an estimate, computed from datasheets and equations; nothing was measured"
DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "pass": "max(r, a) + exposed x min(r, a) + layers x layer overhead, where r = bytes / bandwidth and a ="
        " operations / rate; a pass reads all weights once and the KV cache of each sequence, and a token costs two"
        " operations per active weight",
        "speedup": "tokens/s relative to plain decoding, both estimated for the same machine, batch and case",
        "k": "the fastest of the considered draft lengths; 0 if plain decoding is the fastest",
        "bound": "what limits the speed of the target's pass",
        "stops_paying": "the batch from which no k gains; null if drafting still pays at 65536 sequences",
        "ahead": "1 + draft / verify: the most that drafting in parallel on other hardware could gain in addition",
        "free_tokens": "tokens of a pass whose arithmetic takes as long as reading the weights; null with experts,"
        " because it depends on the number of experts that are read",
        "draft_in_sequences": "(W_d + K_d) / K_t: sequences that would fit in place of the draft",
        "layout": "a pipeline takes max(p t, m b t) for m groups in p stages, an all-reduce takes 2 (n - 1) / n S / B"
        " + 2 (n - 1) L, and experts 3 bytes x tokens x copies x hidden / B in each layer; link in bytes/s and seconds",
        "separate": "ttft = D + R D^2 / (2 (1 - R D)) plus the transfer of the KV cache, where D is a prefill and R"
        " prompts/s of each prefill device; devices = R D / 0.8 and R x output tokens / tokens/s",
        "step_speedup": "1 / (R / a + 1 - R), where R is the generation's share of a training step and a its speedup;"
        " with an overlap o, the step takes max(0, R / a - o) + 1 - R",
        "sequences": f"sequences whose KV caches fit with the weights into {USABLE:.0%} of the memory",
    }
)


def run_project(options: ProjectOptions) -> dict[str, Any]:
    """Estimate the speedup for each batch size and context, in three cases.

    Returns:
        The JSON document.

    Raises:
        OutriderError: an option is invalid, or the model or proposer is not supported.
    """
    if options.target is None:
        raise OutriderError("no target is named; use --target with a folder, or a size such as 8B")
    target = find_model(options.target, Bits(weights=options.weight_bits, cache=options.cache_bits))
    drafting = find_drafting(options, target)
    hardware, sheet = _find_machine(options)
    acceptance, source = _acceptance(options)
    ks = _draft_lengths(options.k, acceptance)
    cases = efficiencies(sheet.kind, options.shares)
    layout = find_layout(options, target, hardware, ks, given_k=bool(options.k))
    if layout.filled and not options.k:
        ks = tuple(k for k in ks if k < layout.pipeline)
    draft_devices = find_draft_devices(options, drafting, options.shares)
    pairs = [
        Pair(
            target=target,
            drafting=drafting,
            acceptance=acceptance,
            machine=hardware,
            efficiency=case,
            layout=layout,
            draft_device=draft_device,
        )
        for case, draft_device in zip(cases, draft_devices, strict=True)
    ]
    training = _training(options)
    return {
        "benchmark": "outrider project",
        "projection": NOTE,
        "arguments": as_json(options),
        "machine": _machine(hardware, sheet),
        "target": _model(target),
        "draft": _drafting(drafting),
        "acceptance": {"rates": list(acceptance.rates), "nodes": acceptance.nodes} | source,
        "efficiency": list(map(asdict, cases)),
        "layout": asdict(layout) | {"groups": layout.groups},
        "draft_machine": None if draft_devices[0] is None else asdict(draft_devices[0]),
        "free_tokens": {case.name: _free_tokens(target, hardware, case) for case in cases},
        "memory": [_memory(pairs[0], context, options.batch) for context in options.context],
        **separate_prefill(options, pairs, options.batch, ks),
        **({"rl": training} if training else {}),
        "results": _results(pairs, options, ks, training),
        "stops_paying": [_stops_paying(pairs, context, ks) for context in options.context],
        "versions": {"outrider": __version__},
        "commit": machine.commit(),
        "definitions": dict(DEFINITIONS),
    }


def _find_machine(options: ProjectOptions) -> tuple[Machine, Datasheet]:
    overrides = MachineOverrides(
        bandwidth=options.bandwidth, flops=options.flops, memory=options.memory, devices=options.devices
    )
    found = find_machine(options.machine, overrides)
    if options.allreduce_us and options.devices == 1:
        raise OutriderError("--allreduce-us needs several devices, and there is one; give --devices as well")
    return found


def _results(
    pairs: Sequence[Pair], options: ProjectOptions, ks: Sequence[int], training: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the entries of all contexts and batch sizes."""
    results = []
    for context in options.context:
        results += [_result(pairs, batch, context, ks) for batch in options.batch]
    for result in results:
        _add_step_speedup(result, training)
    return results


def _stops_paying(pairs: Sequence[Pair], context: int, ks: Sequence[int]) -> dict[str, int | None]:
    """Return the batch size from which no k gains at a context, in each case."""
    return {"context": context, **{pair.efficiency.name: pair.stops_paying(context, ks) for pair in pairs}}


def _training(options: ProjectOptions) -> dict[str, Any]:
    """Return the shares of a training step, and the limit of its speedup; empty without `--rl`."""
    if options.rl is None:
        if options.rl_overlap is not None:
            raise OutriderError("--rl-overlap is about a training step; give --rl as well")
        return {}
    overlap = options.rl_overlap or 0.0
    limit = step_limit(options.rl, overlap=overlap)
    return {"generation_share": options.rl, "overlap": overlap, "limit": limit if math.isfinite(limit) else None}


def _add_step_speedup(result: dict[str, Any], training: Mapping[str, Any]) -> None:
    for case in result["cases"].values() if training else ():
        share, overlap = training["generation_share"], training["overlap"]
        case["step_speedup"] = step_speedup(share, case["speedup"], overlap=overlap)


def find_drafting(options: ProjectOptions, target: Model) -> Drafting:
    """Return the cost of the proposer.

    Raises:
        OutriderError: the proposer is not supported, or an option does not apply to it.
    """
    name, _, argument = options.proposer.partition(":")
    draft_us = options.draft_us
    if draft_us is not None and not 0 <= draft_us <= _MAX_NUMBER:
        raise OutriderError(f"draft-us is {draft_us}; use a number from 0 to {_MAX_NUMBER}")
    pass_seconds = None if draft_us is None else draft_us / 1e6
    if options.draft_bits is not None and name != "draft":
        raise OutriderError(f"--draft-bits is for a draft model, and the proposer is {name}; leave it out")
    if name == "ngram" and not argument:
        if pass_seconds is None:
            return Drafting(host_seconds=_DEFAULT_DRAFT_US / 1e6)
        return Drafting(host_seconds=pass_seconds, pass_seconds=0.0)
    if name == "draft" and argument:
        weight_bits = _DEFAULT_DRAFT_BITS if options.draft_bits is None else options.draft_bits
        model = find_model(argument, Bits(weights=weight_bits, cache=options.cache_bits))
        return Drafting(model=model, pass_seconds=pass_seconds)
    if name in ("head", "block") and argument:
        try:
            share = float(argument)
        except ValueError:
            raise OutriderError(
                f"{options.proposer!r} has no share of the target as a number; write for example {name}:0.04"
            ) from None
        return Drafting(model=head(target, share), parallel=name == "block", pass_seconds=pass_seconds)
    raise OutriderError(
        f"proposer {options.proposer!r} is not supported here; use ngram, draft:DIR, draft:SIZE,"
        " head:SHARE or block:SHARE"
    )


def _acceptance(options: ProjectOptions) -> tuple[Acceptance, dict[str, Any]]:
    """Return the acceptance, and its source for the document."""
    if bool(options.alpha) == bool(options.source):
        raise OutriderError("give the acceptance once: --alpha 0.8, or --from a file that outrider bench wrote")
    if options.source:
        measured = read_bench(options.source, category=options.category)
        acceptance = replace(measured.acceptance, nodes=options.nodes or measured.acceptance.nodes)
        return acceptance, {
            "source": measured.description,
            "measured_tau": measured.tau,
            "exact": measured.exact,
            "other": measured.mismatch(options.proposer),
        }
    if options.category:
        raise OutriderError("--category is a category of a benchmark; give its output as well, with --from")
    nodes = 1.0 if options.nodes is None else options.nodes
    return Acceptance(rates=options.alpha, repeat_last=len(options.alpha) == 1, nodes=nodes), {"source": "assumed"}


def _draft_lengths(ks: Sequence[int], acceptance: Acceptance) -> tuple[int, ...]:
    known = acceptance.depth
    if known is not None and max(ks, default=0) > known:
        raise OutriderError(f"k is {max(ks)}, and acceptance is known for {known} positions; use --k 0..{known}")
    return tuple(ks) or tuple(range(1, (known or _DEFAULT_MAX_K) + 1))


def _result(pairs: Sequence[Pair], batch: int, context: int, ks: Sequence[int]) -> dict[str, Any]:
    """Return the entry of one batch size and context, with all cases."""
    drafting = pairs[0].drafting  # the same in all cases
    best = {pair.efficiency.name: pair.best(batch, context, ks) for pair in pairs}
    return {
        "batch": batch,
        "context": context,
        "cases": {
            name: {
                "k": point.k,
                "tau": point.tau,
                "speedup": point.speedup,
                "tokens_per_s": point.tokens_per_s,
                "tokens_per_s_per_sequence": point.tokens_per_s / batch,
                "plain_tokens_per_s": point.plain_tokens_per_s,
                "plain_tokens_per_s_per_sequence": point.plain_tokens_per_s / batch,
                "draft_ms": 1e3 * point.draft_seconds,
                "verify_ms": 1e3 * point.verify_seconds,
                "bound": str(point.bound),
                "ahead": point.ahead if drafting.model else None,
            }
            for name, point in best.items()
        },
    }


def _memory(pair: Pair, context: int, batches: Sequence[int]) -> dict[str, Any]:
    """Return the memory of all groups of devices together. A draft on its own machine takes none of it."""
    groups = pair.layout.groups
    usable = None if pair.machine.memory is None else USABLE * pair.machine.memory * groups
    draft = None if pair.draft_device else pair.drafting.model
    # Expert parallelism copies everything but the experts.
    copies = (pair.layout.expert - 1) * replace(pair.target, experts=None).held_bytes()
    budget = MemoryBudget.of(pair.target, draft, memory=usable, context=context)
    budget = replace(budget, target_weights=budget.target_weights + copies)
    return {
        "context": context,
        "usable_bytes": usable,
        "target_weight_bytes": budget.target_weights,
        "target_cache_bytes_per_sequence": budget.target_cache,
        "draft_weight_bytes": budget.draft_weights,
        "draft_cache_bytes_per_sequence": budget.draft_cache,
        "sequences": budget.max_sequences(),
        "sequences_without_draft": budget.max_sequences(draft=False),
        "draft_in_sequences": {str(batch): budget.draft_in_sequences(batch) for batch in batches},
        "held_bytes": {str(batch): budget.held(batch) for batch in batches},
    }


def _free_tokens(target: Model, hardware: Machine, case: Efficiency) -> float | None:
    """Return the free tokens of a pass; None for a model with experts."""
    if target.experts:
        return None
    rate = (hardware.int8 if target.int8 else hardware.bf16) * case.arithmetic
    return free_tokens(bandwidth=hardware.bandwidth * case.bandwidth, arithmetic=rate, bits=target.bits)


def _machine(hardware: Machine, sheet: Datasheet) -> dict[str, Any]:
    return {
        "name": hardware.name,
        "devices": hardware.devices,
        "read_bytes_per_s": hardware.bandwidth,
        "bf16_flops_per_s": hardware.bf16,
        "int8_ops_per_s": hardware.int8,
        "memory_bytes": hardware.memory,
        "note": sheet.note,
    }


def _model(model: Model) -> dict[str, Any]:
    return asdict(model) | {
        "weight_bytes": model.held_bytes(),
        "weight_bytes_per_pass": model.read_bytes(1),
        "active_weights": model.active(),
    }


def _drafting(drafting: Drafting) -> dict[str, Any]:
    return {
        "model": _model(drafting.model) if drafting.model else None,
        "passes": None if drafting.model is None else ("one per round" if drafting.parallel else "one per draft token"),
        "host_seconds_per_sequence": drafting.host_seconds,
        "measured_pass_seconds": drafting.pass_seconds,
    }
