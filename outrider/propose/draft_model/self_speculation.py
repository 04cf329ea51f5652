"""Self-speculation: the target drafts with its first layers (Elhoushi et al. 2024), without some layers (Zhang et al.
2023), or with quantized weights (Tiwari et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.core.types import Batch, Draft, SequenceState
from outrider.errors import MODEL_ERRORS, OutriderError
from outrider.models.base import SelfDraftTarget, Target
from outrider.propose.base import ProposerSetup, whole
from outrider.propose.draft_model.chain import DraftModelProposer

_BITS = {"int8": 8, "int4": 4}
_LONG = 16  # after a longer feed there is no draft, because feeding it twice costs more than the draft saves


class ExitProposer(DraftModelProposer):
    """Drafts with the first layers of the target, over the target's KV cache.

    The target processes a feed right afterwards. So there is no draft after a long feed, such as the end of a prompt;
    in the next round the first layers have nothing left to feed.
    """

    def propose(self, batch: Batch) -> Draft:
        feeds = zip(batch.draft_budget, batch.feed, strict=True)
        return super().propose(replace(batch, draft_budget=tuple(b if len(feed) < _LONG else 0 for b, feed in feeds)))


def exit_proposer(argument: str, setup: ProposerSetup) -> DraftModelProposer:
    """`exit:N`: the first N layers, the final norm and the output layer."""
    target, count = _divisible(setup), exit_layers(argument)
    if count > target.layers:
        raise OutriderError(
            f"exit:{argument} names no layers to stop after; this target has {target.layers}: write for example"
            f" exit:{max(target.layers // 4, 1)}"
        )
    return ExitProposer(setup, _tried(target.make_submodel(range(count)), setup))


def exit_layers(argument: str) -> int:
    """Parse the number of layers of `exit:N`."""
    if not (count := whole(argument)):
        raise OutriderError(f"exit:{argument} names no layers to stop after; write for example exit:2")
    return count


def skip_proposer(argument: str, setup: ProposerSetup) -> DraftModelProposer:
    """`skip:A+B+C`: without the layers A, B and C, counted from 0."""
    target, skipped = _divisible(setup), skip_layers(argument)
    form = f"this target's layers are 0 to {target.layers - 1}: write for example skip:{target.layers // 2}"
    if max(skipped) >= target.layers:
        raise OutriderError(f"skip:{argument} names layer {max(skipped)}; {form}")
    if len(skipped) == target.layers:
        raise OutriderError(f"skip:{argument} leaves no layer to guess with; {form}")
    kept = [layer for layer in range(target.layers) if layer not in skipped]
    return DraftModelProposer(setup, _tried(target.make_submodel(kept), setup))


def skip_layers(argument: str) -> set[int]:
    """Parse the layers of `skip:A+B+C`."""
    named = [whole(word) for word in argument.split("+")]
    skipped = {layer for layer in named if layer is not None}
    if None in named:
        raise OutriderError(
            f"skip:{argument} names no layers to leave out; write for example skip:2, and join several by +"
        )
    if len(skipped) < len(named):
        raise OutriderError(f"skip:{argument} names a layer twice; name each once")
    return skipped


def quantised_proposer(argument: str, setup: ProposerSetup) -> DraftModelProposer:
    """`quantized:int4` or `quantized:int8`: a copy of the target with fewer bits."""
    return DraftModelProposer(setup, _divisible(setup).make_requantized(quantised_bits(argument)))


def quantised_bits(argument: str) -> int:
    """Of a weight."""
    if argument not in _BITS:
        raise OutriderError(f"quantized:{argument} is unknown; write {' or '.join(f'quantized:{n}' for n in _BITS)}")
    return _BITS[argument]


def _divisible(setup: ProposerSetup) -> SelfDraftTarget:
    if not isinstance(setup.target, SelfDraftTarget):
        raise OutriderError(
            "this target cannot draft for itself: its state is recurrent, or it has no layers; use draft:DIR or ngram"
        )
    return setup.target


@torch.inference_mode()
def _tried(model: Target, setup: ProposerSetup) -> Target:
    """Return the model after a test pass. In some architectures, layers depend on each other."""
    try:
        model.draft_greedy(
            Batch(seqs=(SequenceState.of((0, 0)),), start=(0,), feed=((0, 0),), draft_budget=(2,)), setup.vocab
        )
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as reason:
        raise OutriderError(
            f"this target's layers cannot run without each other ({reason}); use quantized:int4, draft:DIR or ngram"
        ) from reason
    return model
