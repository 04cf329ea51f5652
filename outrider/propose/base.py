"""What every proposer promises, and what it is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Draw, Needs, Request, Round
from outrider.errors import OutriderError
from outrider.models.base import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The house that a proposer will live in."""

    target: Target  # for proposers that share something with it; what the engine runs, so never to be fed
    vocab: int  # ids that the target has logits for
    slots: int  # rows at once, numbered from 0
    context: int  # tokens a row can hold
    device: torch.device  # where drafts belong
    dtype: torch.dtype  # of the target
    draw: Draw  # how the verifier would like guesses to be made
    tokenizer: Any  # the target's
    kernels: str = "auto"  # what the user wants models to run on; see `make_target`


class Proposer(Protocol):
    """Guesses what the target will say next.

    Law: what it proposes for a row is a function of what has been committed and scored (and of the row's noise) alone;
    every node's `law` is true; row b gets at most `batch.budget[b]` nodes. `propose` may prepare state that `commit`
    settles; between the two the rows do not change.
    """

    needs: Needs

    def admit(self, slot: int, request: Request) -> None:
        """Take a slot for a request."""

    def propose(self, batch: Batch) -> Draft:
        """A tree of guesses for each row, none where the budget is 0. Texts are in `batch.rows[b].text`."""

    def commit(self, round: Round) -> None:
        """Learn what was kept; `round.emitted` is not yet part of the rows' texts.

        `round.draft` is what was verified: perhaps fewer guesses than were proposed, perhaps with others' among them,
        in another order. What became of its own a proposer finds by their tokens in `round.emitted` (`Sketch.path`).
        """

    def release(self, slot: int) -> None:
        """Forget a slot."""


def check_budget(batch: Batch, draft: Draft) -> None:
    """Hold a proposer to what the rest of the round relies on.

    Raises:
        OutriderError: it guessed for other rows, or more than it may.
    """
    if len(draft.width) != len(batch.rows) or any(w > b for w, b in zip(draft.width, batch.budget, strict=True)):
        raise OutriderError(
            f"the proposer made {draft.width} guesses where {batch.budget} were allowed; keep to batch.budget"
        )


def whole(text: str) -> int | None:
    """A whole number in an expression; None where it is none, or has more digits than anything here could count."""
    return int(text) if text.isdecimal() and len(text) < 19 else None


class NoProposer:
    """Plain decoding."""

    needs = Needs()

    def __init__(self, setup: Setup) -> None:
        self._device = setup.device

    def admit(self, slot: int, request: Request) -> None:
        pass

    def propose(self, batch: Batch) -> Draft:
        return tree.empty(len(batch.rows), self._device)

    def commit(self, round: Round) -> None:
        pass

    def release(self, slot: int) -> None:
        pass
