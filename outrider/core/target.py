"""The `Target` protocol, its optional extensions, and greedy drafting by repeated scoring."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from outrider.core import devices, tree
from outrider.core.cache import Cache
from outrider.core.draft_chains import ChainBuilder
from outrider.core.draws import Draws
from outrider.core.types import Batch, Draft, DraftChains, Scores, SharedWeights, StopRule


class Target(Protocol):
    """A model with its KV cache. Scores a batch in one forward pass.

    Contract: the logits of a node depend only on the committed tokens and the node's ancestors. `score` changes only
    what the cache has staged. After `update_weights` everything in the cache is stale.
    """

    vocab: int
    slots: int  # sequences at once
    context: int  # tokens that a slot can hold, draft tokens included
    device: torch.device
    kernels: str  # the backend, for reports

    @property
    def cache(self) -> Cache:
        """The KV cache. The engine admits, commits and releases its slots."""

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        """Score the last token of the feed and every node. With `first` >= 0, only the nodes from `first` on."""

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        """Run the feed and draft a greedy chain for each sequence.

        Draft tokens are ids below `vocab`. Every sequence has a budget of at least 1. All draft tokens but the last are
        staged in the cache. `stop_rule` may stop a sequence earlier, if checking it does not stall the device.
        """

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        """Export the outputs of these decoder layers, counted from 0.

        They are in `Scores.hidden_states` and `Scores.feed_hidden_states` of later passes.

        A call replaces the layers of the call before. Prefix caching is off while layers are exported, unless the
        target keeps the hidden states of cached tokens (see `HiddenStateCache`).

        Raises:
            OutriderError: the target has no such layer, or cannot export layers.
        """

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new values for some or all weights, by their names in the model's `state_dict`."""

    def bytes(self) -> int:
        """Return the bytes of the weights."""


@runtime_checkable
class ChainSampler(Protocol):
    """A target that can sample the tokens of a chain."""

    def draft_sampled(self, batch: Batch, vocab: int, draws: Draws, stop_rule: StopRule | None = None) -> DraftChains:
        """Do what `Target.draft_greedy` does, with tokens sampled by `draws`."""


@runtime_checkable
class CompiledTarget(Protocol):
    """A target on compiled kernels. Its results do not depend, in any bit, on the other sequences of the batch."""

    @property
    def compile_seconds(self) -> float:
        """Time to compile the kernels; 0 if an earlier run has compiled them."""


@runtime_checkable
class SelfDraftTarget(Protocol):
    """A target that can draft for itself, with some of its layers or with quantized weights.

    Contract: a submodel or a copy does not change the target's output. Both follow `update_weights`.
    """

    layers: int  # number of decoder layers

    def make_submodel(self, layers: Sequence[int]) -> Target:
        """Make a target of these layers, in rising order, with the target's own embedding and LM head.

        No weight is copied. The first layers also share the target's KV cache (see `SharedCache`).
        Any other choice has its own cache.
        """

    def make_requantized(self, bits: int) -> Target:
        """Make a copy with linear layers of 8 or 4 bits.

        It shares the target's KV cache (see `SharedCache`), or has its own if its keys and values have another dtype.

        Raises:
            OutriderError: the copy would not be smaller, or the machine has no kernels for it.
        """

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        """Return the bytes of weights that a pass over one token reads: in each layer, and in the LM head.

        Targets on torch count all experts of a layer, the native kernels those of one token.
        """


@runtime_checkable
class ExpertCounter(Protocol):
    """A target that counts the routed experts of a pass. Targets without experts may have these methods as well."""

    def touched_experts(self) -> float | None:
        """Return the distinct experts that the last `score` used, the mean over layers with experts.

        None: the model has no experts, or they are not counted on this device.
        """

    def chosen_experts(self) -> list[torch.Tensor]:
        """Return the experts [T, K] of the T tokens of the last `score`, for each layer with experts.

        The tokens of a sequence are its feed, followed by its draft tokens. []: the model has no
        experts, or they are not counted on this device.
        """

    def expert_bytes(self) -> int:
        """Return the bytes of the weights of all experts. 0: the model has none."""


@runtime_checkable
class WeightSharer(Protocol):
    """A target on whose hidden states draft heads can be trained."""

    layers: int  # number of decoder layers

    def share_weights(self) -> SharedWeights:
        """Return the embedding, final norm and LM head.

        Raises:
            OutriderError: they are not a table, an RMS norm and a linear layer without bias.
        """


@runtime_checkable
class SleepingTarget(Protocol):
    """A target that can free its memory for some time, and whose weights can be compared."""

    def sleep(self, *, weights: bool) -> None:
        """Free the KV cache, which no sequence uses, and with `weights` also the memory of the weights.

        Raises:
            OutriderError: the memory cannot be freed.
        """

    def wake(self) -> None:
        """Allocate the KV cache again. Freed weights must be loaded with `update_weights`, all of them."""

    def weight_names(self) -> frozenset[str]:
        """Return the names of all weights, as `update_weights` takes them."""

    def stored_weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights as they are stored, by name. Two targets of one backend and dtype can be compared."""


@runtime_checkable
class HiddenStateCache(Protocol):
    """A target that keeps the hidden states it exports, so that they can be shared with a prefix.

    Other targets turn prefix caching off while they export hidden states.
    """

    def cached_hidden_states(self, slot: int, layers: Sequence[int], end: int) -> torch.Tensor:
        """Return the exported outputs [end, layers, H] of the first `end` tokens that are cached in a slot."""


def expand_logits(logits: torch.Tensor, ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return logits [*, V] of all tokens for logits [*, Vd] of the tokens `ids` [Vd]. Other tokens get -inf."""
    out = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    out[..., ids] = logits
    return out


def draft_by_scores(target: Target, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
    """Implement `Target.draft_greedy` by repeated calls of `score`."""
    draft = tree.empty(len(batch.seqs), target.device)
    builder = ChainBuilder(batch.draft_budget, stop_rule if devices.is_cpu(target.device) else None)
    while builder.depth < max(builder.count):
        scores = target.score(batch, draft, first=builder.depth - 1)
        logits = scores.logits[:, -1, :vocab]
        tokens = torch.cat([draft.tokens, logits.argmax(-1, keepdim=True)], 1)
        builder.process(logits, tokens[:, -1], None if scores.confidence is None else scores.confidence[:, -1])
        draft = tree.chain(tokens, tuple(min(count, builder.depth) for count in builder.count))
    return DraftChains(
        tokens=draft.tokens, count=tuple(builder.count), margin=builder.margins, accept_prob=builder.accept_probs
    )
