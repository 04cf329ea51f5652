"""Check a target when it is loaded: compare its forward pass with that of transformers."""

from __future__ import annotations

from typing import Any

import torch

from outrider.core import tree
from outrider.core.types import Batch, SequenceState
from outrider.errors import MODEL_ERRORS, UnsupportedModel
from outrider.models.base import Target
from outrider.models.checkpoint import Checkpoint
from outrider.models.rounding import TOLERANCE, TRIALS

_PROMPT = 9  # tokens
_FIRST_FEED = 5  # tokens of the first pass; the second pass computes the rest and reads the cache
_PARENTS = (-1, 0, -1, 1, 2)  # a tree with two branches


def check_target(target: Target, checkpoint: Checkpoint) -> None:
    """Compare the logits of a draft tree with those of the model's own forward pass over each branch.

    Raises:
        UnsupportedModel: they differ by more than rounding, or the model does not run.
    """
    model_type = checkpoint.model.config.model_type
    errors = torch.full((1 + len(_PARENTS),), torch.inf)  # the smallest of all trials, by node
    try:
        for trial in range(TRIALS):
            errors = errors.fmin(_errors(target, checkpoint, trial).cpu())
            if errors.max() < TOLERANCE[checkpoint.dtype]:
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
    references = []
    for node in range(-1, len(_PARENTS)):
        branch = prompt + [drafted[i] for i in tree.path(_PARENTS, node)]
        references.append(_reference(checkpoint, branch))
    reference = torch.stack(references)
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
    seq = SequenceState.of(prompt)
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


def _reference(checkpoint: Checkpoint, tokens: list[int]) -> torch.Tensor:
    """Return the logits [V] after `tokens` from transformers, without a cache."""
    model: Any = checkpoint.model
    ids = torch.tensor([tokens], device=checkpoint.device)
    attention = model.config._attn_implementation
    if not checkpoint.recurrent:
        model.set_attn_implementation("eager")
    try:
        return model(input_ids=ids, use_cache=False).logits[0, -1].float()  # type: ignore[no-any-return]
    finally:
        if not checkpoint.recurrent:
            model.set_attn_implementation(attention)
