"""Check a target when it is loaded: compare its forward pass with that of transformers."""

from __future__ import annotations

from typing import Any

import torch

from outrider.core import tree
from outrider.core.types import Batch, SequenceState
from outrider.errors import MODEL_ERRORS, UnsupportedModel
from outrider.models.attention import NAME
from outrider.models.base import Target
from outrider.models.checkpoint import Checkpoint
from outrider.models.gguf_linear import block_types
from outrider.models.rounding import TOLERANCE, TRIALS

_PROMPT = 9  # tokens
_FIRST_FEED = 5  # tokens of the first pass; the second pass computes the rest and reads the cache
_SOURCE = 12  # tokens of the source of an encoder-decoder model
_PARENTS = (-1, 0, -1, 1, 2)  # a tree with two branches


def check_target(target: Target, checkpoint: Checkpoint) -> None:
    """Compare the logits of a draft tree with those of the model's own forward pass over each branch.

    Raises:
        UnsupportedModel: they differ by more than rounding, or the model does not run.
    """
    model_type = checkpoint.model.config.model_type
    errors = torch.full((1 + len(_PARENTS),), torch.inf)  # the smallest of all trials, by node
    # The native kernels multiply quantized blocks with activations of 8 bits.
    blocks = target.kernels != "torch" and block_types(checkpoint.model)
    tolerance = TOLERANCE[torch.bfloat16 if blocks else checkpoint.dtype]
    try:
        for trial in range(TRIALS):
            errors = errors.fmin(_errors(target, checkpoint, trial).cpu())
            if errors.max() < tolerance:
                return
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as reason:
        raise UnsupportedModel(f"{model_type}: its forward pass fails ({reason})") from reason
    raise UnsupportedModel(
        f"{model_type}: the logits of a draft tree differ from the model's own by {errors.max():.1%} of their norm;"
        " Outrider does not support this architecture"
    )


@torch.inference_mode()
def _errors(target: Target, checkpoint: Checkpoint, seed: int) -> torch.Tensor:
    """Return [1 + N], the relative error of the logits of each node."""
    logits, prompt, drafted = _score(target, checkpoint, seed)
    branches = []
    for node in range(-1, len(_PARENTS)):
        branches.append(prompt + [drafted[i] for i in tree.path(_PARENTS, node)])
    reference = _reference(checkpoint, branches, _source(checkpoint, seed))
    return (logits[0] - reference).norm(dim=-1) / reference.norm(dim=-1)  # type: ignore[no-any-return]


def _score(target: Target, checkpoint: Checkpoint, seed: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """Score a random prompt in two passes, with a tree of draft tokens after it.

    Returns:
        The logits [1, 1 + N, V], the prompt, and the tokens of the tree.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(checkpoint.vocab, (_PROMPT + len(_PARENTS),), generator=generator).tolist()
    prompt = tokens[:_PROMPT]
    drafted = tokens[_PROMPT:]
    seq = SequenceState.of(prompt, source=_source(checkpoint, seed))
    target.cache.admit(0, prompt)
    no_draft = tree.empty(1, target.device)
    first_batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(prompt[:_FIRST_FEED]),), draft_budget=(0,))
    scores = target.score(first_batch, no_draft)
    target.cache.commit(tree.prefill_round(first_batch, no_draft, scores))
    nodes = torch.tensor([drafted], device=target.device)
    parents = torch.tensor([_PARENTS], device=target.device)
    draft = tree.one_hot_tree(nodes, parents, (len(drafted),))
    second_batch = Batch(
        seqs=(seq,), start=(_FIRST_FEED,), feed=(tuple(prompt[_FIRST_FEED:]),), draft_budget=(len(drafted),)
    )
    logits = target.score(second_batch, draft).logits
    target.cache.release(0)
    return logits, prompt, drafted


def _source(checkpoint: Checkpoint, seed: int) -> list[int]:
    """Return a random source for an encoder-decoder model; empty for a decoder-only model."""
    if checkpoint.source is None:
        return []
    generator = torch.Generator().manual_seed(seed + TRIALS)
    return torch.randint(checkpoint.vocab, (min(_SOURCE, checkpoint.source.context),), generator=generator).tolist()


def _reference(checkpoint: Checkpoint, branches: list[list[int]], source: list[int]) -> torch.Tensor:
    """Return the logits [branches, V] after each branch from transformers, without a cache."""
    model: Any = checkpoint.model
    if block_types(model):  # they are dequantized in each pass, so one pass has all branches
        longest = max(map(len, branches))
        batches = [[branch + [0] * (longest - len(branch)) for branch in branches]]
    else:
        batches = [[branch] for branch in branches]
    attention = model.config._attn_implementation
    if attention == NAME:
        model.set_attn_implementation("eager")
    try:
        logits = []
        for batch in batches:
            tokens = torch.tensor(batch, device=checkpoint.device)
            inputs = {"input_ids": tokens}
            if source:
                sources = torch.tensor([source], device=checkpoint.device)
                inputs = {"input_ids": sources, "decoder_input_ids": tokens}
                # Without masks, T5Gemma hides tokens with the id of the padding.
                inputs["attention_mask"] = torch.ones_like(sources)
                inputs["decoder_attention_mask"] = torch.ones_like(tokens)
            logits += model(**inputs, use_cache=False).logits
        return torch.stack([each[len(branch) - 1].float() for each, branch in zip(logits, branches, strict=True)])
    finally:
        if attention == NAME:
            model.set_attn_implementation(attention)
