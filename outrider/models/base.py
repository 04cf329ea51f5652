"""The `Target` protocol, its optional extensions, and what all implementations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from outrider.cache.base import Cache
from outrider.core import tree
from outrider.core.types import Batch, Dice, Draft, Grown, Scores, Tables, Trust
from outrider.models.draft_chains import Watch


class Target(Protocol):
    """Scores a batch in one pass.

    Law: a node's logits depend on the committed text and the node's ancestors only. `score` changes nothing but what
    the cache has staged; `swap` replaces weights, and what is cached under the old ones is then stale.
    """

    vocab: int
    slots: int  # rows at once
    context: int  # tokens a slot can hold, the guesses included
    device: torch.device
    kernels: str  # what runs the pass, for reports

    @property
    def cache(self) -> Cache:
        """What the engine admits to, commits to and releases."""

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        """Score the feed's end and every node; with `first` >= 0 nodes from `first` on alone (see `Cache.stage`)."""

    def grow(self, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
        """Feed, and let each row go on greedily by itself: a draft model's chain where nothing is left to chance.

        Guesses are ids below `vocab`. Every row has a budget of at least 1; all guesses but the last one are staged.
        With `trust` a row may stop earlier, where asking does not hold up the device.
        """

    def export(self, layers: Sequence[int]) -> None:
        """From now on put the outputs of these decoder layers, counted from 0, into `Scores.features` and `Scores.fed`.

        These and no others, whatever was asked for before: who has several drafts at work asks for all of their layers
        at once. While there are any the cache shares no texts: every token is fed.

        Raises:
            OutriderError: the target has no such layer, or cannot export any.
        """

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new values for some or all weights, by the names that the model's own `state_dict` gives them."""

    def bytes(self) -> int:
        """Memory of the weights, in bytes."""


@runtime_checkable
class Drawer(Protocol):
    """A target that can draw the guesses of a chain as it grows, where their laws are softmaxes and nothing more."""

    def draw(self, batch: Batch, vocab: int, dice: Dice, trust: Trust | None = None) -> Grown:
        """`Target.grow`, with guesses as the `dice` fall."""


@runtime_checkable
class Divisible(Protocol):
    """A target that can draft for itself: with some of its layers, or with its weights in fewer bits.

    Law: what an excerpt or a copy does changes nothing that the target says; both follow when weights are swapped.
    """

    layers: int  # counted from 0

    def excerpt(self, layers: Sequence[int]) -> Target:
        """These layers alone, in rising order, between the target's own embedding and head.

        No weight is copied. Where they are the first ones the cache is the target's as well (see `BorrowedCache`), so
        that an excerpt of all layers says what the target says; any others have a cache of their own.
        """

    def requantised(self, bits: int) -> Target:
        """A copy with linear layers of 8 or 4 bits, and a cache of its own.

        Raises:
            OutriderError: it would be no smaller than the target, or the machine has no kernels for it.
        """

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        """Bytes of weights that a pass reads: in each layer, and in the head."""


@runtime_checkable
class Lender(Protocol):
    """A target on whose states drafts can be trained."""

    layers: int  # counted from 0

    def lend(self) -> Tables:
        """Its embeddings, final norm and output layer.

        Raises:
            OutriderError: they are not a table, an RMS norm and a linear layer without bias.
        """


def grow_by_scores(target: Target, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
    """`Target.grow`, one pass of `score` after another."""
    draft = tree.empty(len(batch.rows), target.device)
    watch = Watch(batch.budget, trust if tree.near(target.device) else None)
    while watch.depth < max(watch.count):
        scores = target.score(batch, draft, first=watch.depth - 1)
        logits = scores.logits[:, -1, :vocab]
        tokens = torch.cat([draft.tokens, logits.argmax(-1, keepdim=True)], 1)
        watch.look(logits, tokens[:, -1], None if scores.sure is None else scores.sure[:, -1])
        draft = tree.chain(tokens, tuple(min(most, watch.depth) for most in watch.count))
    return Grown(tokens=draft.tokens, count=tuple(watch.count), margin=watch.margins, chance=watch.chances)
