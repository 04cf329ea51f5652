"""Check a target when it is loaded: compare its forward pass with that of transformers.

In a mixture of experts, rounding decides which of two experts a token uses if their router logits
are nearly equal. The logits of two correct passes then differ by much more than rounding. So
transformers computes with the experts that the target has chosen. The choice is checked separately:
it must be the router's own, up to near-ties.
"""

import logging
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.config import NEVER, ONCE
from outrider.core.params import AUTO
from outrider.core.target import CompiledTarget, ExpertCounter, Target
from outrider.core.types import AudioFeatures, Batch, DraftBudget, SequenceState
from outrider.errors import MODEL_ERRORS, NotEnoughMemory, UnsupportedModel
from outrider.models.cache.memory import out_of_memory
from outrider.models.loader.check_store import CheckResult, kernels_of, once
from outrider.models.loader.make import make_target
from outrider.models.torch.attention import NAME
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.gguf_linear import BlockLinear
from outrider.models.torch.rounding import BLOCK_TOLERANCE, INT8_CACHE_TOLERANCE, TIE_FACTOR, TOLERANCE, TRIALS
from outrider.models.torch.routing import prescribed_experts
from outrider.runtime.progress import stage

_PROMPT = 9  # tokens
_FIRST_FEED = 5  # tokens of the first pass; the second pass computes the rest and reads the cache
_SOURCE = 12  # tokens of the source of an encoder-decoder model
_PARENTS = (-1, 0, -1, 1, 2)  # a tree with two branches
_FIX = "use another model, or transformers.generate for this one"
_log = logging.getLogger("outrider")


class CheckedTarget(NamedTuple):
    """A target, and the check that it has passed."""

    target: Target
    check: CheckResult | None  # None: it was not checked, because the user said so


def make_checked_target(
    checkpoint: Checkpoint,
    *,
    slots: int,
    context: int,
    kernels: str = "auto",
    bits: int = 16,
    kv_dtype: str = AUTO,
    check: str = ONCE,
) -> CheckedTarget:
    """Make the target for a checkpoint and check it. The arguments before `check` are those of `make_target`.

    With `kernels` auto, a model that fails the check on the native or Triton kernels runs on torch, with a warning.

    Args:
        check: once, always or never. once: an unchanged checkpoint that has passed is not checked again.

    Raises:
        OutriderError: as in `make_target`.
        UnsupportedModel: as in `make_target` and `check_target`. A quantized model is not tried on
            torch, because the kernels have quantized it in their own format. Nor is a model whose
            KV cache is in int8, which torch does not have.
    """
    target = make_target(checkpoint, slots=slots, context=context, kernels=kernels, bits=bits, kv_dtype=kv_dtype)
    try:
        passed = None if check == NEVER else _passed(target, checkpoint, bits, check, kv_dtype)
        if isinstance(target, CompiledTarget):
            checkpoint.lazy_model.release()  # the kernels have packed its weights
        return CheckedTarget(target, passed)
    except UnsupportedModel as reason:
        if kv_dtype != AUTO:
            raise UnsupportedModel(f"{reason}; or leave kv_dtype out, which was {kv_dtype}") from reason
        if kernels != "auto" or not isinstance(target, CompiledTarget):
            raise
        name = kernels_of(target)
        if bits < 16:
            way = "use kernels torch" if name == "native" else "leave quantize out"
            raise UnsupportedModel(f"{reason}; or {way}, since this was on the {name} kernels") from reason
        _log.warning("the %s kernels fail the check, so the model runs on torch: %s", name, reason)
        target = make_target(checkpoint, slots=slots, context=context, kernels="torch")
        return CheckedTarget(target, _passed(target, checkpoint, bits, check))


def _passed(target: Target, checkpoint: Checkpoint, bits: int, check: str, kv_dtype: str = AUTO) -> CheckResult:
    """Return the kept result of an earlier check, or check the target."""
    name = Path(checkpoint.folder).name or "the model"
    reference = f"transformers {version('transformers')}"
    how, hint = (", once per checkpoint", "; --check never skips this") if check == ONCE else ("", "")

    def check_now() -> CheckResult:
        with stage(
            f"checking {name} against {reference}",
            announcement=f"checking the logits of {name} against {reference}{how}",
            hint=hint,
        ):
            return check_target(target, checkpoint, kv_dtype)

    return once(checkpoint, target, bits, check_now) if check == ONCE else check_now()


def check_target(target: Target, checkpoint: Checkpoint, kv_dtype: str = AUTO) -> CheckResult:
    """Compare the logits of a draft tree with those of the model's own forward pass over each branch.

    `kv_dtype` is that of the target, as in `make_target`. The model's own pass does not round keys
    and values to it, so the comparison bounds the error of the cache.

    Raises:
        NotEnoughMemory: the device has too little memory for the KV cache or the passes.
        UnsupportedModel: they differ by more than rounding, or the model does not run.
    """
    from outrider.models.loader.quiet import quiet_transformers

    model_type = checkpoint.config.model_type
    errors = torch.full((1 + len(_PARENTS),), torch.inf)  # the smallest of all trials, by node
    blocks = target.kernels != "torch" and checkpoint.block_types
    tolerance = BLOCK_TOLERANCE if blocks else TOLERANCE[checkpoint.dtype]
    if kv_dtype != AUTO:
        tolerance = max(tolerance, INT8_CACHE_TOLERANCE)
    try:
        for trial in range(TRIALS):
            with quiet_transformers():
                errors = errors.fmin(trial_errors(target, checkpoint, trial, tolerance).cpu())
            if errors.max() < tolerance:
                return CheckResult(
                    date=datetime.now(UTC).date().isoformat(),
                    against=f"transformers {version('transformers')}",
                    error=float(errors.max()),
                    tolerance=tolerance,
                )
    except NotEnoughMemory:
        raise
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, slots=target.slots, context=target.context) from error
    except MODEL_ERRORS as reason:
        raise UnsupportedModel(f"{model_type}: its forward pass fails ({reason}); {_FIX}") from reason
    raise UnsupportedModel(
        f"{model_type}: the logits of a draft tree differ from the model's own by"
        f" {errors.max():.1%} of their norm; {_FIX}"
    )


@torch.inference_mode()
def trial_errors(target: Target, checkpoint: Checkpoint, seed: int, tolerance: float) -> torch.Tensor:
    """Return [1 + N], the relative error of the logits of each node."""
    scored = _score(target, checkpoint, seed)
    reference = compute_reference(checkpoint, scored, _source(checkpoint, seed))
    expected = reference.logits.to(scored.logits.device)  # the model in transformers may be on the CPU
    errors = (scored.logits[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
    # A wrong choice of experts is an error of 100% or more.
    wrong = reference.gaps.to(errors.device) > TIE_FACTOR * tolerance
    return torch.where(wrong, errors.clamp_min(1.0), errors)


class _Scored(NamedTuple):
    """The target's results."""

    logits: torch.Tensor  # [1, 1 + N, V]
    tokens: list[int]  # of the prompt, followed by those of the tree
    experts: list[torch.Tensor]  # [T, K] of these tokens, for each layer with experts


class _Reference(NamedTuple):
    """The results of transformers for each node. The first one is the prompt."""

    logits: torch.Tensor  # [1 + N, V]
    gaps: torch.Tensor  # [1 + N] the largest gap of the choice of experts, see `prescribed_experts`


def _branch_columns(node: int) -> list[int]:
    """Return the tokens of the branch that ends at a node, as indices of the prompt and the tree. -1: the prompt."""
    return [*range(_PROMPT), *(_PROMPT + i for i in tree.path(_PARENTS, node))]


def _score(target: Target, checkpoint: Checkpoint, seed: int) -> _Scored:
    """Score a random prompt in two passes, with a tree of draft tokens after it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(checkpoint.vocab, (_PROMPT + len(_PARENTS),), generator=generator).tolist()
    prompt = tokens[:_PROMPT]
    drafted = tokens[_PROMPT:]
    seq = SequenceState.of(prompt, source=_source(checkpoint, seed))
    target.cache.admit(0, prompt)
    no_draft = tree.empty(1, target.device)
    first_batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(prompt[:_FIRST_FEED]),), budget=DraftBudget((0,)))
    scores = target.score(first_batch, no_draft)
    experts = [target.chosen_experts() if isinstance(target, ExpertCounter) else []]
    target.cache.commit(tree.prefill_round(first_batch, no_draft, scores))
    nodes = torch.tensor([drafted], device=target.device)
    parents = torch.tensor([_PARENTS], device=target.device)
    draft = tree.one_hot_tree(nodes, parents, (len(drafted),))
    second_batch = Batch(
        seqs=(seq,), start=(_FIRST_FEED,), feed=(tuple(prompt[_FIRST_FEED:]),), budget=DraftBudget((len(drafted),))
    )
    logits = target.score(second_batch, draft).logits
    experts.append(target.chosen_experts() if isinstance(target, ExpertCounter) else [])
    target.cache.release(0)
    return _Scored(logits, tokens, list(map(torch.cat, zip(*experts, strict=True))))


def _source(checkpoint: Checkpoint, seed: int) -> list[int] | AudioFeatures:
    """Return a random source for an encoder-decoder model; empty for a decoder-only model."""
    if checkpoint.source is None:
        return []
    generator = torch.Generator().manual_seed(seed + TRIALS)
    if (speech := checkpoint.source.speech) is not None:
        return AudioFeatures(torch.randn(speech.bins, speech.frames, generator=generator))
    return torch.randint(checkpoint.vocab, (min(_SOURCE, checkpoint.source.context),), generator=generator).tolist()


def compute_reference(checkpoint: Checkpoint, scored: _Scored, source: list[int] | AudioFeatures) -> _Reference:
    """Return the logits of each node from transformers, without a cache, with the experts of the target.

    Only the branches that end at a leaf run. Those of inner nodes are their beginnings.
    """
    model: Any = checkpoint.lazy_model.reference()
    leaves = [node for node in range(len(_PARENTS)) if node not in _PARENTS]
    columns = list(map(_branch_columns, leaves))
    branches = []
    experts = []
    for branch in columns:
        branches.append([scored.tokens[column] for column in branch])
        experts.append([layer[branch] for layer in scored.experts])
    if isinstance(model.get_output_embeddings(), BlockLinear):  # each pass converts all weights, so one runs all
        longest = max(map(len, branches))
        batches = [[branch + [0] * (longest - len(branch)) for branch in branches]]
        padded = (map(partial(_pad, length=longest), layers) for layers in experts)
        choices = [list(map(torch.cat, zip(*padded, strict=True)))]
    else:
        batches = [[branch] for branch in branches]
        choices = experts
    attention = model.config._attn_implementation
    if attention == NAME:
        model.set_attn_implementation("eager")
    try:
        logits: list[torch.Tensor] = []  # [T, V] of each branch
        gaps: list[torch.Tensor] = []  # [T] of each branch
        for batch, chosen in zip(batches, choices, strict=True):
            inputs = _model_inputs(checkpoint, batch, source, model.device)
            with prescribed_experts(model, chosen) as layer_gaps:
                logits += model(**inputs, use_cache=False).logits
            largest = torch.stack(layer_gaps).amax(0) if layer_gaps else torch.zeros(sum(map(len, batch)))
            gaps += largest.view(len(batch), -1)
    finally:
        if attention == NAME:
            model.set_attn_implementation(attention)
    rows = []
    worst = []
    for node in range(-1, len(_PARENTS)):
        end = _branch_columns(node)
        place = next(i for i, branch in enumerate(columns) if branch[: len(end)] == end)
        rows.append(logits[place][len(end) - 1].float())
        worst.append(gaps[place][: len(end)].max())
    return _Reference(torch.stack(rows), torch.stack(worst))


def _model_inputs(
    checkpoint: Checkpoint, batch: list[list[int]], source: list[int] | AudioFeatures, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the inputs of the model in transformers for texts [B][T] with one source."""
    tokens = torch.tensor(batch, device=device)
    if isinstance(source, AudioFeatures):
        features = source.values[None].to(device, checkpoint.dtype)
        return {"input_features": features, "decoder_input_ids": tokens}
    if not source:
        return {"input_ids": tokens}
    sources = torch.tensor([source], device=device)
    return {
        "input_ids": sources,
        "decoder_input_ids": tokens,
        # Without masks, T5Gemma hides tokens with the id of the padding.
        "attention_mask": torch.ones_like(sources),
        "decoder_attention_mask": torch.ones_like(tokens),
    }


def _pad(experts: torch.Tensor, length: int) -> torch.Tensor:
    """Pad experts to [length, K] with -1, which leaves the choice to the router."""
    return functional.pad(experts, (0, 0, 0, length - len(experts)), value=-1)
