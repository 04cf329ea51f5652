"""Run a draft model whose LM head has the most frequent tokens only (FR-Spec, Zhao et al. 2025).

A small draft model spends much of its time in the LM head. It can still read every token, since its embedding is whole.
A token outside the draft vocabulary is never drafted, so each one ends an accepted chain.
"""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.core.draws import Draws
from outrider.core.target import Target, draft_by_scores, expand_logits
from outrider.core.types import Batch, Draft, DraftChains, Scores, StopRule
from outrider.drafting.propose.vocabulary.wrapped_target import WrappedTarget
from outrider.errors import OutriderError
from outrider.models.loader.make import make_target
from outrider.models.native.target import NativeTarget
from outrider.models.torch.checkpoint import Checkpoint

_FILE = "draft_vocab.safetensors"
_IDS = "ids"


def read_draft_vocabulary(folder: str | Path, vocab: int) -> torch.Tensor | None:
    """Return the ids [Vd] that a draft model drafts, in ascending order, or None if it drafts all tokens.

    Args:
        folder: the folder of the draft model.
        vocab: the number of its ids.

    Raises:
        OutriderError: the file with the ids is damaged, or belongs to another model.
    """
    file = Path(folder).expanduser() / _FILE
    if not file.is_file():
        return None
    try:
        ids = load_file(file)[_IDS].long()
    except (OSError, SafetensorError, KeyError) as error:
        raise OutriderError(f"{file} cannot be read ({error}); copy the draft model again") from error
    if ids.dim() != 1 or not len(ids) or bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise OutriderError(f"{file}: the ids must ascend and be below {vocab}; copy the draft model again")
    return ids


def has_draft_vocabulary(folder: str | Path) -> bool:
    """Return whether a draft model drafts some tokens only."""
    return (Path(folder).expanduser() / _FILE).is_file()


def write_draft_vocabulary(folder: Path, ids: torch.Tensor) -> None:
    """Write the ids [Vd] that the draft model in `folder` drafts."""
    save_file({_IDS: ids.to("cpu", torch.int64).contiguous()}, folder / _FILE)


def reduce_vocabulary(model: Target, checkpoint: Checkpoint, ids: torch.Tensor, *, kernels: str) -> Target:
    """Return the draft model with an LM head for the tokens `ids` only.

    Args:
        model: the draft model, made from `checkpoint`. It is not used any more.
        checkpoint: its checkpoint, whose LM head is cut.
        ids: [Vd] the tokens to draft, in ascending order.
        kernels: as in `make_target`.
    """
    if isinstance(model, NativeTarget):
        model.keep_tokens(ids)
        return NativeReducedVocabulary(model, ids, checkpoint.vocab)
    head = checkpoint.model.get_output_embeddings()
    rows = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    rows.weight = nn.Parameter(head.weight[ids.to(head.weight.device)].clone(), requires_grad=False)
    if head.bias is not None:
        rows.bias = nn.Parameter(head.bias[ids.to(head.bias.device)].clone(), requires_grad=False)
    checkpoint.model.set_output_embeddings(rows)
    cut = replace(checkpoint, vocab=len(ids), weights=None)
    inner = make_target(cut, slots=model.slots, context=model.context, kernels=kernels)
    return ReducedVocabulary(inner, ids, checkpoint.vocab)


class ReducedVocabulary(WrappedTarget):
    """A draft model with some tokens, as a `Target` with all. The others have the logit -inf."""

    def __init__(self, inner: Target, ids: torch.Tensor, vocab: int) -> None:
        """Wrap a model whose logits are those of the tokens `ids` [Vd] among `vocab` tokens."""
        super().__init__(inner)
        self.vocab = vocab
        self._ids = ids.to(inner.device)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        logits = self.inner.score(batch, draft, first).logits
        return Scores(logits=expand_logits(logits, self._ids, self.vocab))

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return draft_by_scores(self, batch, vocab, stop_rule)


class NativeReducedVocabulary(ReducedVocabulary):
    """The same on the native kernels, which draft chains of token ids themselves."""

    inner: NativeTarget

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return self.inner.draft_greedy(batch, vocab, stop_rule)

    def draft_sampled(self, batch: Batch, vocab: int, draws: Draws, stop_rule: StopRule | None = None) -> DraftChains:
        return self.inner.draft_sampled(batch, vocab, draws, stop_rule)
