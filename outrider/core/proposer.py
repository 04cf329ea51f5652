"""Define the `Proposer` protocol and the setup that a proposer is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import gt
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from outrider.core import tree
from outrider.core.config import ONCE
from outrider.core.params import AUTO
from outrider.core.types import Batch, Draft, Draw, Needs, Request, Round, SequenceState
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.core.placement import DraftPlacement
    from outrider.core.source import SourceRules
    from outrider.core.target import Target

_READ_BEFORE_FIRST_TOKEN = 64  # most tokens that a draft model reads before the first token of the target


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSetup:
    """The arguments that a proposer is made from."""

    target: Target  # the engine's target; a proposer may share its weights but must not run it
    vocab: int  # number of ids that the target has logits for
    slots: int  # number of sequences that run at once; slots are numbered from 0
    context: int  # most tokens of a sequence
    device: torch.device  # the device of drafts
    dtype: torch.dtype  # of the target
    draw: Draw  # how draft tokens should be chosen, so that the verifier accepts most of them
    tokenizer: Any  # the target's
    kernels: str = "auto"  # of draft models; see `make_target`
    source_rules: SourceRules | None = None  # what the target takes as source; None: a decoder-only model
    draft_window: int | None = None  # context window of a draft model, in tokens; None: its own maximum
    check: str = ONCE  # when the logits of a draft model are checked at load, as in `EngineConfig`
    draft_quantize: str | None = None  # int8 or int4 weights of a draft model or head; None: as stored
    kv_dtype: str = AUTO  # of the KV cache of a draft model on the native kernels, as in `EngineConfig`
    draft_candidates: int | None = None  # panels of a draft's LM head with exact logits; None: the default
    target_folder: str = ""  # folder or file of the target's checkpoint; "": unknown
    ranks: int = 1  # of tensor parallelism
    draft_placement: str = AUTO  # of draft models: auto, replicated or sharded
    placements: list[DraftPlacement] = field(default_factory=list)  # of the drafts that were opened, with several ranks


class Proposer(Protocol):
    """Drafts tokens that the target may generate next.

    Contract: the draft of a sequence depends only on what has been committed and scored, and on the sequence's noise.
    `Draft.kind` and `Draft.q` state exactly how each node was chosen. Sequence b gets at most `batch.draft_budget[b]`
    nodes. `propose` may prepare state that `commit` uses; the sequences do not change between the two calls.
    """

    needs: Needs

    def admit(self, slot: int, request: Request) -> None:
        """Begin a request in a slot."""

    def propose(self, batch: Batch) -> Draft:
        """Return a tree of draft tokens for each sequence. A sequence with a budget of 0 gets none.

        The committed tokens are in `batch.seqs[b].token_ids`.
        """

    def commit(self, round: Round) -> None:
        """Learn what was accepted. `round.emitted` is not yet part of the sequences' `token_ids`.

        `round.draft` is what was verified. It may have fewer nodes than were proposed, nodes of other proposers, and
        another order. A proposer finds its own nodes by their tokens in `round.emitted` (`TreeBuilder.path`).
        """

    def release(self, slot: int) -> None:
        """End the request in a slot."""


@runtime_checkable
class WeightFollower(Protocol):
    """A proposer that is told when the weights of the target change."""

    def target_updated(self, version: int) -> None:
        """Note that the target has new weights from now on. No sequence has a slot."""


def must_reproduce(seq: SequenceState, draw: Draw) -> bool:
    """Return whether a request has its own seed and an output that depends on the draft.

    The draft must then depend on nothing but the text: neither on other requests nor on what was learned from them.
    """
    params = seq.request.params
    return params.seed is not None and params.temperature > 0 and draw is Draw.SAMPLE


def delays_first_token(seq: SequenceState, unread: int) -> bool:
    """Return whether the first token of a sequence would be late if a draft model read `unread` tokens before it.

    The draft model then reads them after the first token. A few tokens take hardly any time, and a
    draft in the first round saves more.
    """
    return not seq.num_output_tokens and unread > _READ_BEFORE_FIRST_TOKEN


def check_budget(batch: Batch, draft: Draft) -> None:
    """Check that a draft is within the draft budget of the batch.

    Raises:
        OutriderError: the draft is for other sequences, or has too many nodes.
    """
    if len(draft.width) != len(batch.seqs) or any(map(gt, draft.width, batch.draft_budget)):
        raise OutriderError(
            f"the proposer made {draft.width} draft tokens, but the budget is {batch.draft_budget};"
            " return at most batch.draft_budget[b] draft tokens for sequence b"
        )


def parse_count(text: str) -> int | None:
    """Parse a whole number of at most 18 digits. Return None for any other text."""
    return int(text) if text.isdecimal() and len(text) < 19 else None


class NoProposer:
    """Drafts nothing, which is plain decoding."""

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
