"""Make the proposers of draft models and draft heads from their folders."""

import logging
from pathlib import Path

from outrider.core.proposer import Proposer, ProposerSetup
from outrider.drafting.propose.draft_model.cascade import cascade
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.draft_model.open_head import open_head, target_info
from outrider.drafting.propose.draft_model.open_model import open_model
from outrider.drafting.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.drafting.propose.draft_model.tree import TreeProposer
from outrider.drafting.propose.vocabulary.intersection import SharedVocabulary
from outrider.errors import OutriderError
from outrider.models.heads.files import read_target_info
from outrider.models.heads.formats.base import TargetInfo
from outrider.models.heads.formats.registry import check_projection
from outrider.models.heads.store import is_head
from outrider.models.loader.load import check_model

# Share of the target's tokens that a draft model must have, so that drafting by tokens is as good
# as by text.
_GOOD_SHARE = 0.9
_log = logging.getLogger("outrider")


def draft_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `draft:DIR` of a draft head or a draft model.

    A model with another vocabulary drafts by tokens if it has most of the target's tokens, and by
    text otherwise.
    """
    if is_head(folder, lambda: target_info(setup)):
        return HeadProposer(setup, open_head(folder, setup))
    opened = open_model(folder, setup)
    if opened.same_vocabulary:
        return DraftModelProposer(setup, opened.model())
    vocabulary_map = opened.vocabulary_map()
    by_tokens = vocabulary_map.shared_fraction >= _GOOD_SHARE
    _log.warning(
        "the draft in %s has another vocabulary: of the target's %d tokens it has %.0f%%, and it drafts by %s",
        folder,
        vocabulary_map.tokens,
        100 * vocabulary_map.shared_fraction,
        "tokens" if by_tokens else "text",
    )
    if by_tokens:
        return DraftModelProposer(setup, SharedVocabulary(opened.model(), vocabulary_map))
    return opened.text_proposer()


def mtp_proposer(setup: ProposerSetup) -> Proposer:
    """Make `mtp`, the module for multi-token prediction in the target's own checkpoint.

    Raises:
        OutriderError: the checkpoint has no such module, or it is damaged, or its kind is not
            supported.
    """
    folder = setup.target_folder
    if not (folder and is_head(folder, lambda: target_info(setup))):
        if folder and Path(folder).is_dir():
            check_projection(Path(folder))
        raise OutriderError(
            "the target's checkpoint has no module for multi-token prediction; use ngram, draft:DIR or quantized:int4"
        )
    return HeadProposer(setup, open_head(folder, setup))


def draft_tokens_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `draft-tokens:DIR`, a draft model that drafts by tokens."""
    return DraftModelProposer(setup, open_model(folder, setup).with_target_ids())


def draft_text_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `draft-text:DIR`, a draft model that drafts by text."""
    return open_model(folder, setup).text_proposer()


def cascade_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `cascade:DIR`, a draft model that drafts by tokens with n-gram lookup."""
    return DraftModelProposer(setup, cascade(open_model(folder, setup).with_target_ids()))


def tree_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `tree:DIR`, a draft head or a draft model that drafts trees."""
    if is_head(folder, lambda: target_info(setup)):
        return HeadTreeProposer(setup, open_head(folder, setup))
    return TreeProposer(setup, open_model(folder, setup).with_target_ids())


def check_draft(folder: str, *, heads: bool) -> None:
    """Check the files of a draft folder before any model is loaded.

    Args:
        folder: the folder of the draft.
        heads: whether draft heads are allowed.

    Raises:
        OutriderError: the folder is not a draft, or does not fit this proposer.
    """
    # The target is not known yet, so assume that a head belongs to the model in its own folder.
    if not (heads and is_head(folder, lambda: _own_target_info(folder))):
        check_model(folder)


def _own_target_info(folder: str) -> TargetInfo | None:
    """Return the facts of the model in a folder as the target of its own head; None if its sizes are unknown."""
    try:
        return read_target_info(folder)
    except OutriderError:
        return None
