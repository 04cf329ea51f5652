"""Open draft heads, and check that they belong to the target."""

import logging

from outrider.core.config import FULL_BITS
from outrider.core.proposer import ProposerSetup
from outrider.core.target import WeightSharer
from outrider.core.types import SharedWeights
from outrider.drafting.propose.draft_model.quantized_draft import draft_bits, quantize_error
from outrider.drafting.propose.draft_model.window import MIN_WINDOW
from outrider.drafting.propose.placement import place_head
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.heads.files import read_context
from outrider.models.heads.formats.base import TargetInfo
from outrider.models.heads.store import HeadModule, read_head
from outrider.models.heads.targets.base import HeadTarget
from outrider.models.heads.targets.registry import is_autoregressive, make_head_target

_log = logging.getLogger("outrider")


def open_head(folder: str, setup: ProposerSetup) -> HeadTarget:
    """Make the target that runs a draft head.

    Raises:
        OutriderError: the target does not export hidden states, or the head belongs to another
            target.
    """
    if not isinstance(setup.target, WeightSharer):
        raise OutriderError(
            f"{folder} needs hidden states that this target does not export; use draft:DIR of a draft model"
        )
    weights = setup.target.share_weights()
    info = _info_of(weights, setup.target.layers)
    if setup.ranks > 1 and all(placement.draft != folder for placement in setup.placements):
        setup.placements.append(place_head(folder, setup.ranks, asked=setup.draft_placement))
    module = read_head(folder, dtype=setup.dtype, device=setup.device, target=info)
    description = module.description
    trained_on = (description.vocab, description.target_hidden, description.target_layers)
    if trained_on != (info.vocab, info.hidden, info.layers):
        raise OutriderError(
            f"{folder} was trained on a target with vocabulary {description.vocab}, width"
            f" {description.target_hidden} and {description.target_layers} layers; this target has"
            f" {info.vocab}, {info.hidden} and {info.layers}, so use the target that the head was"
            " trained on"
        )
    if setup.draft_candidates is not None:
        raise OutriderError(
            f"draft_candidates is {setup.draft_candidates}, and {folder} is a draft head, which shares the"
            " target's LM head; leave draft_candidates out"
        )
    bits = draft_bits(setup)
    window = _head_window(folder, module, setup)
    try:
        return make_head_target(
            module,
            weights,
            slots=setup.slots,
            context=setup.context,
            window=window,
            kernels=setup.kernels,
            bits=bits,
        )
    except UnsupportedModel as reason:
        if bits == FULL_BITS:
            raise
        raise quantize_error(folder, setup, reason) from reason


def _head_window(folder: str, module: HeadModule, setup: ProposerSetup) -> int | None:
    """Return how many tokens a draft head attends to; None: all tokens of a sequence.

    Raises:
        OutriderError: the setup asks for a window that this kind of head does not support.
    """
    asked = setup.draft_window
    if not is_autoregressive(module):
        if asked is None:
            return None
        raise OutriderError(
            f"draft_window is {asked}, and the head in {folder} supports none: only autoregressive"
            " heads of one module do; leave draft_window out"
        )
    if asked is not None and asked < MIN_WINDOW:
        raise OutriderError(f"draft_window is {asked}; use at least {MIN_WINDOW} tokens")
    size = read_context(folder) if asked is None else asked
    if size is None or size >= setup.context:
        return None
    _log.info("the head in %s attends to the last %d of at most %d tokens", folder, size, setup.context)
    return size


def target_info(setup: ProposerSetup) -> TargetInfo | None:
    """Return the facts of the target that a head must match; None if it does not export hidden states."""
    if not isinstance(setup.target, WeightSharer):
        return None
    try:
        return _info_of(setup.target.share_weights(), setup.target.layers)
    except OutriderError:
        return None


def _info_of(weights: SharedWeights, layers: int) -> TargetInfo:
    vocab, hidden = weights.head.shape
    return TargetInfo(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        head=lambda: weights.head,
        embedding=lambda: weights.embedding,
        layer_types=tuple(weights.kv_view.layer_config.get("layer_types") or ()) if weights.kv_view else (),
    )
