"""The `Proposer` protocol and the setup that every proposer is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Draw, Needs, Request, Round
from outrider.errors import OutriderError
from outrider.models.base import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSetup:
    """What a proposer is made with."""

    target: Target  # the engine's own target: a proposer may share its weights, and must not run it
    vocab: int  # ids that the target has logits for
    slots: int  # sequences at once, numbered from 0
    context: int  # tokens that a sequence can hold
    device: torch.device  # the device of drafts
    dtype: torch.dtype  # of the target
    draw: Draw  # how the verifier wants draft tokens to be chosen
    tokenizer: Any  # the target's
    kernels: str = "auto"  # of draft models; see `make_target`


class Proposer(Protocol):
    """Drafts the tokens that the target may generate next.

    Contract: the draft of a sequence depends only on what has been committed and scored, and on the sequence's noise.
    `Draft.kind` and `Draft.q` are true for every node. Sequence b gets at most `batch.draft_budget[b]` nodes. `propose`
    may prepare state that `commit` uses; the sequences do not change between the two calls.
    """

    needs: Needs

    def admit(self, slot: int, request: Request) -> None:
        """Begin a request in a slot."""

    def propose(self, batch: Batch) -> Draft:
        """Return a tree of draft tokens for each sequence; none if its budget is 0.

        The committed tokens are in `batch.seqs[b].token_ids`.
        """

    def commit(self, round: Round) -> None:
        """Learn what was accepted. `round.emitted` is not yet part of the sequences' `token_ids`.

        `round.draft` is what was verified. It may have fewer nodes than were proposed, nodes of other proposers, and
        another order. A proposer finds its own nodes by their tokens in `round.emitted` (`TreeBuilder.path`).
        """

    def release(self, slot: int) -> None:
        """End the request in a slot."""


def check_budget(batch: Batch, draft: Draft) -> None:
    """Check that a draft keeps to the budget.

    Raises:
        OutriderError: the draft is for other sequences, or has too many nodes.
    """
    if len(draft.width) != len(batch.seqs) or any(w > b for w, b in zip(draft.width, batch.draft_budget, strict=True)):
        raise OutriderError(
            f"the proposer made {draft.width} draft tokens, and {batch.draft_budget} are allowed;"
            " keep to batch.draft_budget"
        )


def whole(text: str) -> int | None:
    """Parse a whole number of at most 18 digits; None if the text is anything else."""
    return int(text) if text.isdecimal() and len(text) < 19 else None


class NoProposer:
    """Plain decoding."""

    needs = Needs()

    def __init__(self, setup: ProposerSetup) -> None:
        self._device = setup.device

    def admit(self, slot: int, request: Request) -> None:
        pass

    def propose(self, batch: Batch) -> Draft:
        return tree.empty(len(batch.seqs), self._device)

    def commit(self, round: Round) -> None:
        pass

    def release(self, slot: int) -> None:
        pass
