"""Open draft models and draft heads from their folders."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from outrider.core.types import SharedWeights
from outrider.errors import OutriderError
from outrider.heads.files import read_target_info
from outrider.heads.formats.base import TargetInfo
from outrider.heads.store import is_head, read_head
from outrider.heads.targets.base import HeadTarget
from outrider.heads.targets.registry import make_head_target
from outrider.loader.check import check_target
from outrider.loader.checkpoint import is_recurrent, load_checkpoint
from outrider.loader.make import make_target
from outrider.models.base import Target, WeightSharer
from outrider.models.checkpoint import Checkpoint
from outrider.propose.base import Proposer, ProposerSetup
from outrider.propose.draft_model.cascade import Cascade
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.propose.draft_model.tree import TreeProposer
from outrider.propose.vocabulary.intersection import SharedVocabulary, VocabularyMap
from outrider.propose.vocabulary.text_draft import TextProposer
from outrider.propose.vocabulary.token_text import TokenText, token_text

_ENOUGH = 0.9  # share of the target's tokens from which drafting by tokens is as good as by text
_LEAST_SHARE = 0.1  # smallest share for drafting by tokens
_log = logging.getLogger("outrider")


def draft_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """`draft:DIR`: a head, or a model by tokens if it has most of the target's tokens, else by text."""
    if is_head(folder, lambda: _owner(setup)):
        return HeadProposer(setup, _head(folder, setup))
    found = _find("draft", folder, setup)
    if found.akin:
        return DraftModelProposer(setup, found.model())
    words = found.dictionary()
    by_tokens = words.share >= _ENOUGH
    _log.warning(
        "the draft in %s has another vocabulary: of the target's %d tokens it has %.0f%%, and it guesses by %s",
        folder,
        words.tokens,
        100 * words.share,
        "tokens" if by_tokens else "text",
    )
    return DraftModelProposer(setup, SharedVocabulary(found.model(), words)) if by_tokens else found.text_proposer()


def draft_tokens_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """`draft-tokens:DIR`: by tokens."""
    return DraftModelProposer(setup, _find("draft-tokens", folder, setup).speaking())


def draft_text_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """`draft-text:DIR`: by text."""
    return _find("draft-text", folder, setup).text_proposer()


def cascade_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """`cascade:DIR`: by tokens, with n-gram lookup."""
    return DraftModelProposer(setup, Cascade(_find("cascade", folder, setup).speaking()))


def tree_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """`tree:DIR`: a tree, of a head or of a model by tokens."""
    if is_head(folder, lambda: _owner(setup)):
        return HeadTreeProposer(setup, _head(folder, setup))
    return TreeProposer(setup, _find("tree", folder, setup).speaking())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A draft checkpoint and the setup of its proposer."""

    setup: ProposerSetup
    folder: str
    checkpoint: Checkpoint

    @property
    def akin(self) -> bool:
        """Return whether both tokenizers give the same ids. Padding of the vocabularies does not matter."""
        return bool(self.setup.tokenizer.get_vocab() == self.checkpoint.tokenizer.get_vocab())

    def model(self, room: int = 1) -> Target:
        """Make its target, with `room` tokens of its own per token of the target, up to its context."""
        size = min(self.checkpoint.context, room * self.setup.context)
        model = make_target(self.checkpoint, slots=self.setup.slots, context=size, kernels=self.setup.kernels)
        check_target(model, self.checkpoint)
        return model

    def dictionary(self) -> VocabularyMap:
        """The map from the target's ids to the draft's."""
        return VocabularyMap.of(*self._spellings(), (self.setup.vocab, self.checkpoint.vocab))

    def speaking(self) -> Target:
        """The model, wrapped if its ids differ from the target's."""
        if self.akin:
            return self.model()
        words = self.dictionary()
        if words.share < _LEAST_SHARE:
            raise OutriderError(
                f"the draft in {self.folder} has {words.share:.1%} of the target's {words.tokens} tokens, too few"
                f" to guess by tokens; use draft-text:{self.folder}"
            )
        return SharedVocabulary(self.model(), words)

    def text_proposer(self) -> Proposer:
        """Make a proposer that drafts by text."""
        target, draft = self._spellings()
        return TextProposer(self.setup, self.model(room=2), target=target, draft=draft)

    def _spellings(self) -> tuple[TokenText, TokenText]:
        return token_text(self.setup.tokenizer, "the target"), token_text(self.checkpoint.tokenizer, self.folder)


def _head(folder: str, setup: ProposerSetup) -> HeadTarget:
    """Make the target of a draft head."""
    if not isinstance(setup.target, WeightSharer):
        raise OutriderError(f"{folder} reads states that this target does not show; use draft:DIR of a draft model")
    tables = setup.target.share_weights()
    module = read_head(folder, dtype=setup.dtype, device=setup.device, partner=_partner(tables, setup.target.layers))
    it = module.description
    ours = (*tables.head.shape, setup.target.layers)
    if (it.vocab, it.target_hidden, it.target_layers) != ours:
        raise OutriderError(
            f"{folder} was trained on a target with vocabulary {it.vocab}, width {it.target_hidden} and"
            f" {it.target_layers} layers; this one has {ours[0]}, {ours[1]} and {ours[2]}, so use the one it belongs to"
        )
    return make_head_target(module, tables, slots=setup.slots, context=setup.context)


def _owner(setup: ProposerSetup) -> TargetInfo | None:
    """Return the facts of the target that a head must match; None if it does not export hidden states."""
    if not isinstance(setup.target, WeightSharer):
        return None
    try:
        return _partner(setup.target.share_weights(), setup.target.layers)
    except OutriderError:
        return None


def _partner(tables: SharedWeights, layers: int) -> TargetInfo:
    vocab, hidden = tables.head.shape
    return TargetInfo(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        head=lambda: tables.head,
        embedding=lambda: tables.embedding,
        kinds=tuple(tables.kv_view.layer_config.get("layer_types") or ()) if tables.kv_view else (),
    )


def check_draft(folder: str, *, name: str, heads: bool) -> None:
    """Check the files of a draft folder before any model is loaded.

    Args:
        folder: the folder of the draft.
        name: the name of the proposer, for messages.
        heads: whether draft heads are allowed.

    Raises:
        OutriderError: the folder is not a draft, or does not fit this proposer.
    """
    if not folder:
        raise OutriderError(f"{name} needs the folder of a small model; write {name}:DIR")
    # Whether a model folder contains a head is checked when the target is known.
    if not (heads and is_head(folder, lambda: _itself(folder))) and is_recurrent(folder):
        raise OutriderError(f"{folder} is recurrent, and a recurrent draft is not handled yet; use an attention model")


def _itself(folder: str) -> TargetInfo | None:
    """Return the facts of a model as the target of its own head; None if its sizes are unknown."""
    try:
        return read_target_info(folder)
    except OutriderError:
        return None


def _find(name: str, folder: str, setup: ProposerSetup) -> _Found:
    check_draft(folder, name=name, heads=False)
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[setup.dtype]
    checkpoint = load_checkpoint(folder, dtype=dtype, device=str(setup.device))
    return _Found(setup=setup, folder=folder, checkpoint=checkpoint)
