"""Build an engine from a configuration: target, proposer, verifier, planner, scheduler.

Every engine of the package is made here, by `assemble`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.core.cache import CacheConfig
from outrider.core.config import EngineConfig
from outrider.core.grammar import remove_time_limit
from outrider.core.placement import DraftPlacement
from outrider.core.planner import FixedPlanner, GrammarPlanner, Planner
from outrider.core.proposer import NoProposer, Proposer, ProposerSetup
from outrider.core.source import SourceRules
from outrider.core.target import Target
from outrider.core.types import Draw
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.known_costs import known_costs
from outrider.drafting.plan.pass_cost import CostModel
from outrider.drafting.propose.combine import Switch
from outrider.drafting.propose.isolate import IsolatedProposer, isolate
from outrider.drafting.propose.leaves import draft_model, draft_models, model_sources
from outrider.drafting.propose.registry import (
    Maker,
    alternatives,
    check_draft_settings,
    draft_sources,
    find_proposer,
    own_proposer,
)
from outrider.engine.cache_memory import share_out
from outrider.engine.default_proposer import default_proposer
from outrider.engine.engine import Engine
from outrider.engine.prefill_budget import PrefillBudget
from outrider.engine.scheduler import Scheduler
from outrider.engine.verifiers import find_verifier, fitting_verifiers, verifier_for
from outrider.errors import OutriderError
from outrider.models.loader.check import make_checked_target
from outrider.models.loader.check_store import CheckResult
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.load import load_checkpoint
from outrider.models.torch.checkpoint import Checkpoint, Precision, WeightFormat
from outrider.models.triton.fastest import fastest_sampling, fastest_verifier
from outrider.runtime.forks import check_fork
from outrider.runtime.progress import stage
from outrider.runtime.ranks import current, join
from outrider.verify.rules import Verifier

_MAX_DEFAULT_CONTEXT = 8192  # largest default of max_model_len
_BATCHED_TOKENS = 512  # default prompt tokens per round


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """An engine and the parts that it was made from."""

    loaded: LoadedTarget
    engine: Engine
    setup: ProposerSetup  # the setup of the proposer
    proposer: Proposer
    proposer_spec: str | Maker  # the expression or the callable that the proposer was made from
    verifier: Verifier
    planner: Planner
    end_ids: frozenset[int]
    draft_sources: tuple[str, ...]  # names of the bits of `Draft.source`
    proposers: tuple[str, ...]  # alternatives that a request can choose
    verifiers: tuple[str, ...]  # exact verifiers that a request can choose
    isolated: tuple[IsolatedProposer, ...] = ()  # one per alternative, if faults are isolated

    @property
    def target(self) -> Target:
        return self.setup.target

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the target, of transformers."""
        return self.setup.tokenizer

    @property
    def vocab(self) -> int:
        return self.setup.vocab

    @property
    def context(self) -> int:
        """Most tokens of prompt and completion together."""
        return self.setup.context

    @property
    def source_rules(self) -> SourceRules | None:
        """The rules for sources of an encoder-decoder target; None: the target is a decoder-only model."""
        return self.loaded.checkpoint.source

    @property
    def draft_placements(self) -> tuple[DraftPlacement, ...]:
        """Where the drafts run under tensor parallelism; () in one process."""
        return tuple(self.setup.placements)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the target's activations, and of its weights unless they are quantized."""
        return self.setup.dtype

    @property
    def precision(self) -> Precision:
        """The dtype of the target, and the types of its weights."""
        return self.loaded.precision

    @property
    def device(self) -> torch.device:
        """The device of the target."""
        return self.setup.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A loaded and checked target. Several engines may share it if they do not run at the same time."""

    checkpoint: Checkpoint
    model: Target
    kernels: str  # as configured, also for drafts
    check: CheckResult | None  # of the logits against transformers; None: not checked
    precision: Precision


def build(config: EngineConfig, *, planner: Planner | None = None) -> EngineParts:
    """Load the models of a configuration and connect them.

    Args:
        config: what to load and how to run it.
        planner: sets the number of draft tokens in place of `config.k`.

    Raises:
        OutriderError: a model cannot be loaded, or the parts do not fit together; the message names the fix.
    """
    check_fork()
    if planner is not None and not _is_planner(planner):
        raise OutriderError(f"planner is {planner!r}; use an object with the methods plan and trim, or None and a k")
    if join(config.tp, config.device) is not None:
        remove_time_limit()  # it may end a request in one rank only
    # The default depends on the free memory, so choose it once, before the target is loaded.
    proposer = proposer_of(config)
    config = replace(config, proposer=proposer)
    find_verifier(config.verifier, proposer)
    check_draft_settings(config, proposer)
    with stage("loading models"):
        return build_engine(load_target(config), config, planner=planner)


def load_target(config: EngineConfig) -> LoadedTarget:
    """Load the target of a configuration. Raises OutriderError if as in `load_checkpoint` and `prepare_target`."""
    dtype = full_dtype(config.dtype, config.bits)
    checkpoint = load_checkpoint(
        model_folder(config.target), dtype=dtype, device=config.device, kernels=config.kernels, tp=config.tp
    )
    if dtype != config.dtype:
        checkpoint = replace(checkpoint, dtype_reason="with quantized weights")
    return prepare_target(checkpoint, config)


def prepare_target(checkpoint: Checkpoint, config: EngineConfig) -> LoadedTarget:
    """Choose the backend of a loaded checkpoint, allocate its cache, and check its logits against the model's own.

    Raises:
        OutriderError: the backend does not support the model, or the logits differ.
    """
    made = make_checked_target(
        checkpoint,
        slots=config.max_num_seqs,
        context=_context(config.max_model_len, checkpoint),
        kernels=config.kernels,
        bits=config.bits,
        kv_dtype=config.kv_dtype,
        check=config.check,
    )
    return LoadedTarget(
        checkpoint=checkpoint,
        model=made.target,
        kernels=config.kernels,
        check=made.check,
        precision=_precision(checkpoint, config),
    )


def _precision(checkpoint: Checkpoint, config: EngineConfig) -> Precision:
    weights = checkpoint.blocks
    if config.quantize is not None:
        weights = WeightFormat((config.quantize,), config.bits)
    if weights is None:
        weights = WeightFormat((str(checkpoint.dtype).removeprefix("torch."),), 8 * checkpoint.dtype.itemsize)
    return Precision(weights=weights, dtype=checkpoint.dtype)


def build_engine(
    loaded: LoadedTarget, config: EngineConfig, *, planner: Planner | None = None, slots: range | None = None
) -> EngineParts:
    """Make a proposer and an engine for a loaded target.

    Args:
        config: the fields about models are not read again.
        planner: sets the number of draft tokens in place of `config.k`.
        slots: the engine's own part of the target's slots, if engines share the target. None of
            them may run while another one is made.

    Raises:
        OutriderError: the proposer, the verifier or the planner cannot be made, or they do not fit together.
    """
    model = loaded.model
    spec = proposer_of(config)
    rule = find_verifier(config.verifier, spec)
    setup = make_setup(loaded, rule.draw, config)
    proposer = make_proposer(spec, setup)
    caching = CacheConfig(gigabytes=config.cache_gb, share=config.prefix_caching)
    share_out([each.cache for each in (model, *draft_models(proposer))], model.context, caching, model.device)
    model.export_hidden_states(proposer.needs.layers)
    names = _names(spec, proposer)
    running: Proposer = proposer
    guards: tuple[IsolatedProposer, ...] = ()
    if config.isolate_faults and current() is None:  # a fault in one of several ranks would make drafts differ
        running, guards = isolate(proposer, setup, names=names)
    replay = rule.draw is Draw.SAMPLE or not rule.exact
    planner = planner or make_planner(config.k, model, proposer, replay=replay, has_plan=config.plan is not None)
    engine = assemble(
        loaded,
        proposer=running,
        verifier=rule,
        planner=planner,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_round_ms=config.max_round_ms,
        slots=slots,
    )
    return EngineParts(
        loaded=loaded,
        engine=engine,
        setup=setup,
        proposer=proposer,
        proposer_spec=spec,
        verifier=rule,
        planner=planner,
        end_ids=loaded.checkpoint.end_ids,
        draft_sources=draft_sources(spec),
        proposers=names,
        verifiers=fitting_verifiers(spec, rule.draw),
        isolated=guards,
    )


def assemble(
    loaded: LoadedTarget,
    *,
    proposer: Proposer,
    verifier: Verifier,
    planner: Planner,
    max_num_batched_tokens: int = _BATCHED_TOKENS,
    max_round_ms: float | None = None,
    slots: range | None = None,
) -> Engine:
    """Connect the parts of an engine. Every engine of the package is made here.

    The verification rule and the sampler run on the fastest kernels of the device. So what is
    audited, tuned or benchmarked is what users run.
    """
    model, checkpoint = loaded.model, loaded.checkpoint
    fitted = verifier_for(verifier, model, vocab=checkpoint.vocab, device=checkpoint.device)
    own = slots or range(model.slots)
    budget = PrefillBudget(max_num_batched_tokens, seconds=max_round_ms / 1000 if max_round_ms else None)
    return Engine(
        target=model,
        proposer=proposer,
        verifier=fastest_verifier(fitted, checkpoint.device),
        planner=planner,
        scheduler=Scheduler(slots=len(own), first=own.start, chunk=budget, context=model.context),
        sampling=fastest_sampling(checkpoint.device),
        ranks=current() if checkpoint.ranks > 1 else None,
    )


def make_setup(loaded: LoadedTarget, draw: Draw, config: EngineConfig) -> ProposerSetup:
    """Return the setup that a proposer for this target is made from. Of `config`, only what drafts need is read."""
    checkpoint, target = loaded.checkpoint, loaded.model
    return ProposerSetup(
        target=target,
        vocab=checkpoint.vocab,
        slots=target.slots,
        context=target.context,
        device=checkpoint.device,
        dtype=checkpoint.dtype,
        draw=draw,
        tokenizer=checkpoint.tokenizer,
        kernels=loaded.kernels,
        source_rules=checkpoint.source,
        draft_window=config.draft_window,
        draft_quantize=config.draft_quantize,
        kv_dtype=config.kv_dtype,
        draft_candidates=config.draft_candidates,
        check=config.check,
        target_folder=checkpoint.folder,
        ranks=checkpoint.ranks,
        draft_placement=config.draft_placement,
    )


def make_proposer(spec: str | Maker, setup: ProposerSetup) -> Proposer:
    """Return the proposer of an expression, or of a callable of the user.

    Raises:
        OutriderError: the expression is not valid, or the proposer cannot be made.
    """
    return find_proposer(spec, setup) if isinstance(spec, str) else own_proposer(spec, setup)


def make_planner(k: int | str, target: Target, proposer: Proposer, *, replay: bool, has_plan: bool) -> Planner:
    """Return a planner: for "auto" one that uses measured costs, else one with a fixed number of draft tokens.

    Args:
        k: draft tokens per round, or "auto".
        proposer: the proposer. Plain decoding needs no measured costs.
        replay: as in `auto_planner`.
        has_plan: whether a plan file keeps what the planner learns.
    """
    if isinstance(k, int):
        return FixedPlanner(k)
    if isinstance(proposer, NoProposer) and not has_plan:
        return GrammarPlanner()
    return auto_planner(target, proposer, replay=replay)


def proposer_of(config: EngineConfig) -> str | Maker:
    """Return the proposer of a configuration, which is the default of the target if none is set."""
    if config.proposer is not None:
        return config.proposer
    if config.k == 0:
        return "none"  # no draft is ever used, so none is loaded
    kernels = config.kernels if config.tp == 1 else "torch"
    return default_proposer(config.target, device=config.device, kernels=kernels, quantize=config.quantize)


def _is_planner(planner: object) -> bool:
    if isinstance(planner, type):
        return False
    return all(callable(getattr(planner, name, None)) for name in ("plan", "trim"))


def _names(spec: str | Maker, proposer: Proposer) -> tuple[str, ...]:
    """Return the names by which requests choose the alternatives of a proposer."""
    if isinstance(spec, str):
        return alternatives(spec)
    return tuple(f"own#{i + 1}" for i in range(proposer.needs.alternatives))


def auto_planner(
    target: Target,
    proposer: Proposer,
    *,
    replay: bool = False,
    find_costs: Callable[[Target, Sequence[Target | None]], list[CostModel]] | None = None,
) -> CostPlanner:
    """Return a planner that knows the costs of the target and of the draft model of each alternative.

    With `replay`, the output of a request with a seed depends on its drafts, and must be reproducible (see
    `CostPlanner`). `find_costs` returns the costs of a target and of its draft model; None: `known_costs`.
    """
    alternatives = proposer.parts if isinstance(proposer, Switch) else (proposer,)
    find = find_costs or known_costs
    costs = find(target, list(map(draft_model, alternatives)))
    return CostPlanner(
        *costs, replay=replay, model_sources=model_sources(proposer), padded=getattr(target, "padded", False)
    )


def full_dtype(dtype: str, bits: int) -> str:
    """Return the dtype to load a model in. With `bits` below 16, auto is bfloat16, from which weights are quantized."""
    return "bfloat16" if bits < 16 and dtype == "auto" else dtype


def _context(asked: int | None, checkpoint: Checkpoint) -> int:
    if asked is None:
        return min(checkpoint.context, _MAX_DEFAULT_CONTEXT)
    if not 2 <= asked <= checkpoint.context:
        reason = checkpoint.context_reason and f" ({checkpoint.context_reason})"
        raise OutriderError(f"max_model_len is {asked}; this model takes from 2 to {checkpoint.context} tokens{reason}")
    return asked
