"""Let the target draft for itself.

It drafts with its first layers (Elhoushi et al. 2024), without some of its layers (Zhang et al.
2023), or with quantized weights (Tiwari et al. 2025).
"""

import torch

from outrider.core import devices
from outrider.core.config import QUANTIZE_BITS
from outrider.core.proposer import ProposerSetup, parse_count
from outrider.core.target import SelfDraftTarget, Target
from outrider.core.types import Batch, Draft, DraftBudget, SequenceState
from outrider.drafting.propose.draft_model.calibrated_copy import calibrated_copy
from outrider.drafting.propose.draft_model.cascade import cascade
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.vocabulary.candidates import rank_copy_tokens
from outrider.errors import MODEL_ERRORS, NotEnoughMemory, OutriderError
from outrider.models.cache.memory import out_of_memory
from outrider.models.cache.shared import SharedCache

_MAX_FEED = 16  # no draft for feeds of this many tokens: feeding them twice costs more than the draft saves


class SharedCacheProposer(DraftModelProposer):
    """Drafts with layers of the target, over the target's KV cache.

    The target runs the same feed again right afterward. So there is no draft after a long feed,
    such as the end of a prompt. In the next round the KV cache holds that feed already.
    """

    def propose(self, batch: Batch) -> Draft:
        pairs = zip(batch.draft_budget, batch.feed, strict=True)
        budgets = tuple(budget if len(feed) < _MAX_FEED else 0 for budget, feed in pairs)
        return super().propose(batch.limited(budgets))


def exit_proposer(argument: str, setup: ProposerSetup) -> DraftModelProposer:
    """Make `exit:N`, which drafts with the first N layers, the final norm and the LM head."""
    target = _self_draft_target(setup)
    count = exit_layers(argument)
    if count > target.layers:
        raise OutriderError(
            f"exit:{argument} asks for more layers than the {target.layers} of this target; write"
            f" for example exit:{max(target.layers // 4, 1)}"
        )
    return SharedCacheProposer(setup, _test_pass(target.make_submodel(range(count)), setup))


def exit_layers(argument: str) -> int:
    """Parse the number of layers of `exit:N`."""
    count = parse_count(argument)
    if not count:
        raise OutriderError(f"exit:{argument} is not a number of layers; write for example exit:2")
    return count


def skip_proposer(argument: str, setup: ProposerSetup) -> DraftModelProposer:
    """Make `skip:A+B+C`, which drafts without the layers A, B and C, counted from 0."""
    target = _self_draft_target(setup)
    skipped = skip_layers(argument)
    fix = f"this target's layers are 0 to {target.layers - 1}: write for example skip:{target.layers // 2}"
    if max(skipped) >= target.layers:
        raise OutriderError(f"skip:{argument} names layer {max(skipped)}; {fix}")
    if len(skipped) == target.layers:
        raise OutriderError(f"skip:{argument} leaves no layer to draft with; {fix}")
    remaining = [layer for layer in range(target.layers) if layer not in skipped]
    return DraftModelProposer(setup, _test_pass(target.make_submodel(remaining), setup))


def skip_layers(argument: str) -> set[int]:
    """Parse the layers of `skip:A+B+C`."""
    named = list(map(parse_count, argument.split("+")))
    skipped = {layer for layer in named if layer is not None}
    if None in named:
        raise OutriderError(f"skip:{argument} is not a list of layers; write for example skip:2, and join several by +")
    if len(skipped) < len(named):
        raise OutriderError(f"skip:{argument} names a layer twice; name each layer once")
    return skipped


def quantized_proposer(argument: str, setup: ProposerSetup) -> DraftModelProposer:
    """Make `quantized:int4` or `quantized:int8`, which drafts with a copy of the target with fewer bits."""
    copy = calibrated_copy(_self_draft_target(setup), quantized_bits(argument), setup)
    rank_copy_tokens(copy, setup)
    proposer = SharedCacheProposer if isinstance(copy.cache, SharedCache) else DraftModelProposer
    return proposer(setup, cascade(copy) if devices.is_cpu(setup.device) else copy)


def quantized_bits(argument: str) -> int:
    """Parse the bits per weight of `quantized:int4` or `quantized:int8`."""
    if argument not in QUANTIZE_BITS:
        known = " or ".join(f"quantized:{name}" for name in QUANTIZE_BITS)
        raise OutriderError(f"quantized:{argument} is unknown; write {known}")
    return QUANTIZE_BITS[argument]


def _self_draft_target(setup: ProposerSetup) -> SelfDraftTarget:
    if not isinstance(setup.target, SelfDraftTarget):
        raise OutriderError(
            "this target cannot draft for itself: its state is recurrent, or it has no layers; use draft:DIR or ngram"
        )
    return setup.target


@torch.inference_mode()
def _test_pass(model: Target, setup: ProposerSetup) -> Target:
    """Return the model after a test pass, which fails if layers depend on layers that were left out."""
    batch = Batch(seqs=(SequenceState.of((0, 0)),), start=(0,), feed=((0, 0),), budget=DraftBudget((2,)))
    try:
        model.draft_greedy(batch, setup.vocab)
    except NotEnoughMemory:
        raise
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, slots=setup.slots, context=setup.context) from error
    except MODEL_ERRORS as reason:
        raise OutriderError(
            f"this target's layers cannot run without each other ({reason}); use quantized:int4, draft:DIR or ngram"
        ) from reason
    return model
