"""From names to a running house: target, proposer, verifier, planner, scheduler, engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.cache.base import Cache, Caching
from outrider.core.params import AUTO
from outrider.core.types import Draw
from outrider.engine.engine import Engine
from outrider.engine.prefill_budget import Tempo
from outrider.engine.scheduler import Scheduler
from outrider.engine.verifiers import find_verifier, fitting_verifiers
from outrider.errors import OutriderError
from outrider.loader.check import check_target
from outrider.loader.checkpoint import is_recurrent, load_checkpoint
from outrider.loader.embedded import model_folder
from outrider.loader.make import make_target
from outrider.models.base import Target
from outrider.models.checkpoint import Checkpoint
from outrider.native.rules import fastest
from outrider.native.sampling import fastest_shape
from outrider.plan.calibrate import known_costs
from outrider.plan.planner import CostPlanner, FixedPlanner, Planner
from outrider.propose.base import Proposer, Setup
from outrider.propose.combine import Switch
from outrider.propose.isolate import Guarded, guarded
from outrider.propose.linearize import OneWay
from outrider.propose.registry import (
    Maker,
    alternatives,
    default_proposer,
    draft_model,
    draft_models,
    find_proposer,
    guessers,
    own_proposer,
)
from outrider.system.machine import free_memory
from outrider.verify.rules import Verifier

_BITS: Mapping[str | None, int] = MappingProxyType({None: 16, "int8": 8, "int4": 4})  # of a quantised weight
_CONTEXT = 8192  # tokens a row is given at most, unless more is asked for
_SHARE = 0.8  # of free memory, for caches
_ROOMY = Caching(share=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """Everything that runs, made to fit together."""

    engine: Engine
    setup: Setup  # that its proposer was made with
    proposer: Proposer
    verifier: Verifier
    planner: Planner
    end_ids: frozenset[int]
    guessers: tuple[str, ...]  # what to call who guesses, in the order of `Draft.by`
    proposers: tuple[str, ...]  # names of the proposer's alternatives, one of which a request may choose
    verifiers: tuple[str, ...]  # exact rules, one of which a request may choose
    guards: tuple[Guarded, ...] = ()  # around each alternative, where there are to be some

    @property
    def target(self) -> Target:
        """Who has the last word."""
        return self.setup.target

    @property
    def tokenizer(self) -> Any:
        """Of transformers; the target's."""
        return self.setup.tokenizer

    @property
    def vocab(self) -> int:
        return self.setup.vocab

    @property
    def context(self) -> int:
        """Tokens that a row can hold, prompt and completion together."""
        return self.setup.context

    @property
    def dtype(self) -> torch.dtype:
        """Of the target's weights."""
        return self.setup.dtype

    @property
    def device(self) -> torch.device:
        """Where the target runs."""
        return self.setup.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A target that stands ready for an engine, or for several that step by turns."""

    checkpoint: Checkpoint
    model: Target
    kernels: str


def build(
    target: str | Path | None,
    *,
    proposer: str | Maker | None,
    k: int | str,
    verifier: str | None,
    dtype: str,
    kernels: str,
    quantize: str | None,
    device: str,
    rows: int,
    context: int | None,
    chunk: int | Tempo,
    planner: Planner | None,
    caching: Caching = _ROOMY,
    guard: bool = False,
) -> House:
    """Load and connect; see `LLM` for the arguments."""
    _check_k(k)
    if not isinstance(chunk, Tempo):
        _check_count("chunk", chunk, 1)
    _check_caching(caching)
    decides = not isinstance(planner, type) and all(callable(getattr(planner, part, None)) for part in ("plan", "trim"))
    if planner is not None and not decides:
        raise OutriderError(f"planner is {planner!r}; use what has plan and trim, or None and a k")
    spec = default_proposer(target) if proposer is None else proposer
    find_verifier(verifier, spec, chains=is_recurrent(model_folder(target)))
    loaded = load_target(
        target, dtype=dtype, kernels=kernels, quantize=quantize, device=device, rows=rows, context=context
    )
    return furnish(loaded, spec, k=k, verifier=verifier, chunk=chunk, planner=planner, caching=caching, guard=guard)


def load_target(
    target: str | Path | None,
    *,
    dtype: str,
    kernels: str,
    quantize: str | None,
    device: str,
    rows: int,
    context: int | None,
) -> Loaded:
    """A target by its folder, which has been checked to say what its model says; see `LLM` for the arguments."""
    for name, value in {"dtype": dtype, "kernels": kernels, "device": device}.items():
        if not isinstance(value, str):
            raise OutriderError(f"{name} is {value!r}; use a name, such as auto")
    bits = weight_bits(quantize)
    _check_count("rows", rows, 1)
    if context is not None:
        _check_count("context", context, 1)
    checkpoint = load_checkpoint(model_folder(target), dtype=full_dtype(dtype, bits), device=device)
    model = make_target(checkpoint, slots=rows, context=_context(context, checkpoint), kernels=kernels, bits=bits)
    check_target(model, checkpoint)
    return Loaded(checkpoint=checkpoint, model=model, kernels=kernels)


def furnish(
    loaded: Loaded,
    spec: str | Maker,
    *,
    k: int | str,
    verifier: str | None,
    chunk: int | Tempo,
    planner: Planner | None,
    caching: Caching = _ROOMY,
    guard: bool = False,
    slots: range | None = None,
) -> House:
    """A proposer and an engine for a target.

    An engine that is to share the target with others has `slots` of its own; None: all that the target has. None of
    them may be running while another is made.
    """
    checkpoint, model = loaded.checkpoint, loaded.model
    rule = find_verifier(verifier, spec, chains=checkpoint.recurrent)
    mine = slots or range(model.slots)
    scheduler = Scheduler(slots=len(mine), first=mine.start, chunk=chunk, context=model.context)
    setup = _setup(checkpoint, model, rule.draw, loaded.kernels)
    guesser = find_proposer(spec, setup) if isinstance(spec, str) else own_proposer(spec, setup)
    share_out([each.cache for each in (model, *draft_models(guesser))], model.context, caching)
    model.export(guesser.needs.layers)
    replay, names = rule.draw is Draw.SAMPLE, _names(spec, guesser)
    running, guards = guarded(guesser, setup, names=names) if guard else (guesser, ())
    decides = planner or (FixedPlanner(k) if isinstance(k, int) else auto_planner(model, guesser, replay=replay))
    return House(
        engine=Engine(
            target=model,
            proposer=OneWay(running) if checkpoint.recurrent else running,
            verifier=fastest(rule, checkpoint.device),
            planner=decides,
            scheduler=scheduler,
            shape=fastest_shape(checkpoint.device),
        ),
        setup=setup,
        proposer=guesser,
        verifier=rule,
        planner=decides,
        end_ids=checkpoint.end_ids,
        guessers=guessers(spec),
        proposers=names,
        verifiers=fitting_verifiers(spec, rule.draw, chains=checkpoint.recurrent),
        guards=guards,
    )


def _setup(checkpoint: Checkpoint, target: Target, draw: Draw, kernels: str) -> Setup:
    """What a proposer for this target is told."""
    return Setup(
        target=target,
        vocab=checkpoint.vocab,
        slots=target.slots,
        context=target.context,
        device=checkpoint.device,
        dtype=checkpoint.dtype,
        draw=draw,
        tokenizer=checkpoint.tokenizer,
        kernels=kernels,
    )


def share_out(caches: Sequence[Cache], context: int, caching: Caching) -> None:
    """Give the target's cache, which is the first, and those of its drafts as many blocks each as memory allows.

    None: for a whole context in every row, and never more than most of the memory that is free.

    Raises:
        OutriderError: a cache of another kind cannot be given so much, or it is not enough for one row.
    """
    for cache in caches:
        cache.share(caching.share)
    gigabytes = caching.gigabytes
    uses = [(cache, use) for cache in caches if (use := cache.use()).block_tokens]
    if gigabytes is not None and (not uses or uses[0][0] is not caches[0]):
        raise OutriderError(
            "gigabytes of cache can be set for the native kernels on a CPU; here each row has room for a whole context,"
            " so set rows and context"
        )
    if not uses:
        return
    size = sum(use.token_bytes * use.block_tokens for _, use in uses)
    wanted, free = max(use.blocks for _, use in uses), free_memory()
    if gigabytes is not None:
        wanted = int(gigabytes * 1e9 / size)
    elif free is not None:
        wanted = min(wanted, int(_SHARE * free / size))
    tokens = uses[0][1].block_tokens
    least = max(-(-context // use.block_tokens) for _, use in uses) + 1  # and a page that the row goes on from
    if wanted < least:
        raise OutriderError(
            f"the caches have {wanted * size / 1e9:.3g} GB, and one row of {context} tokens takes"
            f" {least * size / 1e9:.3g}, {size // tokens} bytes a token; give more, or lower context"
        )
    for cache, _ in uses:
        cache.allot(wanted)


def _names(spec: str | Maker, proposer: Proposer) -> tuple[str, ...]:
    """What requests call the proposer's alternatives."""
    return alternatives(spec) if isinstance(spec, str) else tuple(f"own#{i + 1}" for i in range(proposer.needs.arms))


def auto_planner(target: Target, proposer: Proposer, *, replay: bool = False) -> CostPlanner:
    """Who plans by what passes cost here, of the target and of the draft model of each alternative.

    `replay`: what a seed leads to depends on the guesses, and must be had again (see `CostPlanner`).
    """
    arms = proposer.parts if isinstance(proposer, Switch) else (proposer,)
    return CostPlanner(*(known_costs(target, draft_model(arm)) for arm in arms), replay=replay)


def weight_bits(quantize: str | None) -> int:
    """Of the linear layers' weights: 16 where they are not quantised."""
    if not isinstance(quantize, str | None) or quantize not in _BITS:
        raise OutriderError(f"quantize {quantize!r} is unknown; use {', '.join(filter(None, _BITS))}")
    return _BITS[quantize]


def full_dtype(dtype: str, bits: int) -> str:
    """What a model is loaded in whose weights are to have so many bits: auto is then what quantising starts from."""
    return "bfloat16" if bits < 16 and dtype == "auto" else dtype


def _check_k(k: int | str) -> None:
    if k != AUTO and (isinstance(k, bool) or not isinstance(k, int) or k < 0):
        raise OutriderError(f"k is {k!r}; use a number of guesses, 0 for plain decoding, or {AUTO}")


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OutriderError(f"{name} is {value!r}; it must be a whole number, at least {least}")


def _check_caching(caching: Caching) -> None:
    if not isinstance(caching, Caching):
        raise OutriderError(f"caching is {caching!r}; use Caching(gigabytes=...), or None")
    size = caching.gigabytes
    if size is not None and (not isinstance(size, int | float) or not 0 < size < math.inf):
        raise OutriderError(f"gigabytes of cache is {size!r}; use a number above 0, or none for what memory allows")


def _context(asked: int | None, checkpoint: Checkpoint) -> int:
    if asked is None:
        return min(checkpoint.context, _CONTEXT)
    if not 2 <= asked <= checkpoint.context:
        raise OutriderError(f"context is {asked}; this model takes from 2 to {checkpoint.context} tokens")
    return asked
