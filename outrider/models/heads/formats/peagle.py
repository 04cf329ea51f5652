"""P-EAGLE in the format that AWS publishes for vLLM, and in that of speculators: EAGLE-3 with mask tokens.

The additions are `mask_hidden`, which replaces the target's states and passes through the same
norms and `fc`, and the id of a token whose embedding the mask tokens have. The first format has the
nested config of the second at its top level, as vLLM converts it.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from outrider.errors import OutriderError
from outrider.models.heads.description import Feedback, FuseNorm, HeadDescription, Kind, MaskTokens
from outrider.models.heads.formats.base import Source, TargetInfo, Tensors, Written, refuse
from outrider.models.heads.formats.eagle3 import Eagle3, SpeculatorsEagle3
from outrider.models.heads.formats.speculators import speculators

_DEFAULT_DRAFT_TOKENS = 8  # if the config has no number; P-EAGLE is trained with this many by default
_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in the order in which vLLM looks them up
_MASK_STATE = "mask_hidden"
_DRAFT_TOKENS_KEY = "num_lookahead_tokens"
_NESTED_KEY = "transformer_layer_config"
_FIRST_LAYER = "layers.0."
# Keys of the nested format that the flat one does not have, besides those that contain "speculators".
_NESTED_ONLY_KEYS = ("architectures", "norm_output", _NESTED_KEY)


class PEagle(Eagle3):
    """A flat config, for vLLM with `parallel_drafting`."""

    name = "peagle"
    title = "P-EAGLE (AWS, vLLM; SpecForge)"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return _MASK_STATE in names and super().fits(config, names)

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        description, weights = super().read(source)
        draft_tokens = source.config.size(_DRAFT_TOKENS_KEY, _DEFAULT_DRAFT_TOKENS)
        return _with_masks(source, description, weights, draft_tokens)

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        num_layers = len(description.aux_states.layers)
        reasons = {
            **_reasons(description),
            f"takes the states of {num_layers} layers instead of 3; use --to peagle-speculators": num_layers != 3,
        }
        refuse(self.name, reasons)
        assert description.masks is not None
        assert description.body is not None
        config, tensors = SpeculatorsEagle3().write(*_without_masks(description, weights), target)
        common = {
            name: value for name, value in config.items() if name not in _NESTED_ONLY_KEYS and "speculators" not in name
        }
        has_head_norms = description.body.head_norms
        config = {
            "architectures": ["PeagleQwen3ForCausalLM" if has_head_norms else "LlamaForCausalLMEagle3"],
            **config[_NESTED_KEY],
            **common,
            "parallel_drafting": True,
            "ptd_token_id": description.masks.token,
            _DRAFT_TOKENS_KEY: description.masks.draft_tokens,
        }
        renamed = {name.replace(_FIRST_LAYER, "midlayer."): value for name, value in tensors.items()}
        return config, renamed | _mask_state(weights)


class SpeculatorsPEagle(SpeculatorsEagle3):
    """A config with a nested config of the layers."""

    name = "peagle-speculators"
    title = "P-EAGLE (speculators, vLLM)"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return config.get("speculators_model_type") == "peagle"

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        methods = source.config.object("speculators_config").objects("proposal_methods")
        draft_tokens = _DEFAULT_DRAFT_TOKENS
        if methods:
            draft_tokens = methods[0].size("speculative_tokens", _DEFAULT_DRAFT_TOKENS)
        description, weights = super().read(source)
        return _with_masks(source, description, weights, draft_tokens)

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        norms_each = description.aux_states.norm is FuseNorm.EACH
        reasons = {
            **_reasons(description),
            "normalizes the state of each layer, which vLLM skips in this format; use --to peagle": norms_each,
        }
        refuse(self.name, reasons)
        assert description.masks is not None
        config, tensors = super().write(*_without_masks(description, weights), target)
        config |= speculators("peagle", "PEagleSpeculator", target, description.masks.draft_tokens)
        config["mask_token_id"] = description.masks.token
        return config, tensors | _mask_state(weights)


def _with_masks(
    source: Source, description: HeadDescription, weights: Tensors, draft_tokens: int
) -> tuple[HeadDescription, Tensors]:
    """Return an EAGLE-3 head with the mask tokens of its checkpoint."""
    token = next((source.config.integer(name) for name in _MASK_TOKEN_KEYS if name in source.config), None)
    if token is None:
        raise OutriderError(
            f"the config does not name the mask token; add one of {', '.join(_MASK_TOKEN_KEYS)} to config.json"
        )
    weights["mask"] = source.take(_MASK_STATE).flatten()
    masks = MaskTokens(draft_tokens=draft_tokens, token=token)
    return replace(description, kind=Kind.PEAGLE, masks=masks, feedback=Feedback.RAW), weights


def _without_masks(description: HeadDescription, weights: Tensors) -> tuple[HeadDescription, Tensors]:
    """Return the EAGLE-3 head without its mask tokens."""
    other_weights = {name: value for name, value in weights.items() if name != "mask"}
    return replace(description, kind=Kind.EAGLE3, masks=None), other_weights


def _mask_state(weights: Tensors) -> Tensors:
    return {_MASK_STATE: weights["mask"].view(1, 1, -1)}


def _reasons(description: HeadDescription) -> dict[str, bool]:
    """Return why neither format can represent a draft head."""
    width = description.width
    target_hidden = description.target_hidden
    return {
        f"is of kind {description.kind}": description.masks is None,
        f"has hidden size {width} for a target with {target_hidden}, which engines do not support with mask tokens": (
            target_hidden != width
        ),
    }
