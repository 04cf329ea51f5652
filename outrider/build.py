"""From names to a running house: target, proposer, verifier, planner, scheduler, engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.calibrate import known_costs
from outrider.check import check_target
from outrider.engine import Engine
from outrider.errors import OutriderError
from outrider.load import Checkpoint, load_checkpoint
from outrider.lossy import LOSSY
from outrider.params import AUTO
from outrider.plan import CostPlanner, FixedPlanner, Planner
from outrider.propose.base import NoProposer, Proposer, Setup
from outrider.propose.model import ModelProposer
from outrider.propose.ngram import NgramProposer
from outrider.schedule import Scheduler
from outrider.target import Target, make_target
from outrider.verify import EXACT, Verifier

Maker = Callable[[Setup], Proposer]

_MODELS = Path(__file__).parent / "models"
_BITS: Mapping[str | None, int] = MappingProxyType({None: 16, "int8": 8, "int4": 4})  # of a quantised weight
_CONTEXT = 8192  # tokens a row is given at most, unless more is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """Everything that runs, made to fit together."""

    engine: Engine
    target: Target
    proposer: Proposer
    verifier: Verifier
    tokenizer: Any
    vocab: int
    context: int
    end_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device


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
    chunk: int,
    planner: Planner | None,
) -> House:
    """Load and connect; see `LLM` for the arguments."""
    if isinstance(k, str) and k != AUTO:
        raise OutriderError(f"k is {k!r}; use a number of guesses, or {AUTO}")
    spec = proposer or default_proposer(target)
    rule = find_verifier(verifier, spec)
    bits = weight_bits(quantize)
    checkpoint = load_checkpoint(target or embedded("mini"), dtype=full_dtype(dtype, bits), device=device)
    size = _context(context, checkpoint)
    scheduler = Scheduler(slots=rows, chunk=chunk, context=size)
    setup = Setup(
        vocab=checkpoint.vocab,
        slots=rows,
        context=size,
        device=checkpoint.device,
        dtype=checkpoint.dtype,
        draw=rule.draw,
        tokenizer=checkpoint.tokenizer,
        kernels=kernels,
    )
    guesser = find_proposer(spec, setup) if isinstance(spec, str) else spec(setup)
    model = make_target(checkpoint, slots=rows, context=size, layers=guesser.needs.layers, kernels=kernels, bits=bits)
    check_target(model, checkpoint)
    if planner is None:
        planner = CostPlanner(known_costs(model, draft_model(guesser))) if isinstance(k, str) else FixedPlanner(k)
    return House(
        engine=Engine(target=model, proposer=guesser, verifier=rule, planner=planner, scheduler=scheduler),
        target=model,
        proposer=guesser,
        verifier=rule,
        tokenizer=checkpoint.tokenizer,
        vocab=checkpoint.vocab,
        context=size,
        end_ids=checkpoint.end_ids,
        dtype=checkpoint.dtype,
        device=checkpoint.device,
    )


def weight_bits(quantize: str | None) -> int:
    """Of the linear layers' weights: 16 where they are not quantised."""
    if quantize not in _BITS:
        raise OutriderError(f"quantize {quantize!r} is unknown; use {', '.join(filter(None, _BITS))}")
    return _BITS[quantize]


def full_dtype(dtype: str, bits: int) -> str:
    """What a model is loaded in whose weights are to have so many bits: auto is then what quantising starts from."""
    return "bfloat16" if bits < 16 and dtype == "auto" else dtype


def draft_model(proposer: Proposer) -> Target | None:
    """The draft model of a proposer that has one."""
    return proposer.model if isinstance(proposer, ModelProposer) else None


def embedded(name: str) -> Path:
    """The folder of an embedded model: mini, the target, or nano, its draft."""
    return _MODELS / name


def default_proposer(target: str | Path | None) -> str:
    """The embedded draft for the embedded target, and for any other what costs nothing."""
    return f"draft:{embedded('nano')}" if target is None else "ngram"


def find_verifier(name: str | None, proposer: str | Maker) -> Verifier:
    """A verifier by its name, or the one that fits how the proposer guesses."""
    known = {**EXACT, **LOSSY}
    if name is None:
        return known["block" if isinstance(proposer, str) and proposer.startswith("draft:") else "walk"]
    if name not in known:
        raise OutriderError(f"verifier {name!r} is unknown; use one of {', '.join(known)}")
    return known[name]


def find_proposer(spec: str, setup: Setup) -> Proposer:
    """A proposer by its name: none, ngram, draft:DIR or pkg.module:Class."""
    if spec in _PLAIN:
        return _PLAIN[spec](setup)
    head, colon, rest = spec.partition(":")
    if not colon:
        raise OutriderError(f"proposer {spec!r} is unknown; use none, ngram, draft:DIR or pkg.module:Class")
    return _draft_model(rest, setup) if head == "draft" else _import(head, rest, setup)


def _draft_model(folder: str, setup: Setup) -> Proposer:
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[setup.dtype]
    checkpoint = load_checkpoint(folder, dtype=dtype, device=str(setup.device))
    if checkpoint.recurrent:
        raise OutriderError(f"{folder} is recurrent, and a recurrent draft is not handled yet; use an attention model")
    _compare_tokenizers(setup.tokenizer, checkpoint.tokenizer, folder)
    size = min(checkpoint.context, setup.context)
    model = make_target(checkpoint, slots=setup.slots, context=size, kernels=setup.kernels)
    check_target(model, checkpoint)
    return ModelProposer(setup, model)


def _compare_tokenizers(target: Any, draft: Any, folder: str) -> None:
    """The same text must be the same ids; how far the vocabularies are padded does not matter."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    for token in sorted(ours.keys() | theirs.keys(), key=lambda token: (ours.get(token, -1), token)):
        if ours.get(token) != theirs.get(token):
            raise OutriderError(
                f"the draft in {folder} has another vocabulary than the target: {token!r} is id {ours.get(token)} for"
                f" the target and {theirs.get(token)} for the draft ({len(ours)} and {len(theirs)} tokens in all);"
                " use a draft of the target's family, or --proposer ngram"
            )


def _import(module: str, name: str, setup: Setup) -> Proposer:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a module beside the user, as `python -m` would find it
    try:
        maker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OutriderError(f"proposer {module}:{name} cannot be imported ({error}); check the dotted path") from error
    return maker(setup)  # type: ignore[no-any-return]


def _context(asked: int | None, checkpoint: Checkpoint) -> int:
    if asked is None:
        return min(checkpoint.context, _CONTEXT)
    if not 2 <= asked <= checkpoint.context:
        raise OutriderError(f"context is {asked}; this model takes from 2 to {checkpoint.context} tokens")
    return asked


_PLAIN: Mapping[str, Maker] = MappingProxyType({"none": NoProposer, "ngram": NgramProposer})
