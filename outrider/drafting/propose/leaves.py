"""The parts of a proposer, and the draft models among them."""

from outrider.core.proposer import Proposer
from outrider.core.target import Target
from outrider.drafting.propose.combine import Combination
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.vocabulary.text_draft import TextProposer


def draft_model(proposer: Proposer) -> Target | None:
    """Return the first draft model of a proposer and its parts. None if there is none."""
    if isinstance(proposer, Combination):
        return next(filter(None, map(draft_model, proposer.parts)), None)
    return proposer.model if isinstance(proposer, DraftModelProposer | TextProposer) else None


def leaves(proposer: Proposer) -> list[Proposer]:
    """Return the proposers that a proposer is combined from, or itself."""
    if isinstance(proposer, Combination):
        return [leaf for part in proposer.parts for leaf in leaves(part)]
    return [proposer]


def draft_models(proposer: Proposer) -> list[Target]:
    """Return all draft models of a proposer and its parts."""
    return [model for leaf in leaves(proposer) if (model := draft_model(leaf)) is not None]


def model_sources(proposer: Proposer) -> int:
    """Return the bits of `Draft.source` that belong to draft models."""
    return sum(1 << bit for bit, leaf in enumerate(leaves(proposer)) if draft_model(leaf) is not None)
