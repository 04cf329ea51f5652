"""Before a model is used: does our pass say what the model says? An architecture is refused, never run wrongly."""

from __future__ import annotations

from typing import Any

import torch

from outrider.core import tree
from outrider.core.types import Batch, SequenceState
from outrider.errors import MODEL_ERRORS, UnsupportedModel
from outrider.models.base import Target
from outrider.models.checkpoint import Checkpoint
from outrider.models.rounding import TOLERANCE, TRIALS

_PROMPT = 9  # tokens, fed as 5 and then 4, so that the cache is read back
_PARENTS = (-1, 0, -1, 1, 2)  # a tree of two branches


def check_target(target: Target, checkpoint: Checkpoint) -> None:
    """Compare a tree scored by `target` with each of its branches read by the model's own forward pass.

    Raises:
        UnsupportedModel: they differ by more than rounding, or the model does not run at all.
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
        raise UnsupportedModel(f"{kind}: its forward pass does not run here ({reason})") from reason
    raise UnsupportedModel(
        f"{kind}: a tree scored here differs from the model's own forward pass by {best.max():.1%} of the logits' norm;"
        " this architecture needs something that Outrider does not give it"
    )


@torch.inference_mode()
def _errors(target: Target, checkpoint: Checkpoint, seed: int) -> torch.Tensor:
    """[1 + N]: how far each node's logits are from the model's own, relative to their norm."""
    ours, text, guesses = _score(target, checkpoint, seed)
    branches = [text + [guesses[i] for i in tree.path(_PARENTS, node)] for node in range(-1, len(_PARENTS))]
    theirs = torch.stack([_reference(checkpoint, branch) for branch in branches])
    return (ours[0] - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # type: ignore[no-any-return]


def _score(target: Target, checkpoint: Checkpoint, seed: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """Feed a prompt in two pieces with a tree behind it; logits [1, 1 + N, V], the prompt and the guesses."""
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(checkpoint.vocab, (_PROMPT + len(_PARENTS),), generator=source).tolist()
    text, guesses = tokens[:_PROMPT], tokens[_PROMPT:]
    row = SequenceState.of(text)
    target.cache.admit(0, text)
    draft, half = (
        tree.empty(1, target.device),
        Batch(seqs=(row,), start=(0,), feed=(tuple(text[:5]),), draft_budget=(0,)),
    )
    scores = target.score(half, draft)
    target.cache.commit(tree.prefill_round(half, draft, scores))
    rest = Batch(seqs=(row,), start=(5,), feed=(tuple(text[5:]),), draft_budget=(len(guesses),))
    nodes, parents = (torch.tensor([row], device=target.device) for row in (guesses, _PARENTS))
    logits = target.score(rest, tree.one_hot_tree(nodes, parents, (len(guesses),))).logits
    target.cache.release(0)
    return logits, text, guesses


def _reference(checkpoint: Checkpoint, text: list[int]) -> torch.Tensor:
    """Logits [V] after `text` by the model's own attention, without a cache."""
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
