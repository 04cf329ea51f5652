"""EAGLE-3 and 3.1, as SafeAILab, SpecForge and SGLang write them down, and as speculators does.

The two number layers differently: the first by outputs, as we do, the second by inputs, so that its k is our k - 1.
And `norm_output` means two things: in SpecForge, that the final norm stands before the output layer; in speculators,
that the normed state goes round. Whoever copies it from one to the other has a draft that fades with depth.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.heads.config import Settings
from outrider.heads.description import AuxStates, Feedback, FuseNorm, FusionPoint, HeadDescription, InputFusion, Kind
from outrider.heads.formats.base import Config, Source, TargetInfo, Tensors, refuse, shared_lm_head
from outrider.heads.formats.llama import layer_tensors, read_body, take_layer, unlike, write_body
from outrider.heads.formats.speculators import speculators

_FIRST: Mapping[str, str] = MappingProxyType(  # of the first layer: what our module holds itself
    {"input_layernorm.weight": "embedding_norm.weight", "hidden_norm.weight": "state_norm.weight"}
)
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """What the two layouts say in different words."""

    first: str  # what the names of the first decoder layer begin with
    layers: tuple[int, ...] | None  # tapped, by outputs; None = as ever
    norm: FuseNorm
    residual_normed: bool
    recycle: Feedback = Feedback.RAW
    final_norm: bool = True


class Eagle3:
    """A flat config, and `midlayer`; ModelOpt says `layers.0` instead."""

    name, title, file = "eagle3", "EAGLE-3 (SafeAILab, SpecForge, SGLang)", "model.safetensors"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return "speculators_model_type" not in config and (
            "midlayer.self_attn.q_proj.weight" in names or {"fc.weight", "layers.0.hidden_norm.weight"} <= set(names)
        )

    def module(self, names: Collection[str]) -> str | None:
        return None

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        eagle = config.table("eagle_config")
        if not eagle.flag("use_aux_hidden_state", True):
            raise OutriderError(
                "its use_aux_hidden_state is false: it reads one state, which is not handled for EAGLE-3"
            )
        if "layer_ids" in eagle:
            raise OutriderError(f"its eagle_config has layer_ids, by an unknown count; name them {_IDS}, by outputs")
        final = config.flag("norm_output", True)
        if not final:
            source.ignore(["norm.weight"], "norm_output is false, and so there is no final norm")
        by_inputs = config.wholes(_IDS)  # beside eagle_config it is vLLM's, which counts by inputs
        choices = _Choices(
            first="midlayer." if "midlayer.self_attn.q_proj.weight" in source else "layers.0.",
            layers=eagle.wholes(_IDS) or (by_inputs and by_outputs(by_inputs)) or None,
            norm=_fuse_norm(source),
            residual_normed=config.flag("norm_before_residual", False),
            final_norm=final,
        )
        return _read(source, config, choices)

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it, body = description, description.body
        reasons = {
            **_unfit(it),
            "carries its normed state on (EAGLE-3.1): write eagle3-speculators": it.feedback is Feedback.NORMED,
            "norms all that it taps at once: write eagle3-speculators": it.aux_states.norm is FuseNorm.WHOLE,
            f"taps {len(it.aux_states.layers)} layers instead of 3: write eagle3-speculators": len(it.aux_states.layers)
            != 3,
            "has a normed residual: write eagle3-speculators": bool(
                it.input_fusion and it.input_fusion.residual_normed
            ),
            "has more than one decoder layer: write eagle3-speculators": bool(body and body.layers > 1),
        }
        refuse(self.name, reasons)
        assert body is not None
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **write_body(body, it.vocab, partner),
            "draft_vocab_size": it.output_vocab,
            "num_target_layers": it.target_layers,
            "fc_norm": it.aux_states.norm is FuseNorm.EACH,
            "eagle_config": {_IDS: list(it.aux_states.layers), "use_aux_hidden_state": True},
            _IDS: [
                layer + 1 for layer in it.aux_states.layers
            ],  # vLLM, which reads eagle_config as inputs, asks here first
        }
        if it.target_hidden != body.hidden:  # SafeAILab takes its presence for a draft with embeddings of its own
            config["target_hidden_size"] = it.target_hidden
        if not it.final_norm:  # left out where it is true, which vLLM would take for a state that goes round normed
            config["norm_output"] = False
        tensors = {**_tensors(it, weights, "midlayer."), **write_ids(it, weights)}
        tensors["lm_head.weight"] = (
            weights["head.weight"] if it.own_lm_head else shared_lm_head(partner, weights.get("ids"))
        )
        return config, tensors


class SpeculatorsEagle3:
    """A config around a config, and `layers.0`."""

    name, title, file = "eagle3-speculators", "EAGLE-3 (speculators, vLLM)", "model.safetensors"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return config.get("speculators_model_type") == "eagle3"

    def module(self, names: Collection[str]) -> str | None:
        return None

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        layer = config.table("transformer_layer_config")
        source.ignore(["verifier_lm_head.weight", "verifier_norm.weight"], "the target's own, for training")
        by_inputs = config.wholes(_IDS)
        choices = _Choices(
            first="layers.0.",
            layers=by_outputs(by_inputs) if by_inputs else None,
            norm=_fuse_norm(source),
            residual_normed=config.flag("norm_before_residual", False),
            recycle=Feedback.NORMED if config.flag("norm_output", False) else Feedback.RAW,
        )
        return _read(source, layer, choices)

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it, body = description, description.body
        refuse(self.name, {**_unfit(it), "has no final norm": not it.final_norm})
        assert body is not None
        assert it.input_fusion is not None
        config = {
            **speculators("eagle3", "Eagle3Speculator", partner),
            "transformer_layer_config": write_body(body, it.vocab, partner),
            "draft_vocab_size": it.output_vocab,
            "target_hidden_size": it.target_hidden,
            "num_target_layers": it.target_layers,
            "norm_before_residual": it.input_fusion.residual_normed,
            "norm_before_fc": it.aux_states.norm is FuseNorm.WHOLE,
            "fc_norm": it.aux_states.norm is FuseNorm.EACH,
            "norm_output": it.feedback is Feedback.NORMED,
            _IDS: [layer + 1 for layer in it.aux_states.layers],
        }
        tensors = _tensors(it, weights, "layers.0.")
        tensors["lm_head.weight"] = (
            weights["head.weight"] if it.own_lm_head else shared_lm_head(partner, weights.get("ids"))
        )
        return config, tensors | (write_ids(it, weights) if it.draft_vocab else {})


def _read(source: Source, layer: Settings, choices: _Choices) -> tuple[HeadDescription, Tensors]:
    body = read_body(layer, layer.size("num_hidden_layers", 1), lambda name: choices.first + name in source)
    hidden = source.config.size("target_hidden_size", body.hidden)
    tapped, weights = _fused(source, hidden, choices)
    weights |= take_layer(source, choices.first, "layers.0.", moved=_FIRST)
    for i in range(1, body.layers):
        weights |= take_layer(source, f"layers.{i}.", f"layers.{i}.")
    optional = {"head.weight": "lm_head.weight", "embedding.weight": "embed_tokens.weight"}
    weights |= {ours: source.take(theirs) for ours, theirs in optional.items() if theirs in source}
    if layer.flag("tie_word_embeddings", False) and "embedding.weight" in weights:
        weights.setdefault("head.weight", weights["embedding.weight"])
    if choices.final_norm:
        weights["norm.weight"] = source.take("norm.weight")
    vocab = layer.size("vocab_size")
    weights |= read_ids(source, vocab, weights.get("head.weight"))
    description = HeadDescription(
        kind=Kind.EAGLE3,
        target_hidden=hidden,
        target_layers=source.target_layers(_given_away(tapped)),
        vocab=vocab,
        draft_vocab=len(weights["ids"]) if "ids" in weights else 0,
        aux_states=AuxStates(layers=tapped, fused=True, norm=choices.norm),
        input_fusion=InputFusion(at=FusionPoint.ATTENTION, residual_normed=choices.residual_normed),
        body=body,
        feedback=choices.recycle,
        final_norm=choices.final_norm,
        own_lm_head="head.weight" in weights,
        own_embedding="embedding.weight" in weights,
    )
    return description, weights


def _fused(source: Source, hidden: int, choices: _Choices) -> tuple[tuple[int, ...], Tensors]:
    """The layers tapped, and what fuses them."""
    fuse = source.take("fc.weight")
    if fuse.dim() != 2 or fuse.shape[1] % hidden:
        raise OutriderError(f"fc.weight is {tuple(fuse.shape)}, which reads no whole number of states {hidden} wide")
    tapped = choices.layers or _usual(source, fuse.shape[1] // hidden)
    if len(tapped) * hidden != fuse.shape[1]:
        raise OutriderError(
            f"it taps {len(tapped)} layers {hidden} wide, and fc.weight reads {fuse.shape[1]}; {_IDS} or"
            " target_hidden_size is wrong"
        )
    weights = {"fuse.weight": fuse}
    for i in range(len(tapped)):
        if choices.norm is FuseNorm.EACH:
            weights[f"fuse_norm.{i}.weight"] = source.take(f"fc_norm.{i}.weight")
    if choices.norm is FuseNorm.WHOLE:
        weights["fuse_norm.0.weight"] = source.take("input_norm.weight")
    return tapped, weights


def _fuse_norm(source: Source) -> FuseNorm:
    """What the config says, and else what the tensors do."""
    each = source.config.flag("fc_norm", "fc_norm.0.weight" in source)
    whole = source.config.flag("norm_before_fc", "input_norm.weight" in source)
    if each and whole:
        raise OutriderError("config.json sets both fc_norm and norm_before_fc, which exclude each other; mend it")
    return FuseNorm.EACH if each else FuseNorm.WHOLE if whole else FuseNorm.NONE


def by_outputs(by_inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Layers by outputs, from a count by inputs."""
    if min(by_inputs) < 1:
        raise OutriderError(f"it taps the input of layer {min(by_inputs)}, which is no layer's output")
    return tuple(layer - 1 for layer in by_inputs)


def _usual(source: Source, count: int) -> tuple[int, ...]:
    """The layers that everybody taps where nothing is said."""
    if count != 3:
        raise OutriderError(f"fc.weight reads {count} states, and config.json does not say which; add {_IDS}")
    layers = source.target_layers()
    return 1, layers // 2 - 1, layers - 4


def _given_away(tapped: tuple[int, ...]) -> int:
    """How many layers a target has of which these are the usual ones; 0 if they are not."""
    layers = tapped[-1] + 4
    return layers if tapped == (1, layers // 2 - 1, layers - 4) else 0


def read_ids(source: Source, vocab: int, head: torch.Tensor | None) -> Tensors:
    """The target's ids of what is guessed, where that is not everything: d2t holds their distances from 0, 1, 2, ..."""
    guessed = vocab if head is None else len(head)
    said = source.config.size("draft_vocab_size", guessed)
    if said != guessed:
        raise OutriderError(f"draft_vocab_size is {said}, and the output layer tells {guessed} tokens apart")
    if "d2t" not in source:
        if guessed != vocab:
            raise OutriderError(f"it guesses {guessed} of {vocab} tokens, and d2t, which says which, is missing")
        source.ignore(["t2d"], "all tokens are guessed")
        return {}
    offsets = source.take("d2t").long()
    if offsets.shape != (guessed,):
        raise OutriderError(f"d2t is {tuple(offsets.shape)} where the output layer tells {guessed} tokens apart")
    ids = offsets + torch.arange(guessed)
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise OutriderError(f"d2t does not lead to rising ids below {vocab}; it holds offsets, not ids")
    if "t2d" in source:
        known = source.take("t2d").bool()
        if known.shape != (vocab,) or int(known.sum()) != guessed or not bool(known[ids].all()):
            raise OutriderError("t2d and d2t do not speak of the same tokens; copy the draft again")
    return {"ids": ids} if guessed < vocab else {}


def _unfit(it: HeadDescription) -> dict[str, bool]:
    """Why neither layout can hold a draft."""
    no = {f"is of kind {it.kind}": it.kind is not Kind.EAGLE3}
    if it.body is None or it.input_fusion is None:
        return no
    plain = (
        it.input_fusion.at is FusionPoint.ATTENTION
        and it.input_fusion.norms
        and it.input_fusion.embedding_first
        and not it.input_fusion.zero_first
    )
    return {
        **no,
        "is joined in another way than EAGLE-3's": not plain,
        "fuses with a bias, or not at all": it.aux_states.bias or not it.aux_states.fused,
        "taps the target behind its final norm": it.aux_states.final,
        **unlike(it.body),
    }


def _tensors(it: HeadDescription, weights: Tensors, first: str) -> Tensors:
    """All but the output layer and the vocabulary."""
    out = {"fc.weight": weights["fuse.weight"], **layer_tensors(weights, 0, first)}
    out |= {first + theirs: weights[ours] for theirs, ours in _FIRST.items()}
    assert it.body is not None
    for i in range(1, it.body.layers):
        out |= layer_tensors(weights, i, f"layers.{i}.")
    for name, value in weights.items():
        if norm := re.fullmatch(r"fuse_norm\.(\d+)\.weight", name):
            each = it.aux_states.norm is FuseNorm.EACH
            out[f"fc_norm.{norm[1]}.weight" if each else "input_norm.weight"] = value
    whole = {"norm.weight": "norm.weight", "embedding.weight": "embed_tokens.weight"}
    return out | {theirs: weights[ours] for ours, theirs in whole.items() if ours in weights}


def write_ids(it: HeadDescription, weights: Tensors) -> Tensors:
    """d2t [Vd] and t2d [V]."""
    ids = weights["ids"].cpu() if it.draft_vocab else torch.arange(it.vocab)
    known = torch.zeros(it.vocab, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}
