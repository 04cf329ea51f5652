"""Checks a model at load: compares the target's pass with the forward pass of transformers."""

from __future__ import annotations

from typing import Any

import torch

from outrider.core import tree
from outrider.core.types import Batch, SequenceState
from outrider.errors import MODEL_ERRORS, UnsupportedModel
from outrider.models.base import Target
from outrider.models.checkpoint import Checkpoint
from outrider.models.rounding import TOLERANCE, TRIALS

_PROMPT = 9  # tokens; fed as 5 and then 4, so that the second pass reads the cache
_PARENTS = (-1, 0, -1, 1, 2)  # a tree with two branches


def check_target(target: Target, checkpoint: Checkpoint) -> None:
    """Compare the logits of a draft tree with those of the model's own forward pass over each branch.

    Raises:
        UnsupportedModel: they differ by more than rounding, or the model does not run.
    """
    kind = checkpoint.model.config.model_type
    best = torch.full((1 + len(_PARENTS),), torch.inf)
    try:
        for trial in range(TRIALS):
            best = best.fmin(_errors(target, checkpoint, trial).cpu())
            if best.max() < TOLERANCE[checkpoint.dtype]:
                return
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as reason:
        raise UnsupportedModel(f"{kind}: its forward pass fails ({reason})") from reason
    raise UnsupportedModel(
        f"{kind}: the logits of a draft tree differ from the model's own by {best.max():.1%} of their norm;"
        " Outrider does not support this architecture"
    )


@torch.inference_mode()
def _errors(target: Target, checkpoint: Checkpoint, seed: int) -> torch.Tensor:
    """Return [1 + N], the relative error of the logits of each node."""
    ours, text, drafted = _score(target, checkpoint, seed)
    branches = [text + [drafted[i] for i in tree.path(_PARENTS, node)] for node in range(-1, len(_PARENTS))]
    theirs = torch.stack([_reference(checkpoint, branch) for branch in branches])
    return (ours[0] - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # type: ignore[no-any-return]


def _score(target: Target, checkpoint: Checkpoint, seed: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """Score a prompt in two passes, with a tree after it.

    Returns:
        The logits [1, 1 + N, V], the prompt, and the tokens of the tree.
    """
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(checkpoint.vocab, (_PROMPT + len(_PARENTS),), generator=source).tolist()
    text, drafted = tokens[:_PROMPT], tokens[_PROMPT:]
    seq = SequenceState.of(text)
    target.cache.admit(0, text)
    draft, half = (
        tree.empty(1, target.device),
        Batch(seqs=(seq,), start=(0,), feed=(tuple(text[:5]),), draft_budget=(0,)),
    )
    scores = target.score(half, draft)
    target.cache.commit(tree.prefill_round(half, draft, scores))
    rest = Batch(seqs=(seq,), start=(5,), feed=(tuple(text[5:]),), draft_budget=(len(drafted),))
    nodes, parents = (torch.tensor([values], device=target.device) for values in (drafted, _PARENTS))
    logits = target.score(rest, tree.one_hot_tree(nodes, parents, (len(drafted),))).logits
    target.cache.release(0)
    return logits, text, drafted


def _reference(checkpoint: Checkpoint, text: list[int]) -> torch.Tensor:
    """Return the logits [V] after `text` from transformers, without a cache."""
    model: Any = checkpoint.model
    ids = torch.tensor([text], device=checkpoint.device)
    ours = model.config._attn_implementation
    if not checkpoint.recurrent:
        model.set_attn_implementation("eager")
    try:
        return model(input_ids=ids, use_cache=False).logits[0, -1].float()  # type: ignore[no-any-return]
    finally:
        if not checkpoint.recurrent:
            model.set_attn_implementation(ours)
