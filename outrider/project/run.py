"""The projection from beginning to end: from what is asked to the document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from outrider._version import __version__
from outrider.errors import OutriderError
from outrider.project.equations import Acceptance, Drafting, Efficiency, Machine, Model, Pair, free_tokens, head
from outrider.project.machines import Datasheet, Own, efficiencies, find_machine
from outrider.project.measured import read_bench
from outrider.project.memory import MemoryBudget
from outrider.project.models import Bits, find_model
from outrider.project.options import ProjectOptions
from outrider.system import machine

USABLE = 0.9  # of the memory; the rest is for buffers
_MOST, _DEEPEST = 10**9, 1024  # limits of sequences or cached tokens, and of draft tokens per round
_DRAFT_US, _DRAFT_BITS = 20.0, 16.0  # defaults
_MAX_K = 12  # default limit of k
NOTE = "an estimate, computed from datasheets and equations; nothing was measured"
DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "pass": "max(r, a) + exposed x min(r, a) + layers x layer overhead, where r = bytes / bandwidth and a ="
        " operations / rate; a pass reads all weights once and the KV cache of each sequence, and a token costs two"
        " operations per active weight",
        "speedup": "tokens/s over those of plain decoding, both estimated for the same machine, batch and case",
        "k": "the fastest of those considered; 0 where plain decoding is the fastest",
        "bound": "what the target's pass waits for",
        "stops_paying": "the batch from which no k gains; null if drafting still pays at 65536 sequences",
        "ahead": "1 + draft / verify: the most that drafting in parallel on other hardware could gain in addition",
        "free_tokens": "tokens of a pass whose arithmetic takes as long as reading the weights;"
        " null with experts, where"
        " it depends on the number of experts that are read",
        "draft_in_sequences": "(W_d + K_d) / K_t: sequences that would fit in place of the draft",
        "sequences": f"sequences whose KV caches fit beside the weights into {USABLE:.0%} of the memory",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """The lists among the options, read; () is the default."""

    batch: tuple[int, ...]
    context: tuple[int, ...]
    k: tuple[int, ...] = ()
    alpha: tuple[float, ...] = ()
    shares: Mapping[str, tuple[float, ...]]  # by the names of `machines.Kind`

    def __post_init__(self) -> None:
        for name, values, least, most in (
            ("batch", self.batch, 1, _MOST),
            ("context", self.context, 1, _MOST),
            ("k", self.k, 0, _DEEPEST),
        ):
            if min(values, default=least) < least:
                raise OutriderError(f"{name} is {min(values)}; use at least {least}")
            if max(values, default=least) > most:
                raise OutriderError(f"{name} is {max(values)}; use at most {most}")


def run_project(asked: ProjectOptions, lists: Lists) -> dict[str, Any]:
    """Project each batch and context, in three cases.

    Returns:
        The document to report, fit for JSON.

    Raises:
        OutriderError: what was asked for cannot be projected; the message says why.
    """
    if asked.target is None:
        raise OutriderError("no target is named; use --target with a folder, or a size such as 8B")
    target = find_model(asked.target, Bits(weights=asked.weight_bits, cache=asked.cache_bits))
    drafting = find_drafting(asked, target)
    own = Own(bandwidth=asked.bandwidth, flops=asked.flops, memory=asked.memory, devices=asked.devices)
    place, sheet = find_machine(asked.machine, own)
    if asked.allreduce_us and asked.devices == 1:
        raise OutriderError("--allreduce-us is of sums over several devices, and there is one; give --devices as well")
    acceptance, source = _acceptance(asked, lists.alpha)
    ks = _depths(lists.k, acceptance)
    cases = efficiencies(sheet.kind, lists.shares)
    pairs = [
        Pair(target=target, drafting=drafting, acceptance=acceptance, machine=place, efficiency=each) for each in cases
    ]
    return {
        "benchmark": "outrider project",
        "projection": NOTE,
        "arguments": asdict(asked),
        "machine": _machine(place, sheet),
        "target": _model(target),
        "draft": _drafting(drafting),
        "acceptance": {"rates": list(acceptance.rates), "nodes": acceptance.nodes} | source,
        "efficiency": [asdict(each) for each in cases],
        "free_tokens": {each.name: _free(target, place, each) for each in cases},
        "memory": [_room(target, drafting, place, context, lists.batch) for context in lists.context],
        "results": [_place(pairs, batch, context, ks, drafting) for context in lists.context for batch in lists.batch],
        "stops_paying": [
            {"context": context, **{pair.efficiency.name: pair.stops_paying(context, ks) for pair in pairs}}
            for context in lists.context
        ],
        "versions": {"outrider": __version__},
        "commit": machine.commit(),
        "definitions": dict(DEFINITIONS),
    }


def find_drafting(asked: ProjectOptions, target: Model) -> Drafting:
    """Who guesses.

    Raises:
        OutriderError: nobody of that name can be projected.
    """
    name, _, argument = asked.proposer.partition(":")
    if asked.draft_us is not None and name != "ngram":
        raise OutriderError(f"--draft-us is the host's time, and {name} takes the machine's; leave it out")
    if asked.draft_bits is not None and name != "draft":
        raise OutriderError(f"--draft-bits are those of a draft model, and {name} is none; leave it out")
    if name == "ngram" and not argument:
        guess_us = _DRAFT_US if asked.draft_us is None else asked.draft_us
        if not 0 <= guess_us <= _MOST:
            raise OutriderError(f"draft-us is {guess_us}; use a number from 0 to {_MOST}")
        return Drafting(row_seconds=guess_us / 1e6)
    if name == "draft" and argument:
        bits = Bits(weights=_DRAFT_BITS if asked.draft_bits is None else asked.draft_bits, cache=asked.cache_bits)
        return Drafting(model=find_model(argument, bits))
    if name in ("head", "block") and argument:
        try:
            share = float(argument)
        except ValueError:
            raise OutriderError(f"{asked.proposer!r} names no share of the target; write {name}:0.04") from None
        return Drafting(model=head(target, share), at_once=name == "block")
    raise OutriderError(
        f"proposer {asked.proposer!r} is not projected; use ngram, draft:DIR, draft:SIZE, head:SHARE or block:SHARE"
    )


def _acceptance(asked: ProjectOptions, alpha: Sequence[float]) -> tuple[Acceptance, dict[str, Any]]:
    """The acceptance, and where it is from."""
    if bool(alpha) == bool(asked.source):
        raise OutriderError("give the acceptance once: --alpha 0.8, or --from a file that outrider bench wrote")
    if asked.source:
        measured = read_bench(asked.source, category=asked.category)
        found = replace(measured.acceptance, nodes=asked.nodes or measured.acceptance.nodes)
        return found, {
            "source": measured.says,
            "measured_tau": measured.tau,
            "exact": measured.exact,
            "other": measured.other(asked.proposer),
        }
    if asked.category:
        raise OutriderError("--category names a part of a benchmark; give its output as well, with --from")
    nodes = 1.0 if asked.nodes is None else asked.nodes
    return Acceptance(rates=tuple(alpha), endless=len(alpha) == 1, nodes=nodes), {"source": "assumed"}


def _depths(wanted: Sequence[int], acceptance: Acceptance) -> tuple[int, ...]:
    most = acceptance.depth
    if most is not None and max(wanted, default=0) > most:
        raise OutriderError(f"k is {max(wanted)}, and acceptance is known for {most} positions; use --k 0..{most}")
    return tuple(wanted) or tuple(range(1, (most or _MAX_K) + 1))


def _place(pairs: Sequence[Pair], batch: int, context: int, ks: Sequence[int], drafting: Drafting) -> dict[str, Any]:
    """One batch at one context, in all cases."""
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


def _room(target: Model, drafting: Drafting, place: Machine, context: int, batches: Sequence[int]) -> dict[str, Any]:
    usable = None if place.memory is None else USABLE * place.memory
    room = MemoryBudget.of(target, drafting.model, memory=usable, context=context)
    return {
        "context": context,
        "usable_bytes": usable,
        "target_weight_bytes": room.target_weights,
        "target_cache_bytes_per_sequence": room.target_row,
        "draft_weight_bytes": room.draft_weights,
        "draft_cache_bytes_per_sequence": room.draft_row,
        "sequences": room.max_sequences(),
        "sequences_without_draft": room.max_sequences(draft=False),
        "draft_in_sequences": {str(rows): room.draft_in_sequences(rows) for rows in batches},
        "held_bytes": {str(rows): room.held(rows) for rows in batches},
    }


def _free(target: Model, place: Machine, each: Efficiency) -> float | None:
    if target.experts:
        return None
    rate = (place.int8 if target.int8 else place.bf16) * each.arithmetic
    return free_tokens(bandwidth=place.bandwidth * each.bandwidth, arithmetic=rate, bits=target.bits)


def _machine(place: Machine, sheet: Datasheet) -> dict[str, Any]:
    return {
        "name": place.name,
        "devices": place.devices,
        "read_bytes_per_s": place.bandwidth,
        "bf16_flops_per_s": place.bf16,
        "int8_ops_per_s": place.int8,
        "memory_bytes": place.memory,
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
        "passes": None if drafting.model is None else ("one per round" if drafting.at_once else "one per draft token"),
        "host_seconds_per_sequence": drafting.row_seconds,
    }
