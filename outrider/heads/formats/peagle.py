"""P-EAGLE, as AWS publishes it for vLLM, and as speculators writes it down: EAGLE-3, and what its masks need.

Those are `mask_hidden`, which stands in for the target's states and goes through the same norms and `fc`, and a token
whose embedding masks have. vLLM makes the one config from the other: it lays the inner one open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from outrider.errors import OutriderError
from outrider.heads.description import Feedback, FuseNorm, HeadDescription, Kind, MaskTokens
from outrider.heads.formats.base import Config, Source, TargetInfo, Tensors, refuse
from outrider.heads.formats.eagle3 import Eagle3, SpeculatorsEagle3
from outrider.heads.formats.speculators import speculators

_GUESSES = 8  # where nobody says how many: so many are trained where nobody says otherwise
_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # which token it is, in the order in which vLLM looks
_STATE, _LOOKAHEAD = "mask_hidden", "num_lookahead_tokens"
_NESTED, _FIRST = "transformer_layer_config", "layers.0."
_ELSEWHERE = ("architectures", "norm_output", _NESTED)  # of speculators' config, besides what says that it is one


class PEagle(Eagle3):
    """A flat config, as vLLM takes it with `parallel_drafting`."""

    name, title = "peagle", "P-EAGLE (AWS, vLLM; SpecForge)"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return _STATE in names and super().fits(config, names)

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        return _masked(source, super().read(source), source.config.size(_LOOKAHEAD, _GUESSES))

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it = description
        few = len(it.aux_states.layers) != 3
        refuse(
            self.name,
            {**_unfit(it), f"taps {len(it.aux_states.layers)} layers instead of 3: write peagle-speculators": few},
        )
        assert it.masks is not None
        assert it.body is not None
        config, tensors = SpeculatorsEagle3().write(*_plain(it, weights), partner)
        config = {
            "architectures": ["PeagleQwen3ForCausalLM" if it.body.head_norms else "LlamaForCausalLMEagle3"],
            **config[_NESTED],
            **{name: value for name, value in config.items() if name not in _ELSEWHERE and "speculators" not in name},
            "parallel_drafting": True,
            "ptd_token_id": it.masks.token,
            _LOOKAHEAD: it.masks.draft_tokens,
        }
        first = {name: name.replace(_FIRST, "midlayer.") for name in tensors}
        return config, {first[name]: value for name, value in tensors.items()} | _state(weights)


class SpeculatorsPEagle(SpeculatorsEagle3):
    """A config around a config."""

    name, title = "peagle-speculators", "P-EAGLE (speculators, vLLM)"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return config.get("speculators_model_type") == "peagle"

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        methods = source.config.table("speculators_config").tables("proposal_methods")
        guesses = methods[0].size("speculative_tokens", _GUESSES) if methods else _GUESSES
        return _masked(source, super().read(source), guesses)

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it = description
        each = it.aux_states.norm is FuseNorm.EACH
        refuse(self.name, {**_unfit(it), "norms each tap, which vLLM leaves out here: write peagle": each})
        assert it.masks is not None
        config, tensors = super().write(*_plain(it, weights), partner)
        mine = {
            **speculators("peagle", "PEagleSpeculator", partner, it.masks.draft_tokens),
            "mask_token_id": it.masks.token,
        }
        return config | mine, tensors | _state(weights)


def _masked(source: Source, found: tuple[HeadDescription, Tensors], guesses: int) -> tuple[HeadDescription, Tensors]:
    """A draft of EAGLE-3 with the masks that its checkpoint holds."""
    description, weights = found
    token = next((source.config.whole(name) for name in _TOKENS if name in source.config), None)
    if token is None:
        raise OutriderError(
            f"it does not say which token its masks are; add one of {', '.join(_TOKENS)} to config.json"
        )
    weights["mask"] = source.take(_STATE).flatten()
    masks = MaskTokens(draft_tokens=guesses, token=token)
    return replace(description, kind=Kind.PEAGLE, masks=masks, feedback=Feedback.RAW), weights


def _plain(it: HeadDescription, weights: Tensors) -> tuple[HeadDescription, Tensors]:
    """The same without masks."""
    rest = {name: value for name, value in weights.items() if name != "mask"}
    return replace(it, kind=Kind.EAGLE3, masks=None), rest


def _state(weights: Tensors) -> Tensors:
    return {_STATE: weights["mask"].view(1, 1, -1)}


def _unfit(it: HeadDescription) -> dict[str, bool]:
    wide = it.target_hidden != it.width
    return {
        f"is of kind {it.kind}": it.masks is None,
        f"is {it.width} wide beside a target of {it.target_hidden}, which engines do not expect of masks": wide,
    }
