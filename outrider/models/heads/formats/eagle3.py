"""EAGLE-3 and 3.1 in the format of SafeAILab, SpecForge and SGLang, and in that of speculators.

The formats count layers differently. The first numbers a layer by its output, as Outrider does. The second numbers it
by its input, so its layer k is layer k - 1 here. `norm_output` also has two meanings. In SpecForge it says that there
is a final norm before the LM head. In speculators it says that the normed state is fed back. A head whose config is
copied from one format to the other drafts worse with each draft token.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import (
    AuxStates,
    Feedback,
    FuseNorm,
    FusionPoint,
    HeadDescription,
    InputFusion,
    Kind,
)
from outrider.models.heads.formats.base import (
    Format,
    Source,
    TargetInfo,
    Tensors,
    Written,
    refuse,
    shared_lm_head,
    stored,
)
from outrider.models.heads.formats.llama import layer_tensors, read_body, take_layer, unlike, write_body
from outrider.models.heads.formats.speculators import speculators

# Norms that the formats store in the first layer, and their names in the module, which stores them outside.
_FIRST_LAYER_NORMS: Mapping[str, str] = MappingProxyType(
    {"input_layernorm.weight": "embedding_norm.weight", "hidden_norm.weight": "state_norm.weight"}
)
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """The values that the two formats express differently."""

    first: str  # prefix of the first decoder layer's tensors
    layers: tuple[int, ...] | None  # target layers by outputs; None: the usual ones
    norm: FuseNorm
    residual_normed: bool
    feedback: Feedback = Feedback.RAW
    final_norm: bool = True


class Eagle3(Format):
    """A flat config. The first layer is `midlayer`, or `layers.0` in checkpoints of ModelOpt."""

    name = "eagle3"
    title = "EAGLE-3 (SafeAILab, SpecForge, SGLang)"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return "speculators_model_type" not in config and (
            "midlayer.self_attn.q_proj.weight" in names or {"fc.weight", "layers.0.hidden_norm.weight"} <= set(names)
        )

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        eagle = config.object("eagle_config")
        if not eagle.boolean("use_aux_hidden_state", True):
            raise OutriderError(
                "use_aux_hidden_state is false, which is not supported for EAGLE-3; use a draft"
                " head that takes the states of several layers"
            )
        if "layer_ids" in eagle:
            raise OutriderError(
                "eagle_config has layer_ids, which may count inputs or outputs; rename them to"
                f" {_IDS}, counted by outputs"
            )
        final_norm = config.boolean("norm_output", True)
        if not final_norm:
            source.ignore(["norm.weight"], "norm_output is false, so there is no final norm")
        # Outside eagle_config the ids are for vLLM, which counts by inputs.
        by_inputs = config.integers(_IDS)
        choices = _Choices(
            first="midlayer." if "midlayer.self_attn.q_proj.weight" in source else "layers.0.",
            layers=eagle.integers(_IDS) or (by_inputs and to_output_layers(by_inputs)) or None,
            norm=_fuse_norm(source),
            residual_normed=config.boolean("norm_before_residual", False),
            final_norm=final_norm,
        )
        return _read(source, config, choices)

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        body = description.body
        fusion = description.input_fusion
        aux = description.aux_states
        advice = "; use --to eagle3-speculators"
        reasons = {
            **_reasons(description),
            f"feeds back the normed state (EAGLE-3.1){advice}": description.feedback is Feedback.NORMED,
            f"normalizes the concatenated states before fusion{advice}": aux.norm is FuseNorm.WHOLE,
            f"takes the states of {len(aux.layers)} layers instead of 3{advice}": len(aux.layers) != 3,
            f"has a normed residual{advice}": bool(fusion and fusion.residual_normed),
            f"has more than one decoder layer{advice}": bool(body and body.layers > 1),
        }
        refuse(self.name, reasons)
        assert body is not None
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **write_body(body, description.vocab, target),
            "draft_vocab_size": description.output_vocab,
            "num_target_layers": description.target_layers,
            "fc_norm": aux.norm is FuseNorm.EACH,
            "eagle_config": {_IDS: list(aux.layers), "use_aux_hidden_state": True},
            # vLLM looks here first. It counts by inputs, also in eagle_config.
            _IDS: [layer + 1 for layer in aux.layers],
        }
        # SafeAILab loads a separate embedding if this key exists.
        if description.target_hidden != body.hidden:
            config["target_hidden_size"] = description.target_hidden
        # Omit the key if it is true: vLLM takes that for a normed state that is fed back.
        if not description.final_norm:
            config["norm_output"] = False
        tensors = {**_tensors(description, weights, "midlayer."), **write_ids(description, weights)}
        tensors["lm_head.weight"] = _lm_head(description, weights, target)
        return config, tensors


class SpeculatorsEagle3(Format):
    """A config with a nested config of the layers. The first layer is named `layers.0`."""

    name = "eagle3-speculators"
    title = "EAGLE-3 (speculators, vLLM)"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return config.get("speculators_model_type") == "eagle3"

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        layer = config.object("transformer_layer_config")
        source.ignore(["verifier_lm_head.weight", "verifier_norm.weight"], "weights of the target, for training only")
        by_inputs = config.integers(_IDS)
        choices = _Choices(
            first="layers.0.",
            layers=to_output_layers(by_inputs) if by_inputs else None,
            norm=_fuse_norm(source),
            residual_normed=config.boolean("norm_before_residual", False),
            feedback=Feedback.NORMED if config.boolean("norm_output", False) else Feedback.RAW,
        )
        return _read(source, layer, choices)

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        body = description.body
        refuse(self.name, {**_reasons(description), "has no final norm": not description.final_norm})
        assert body is not None
        assert description.input_fusion is not None
        config = {
            **speculators("eagle3", "Eagle3Speculator", target),
            "transformer_layer_config": write_body(body, description.vocab, target),
            "draft_vocab_size": description.output_vocab,
            "target_hidden_size": description.target_hidden,
            "num_target_layers": description.target_layers,
            "norm_before_residual": description.input_fusion.residual_normed,
            "norm_before_fc": description.aux_states.norm is FuseNorm.WHOLE,
            "fc_norm": description.aux_states.norm is FuseNorm.EACH,
            "norm_output": description.feedback is Feedback.NORMED,
            _IDS: [layer + 1 for layer in description.aux_states.layers],
        }
        tensors = _tensors(description, weights, "layers.0.")
        tensors["lm_head.weight"] = _lm_head(description, weights, target)
        return config, tensors | (write_ids(description, weights) if description.draft_vocab else {})


def _read(source: Source, layer: ConfigReader, choices: _Choices) -> tuple[HeadDescription, Tensors]:
    """Return the draft head of a checkpoint. `layer` is the config of its decoder layers."""
    body = read_body(layer, layer.size("num_hidden_layers", 1), lambda name: choices.first + name in source)
    hidden = source.config.size("target_hidden_size", body.hidden)
    aux_layers, weights = _take_fusion(source, hidden, choices)
    weights |= take_layer(source, choices.first, "layers.0.", moved=_FIRST_LAYER_NORMS)
    for i in range(1, body.layers):
        weights |= take_layer(source, f"layers.{i}.", f"layers.{i}.")
    optional = {"head.weight": "lm_head.weight", "embedding.weight": "embed_tokens.weight"}
    weights |= source.take_all(optional, optional=True)
    if layer.boolean("tie_word_embeddings", False) and "embedding.weight" in weights:
        weights.setdefault("head.weight", weights["embedding.weight"])
    if choices.final_norm:
        weights["norm.weight"] = source.take("norm.weight")
    vocab = layer.size("vocab_size")
    weights |= read_ids(source, vocab, weights.get("head.weight"))
    description = HeadDescription(
        kind=Kind.EAGLE3,
        target_hidden=hidden,
        target_layers=source.target_layers(_layers_from_usual(aux_layers)),
        vocab=vocab,
        draft_vocab=len(weights["ids"]) if "ids" in weights else 0,
        aux_states=AuxStates(layers=aux_layers, fused=True, norm=choices.norm),
        input_fusion=InputFusion(at=FusionPoint.ATTENTION, residual_normed=choices.residual_normed),
        body=body,
        feedback=choices.feedback,
        final_norm=choices.final_norm,
        own_lm_head="head.weight" in weights,
        own_embedding="embedding.weight" in weights,
    )
    return description, weights


def _take_fusion(source: Source, hidden: int, choices: _Choices) -> tuple[tuple[int, ...], Tensors]:
    """Return the target layers whose states are taken, and the weights of the fusion."""
    fuse = source.take("fc.weight")
    if fuse.dim() != 2 or fuse.shape[1] % hidden:
        raise OutriderError(
            f"fc.weight has shape {tuple(fuse.shape)}, but its inputs must be states of size"
            f" {hidden}; correct target_hidden_size"
        )
    aux_layers = choices.layers or _usual_layers(source, fuse.shape[1] // hidden)
    if len(aux_layers) * hidden != fuse.shape[1]:
        raise OutriderError(
            f"the states of {len(aux_layers)} layers with size {hidden} do not fit fc.weight with"
            f" {fuse.shape[1]} inputs; correct {_IDS} or target_hidden_size"
        )
    weights = {"fuse.weight": fuse}
    if choices.norm is FuseNorm.EACH:
        for i in range(len(aux_layers)):
            weights[f"fuse_norm.{i}.weight"] = source.take(f"fc_norm.{i}.weight")
    if choices.norm is FuseNorm.WHOLE:
        weights["fuse_norm.0.weight"] = source.take("input_norm.weight")
    return aux_layers, weights


def _fuse_norm(source: Source) -> FuseNorm:
    """Return the norm before the fusion. If the config does not set it, the tensors decide."""
    each = source.config.boolean("fc_norm", "fc_norm.0.weight" in source)
    whole = source.config.boolean("norm_before_fc", "input_norm.weight" in source)
    if each and whole:
        raise OutriderError("config.json sets both fc_norm and norm_before_fc, which exclude each other; remove one")
    if each:
        return FuseNorm.EACH
    return FuseNorm.WHOLE if whole else FuseNorm.NONE


def to_output_layers(by_inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Convert layer numbers that count inputs to numbers that count outputs."""
    if min(by_inputs) < 1:
        raise OutriderError(
            f"it takes the input of layer {min(by_inputs)}, which is not the output of a layer; use"
            " a draft head that takes outputs of layers"
        )
    return tuple(layer - 1 for layer in by_inputs)


def _usual_layers(source: Source, count: int) -> tuple[int, ...]:
    """Return the layers whose states are taken if the config does not name them."""
    if count != 3:
        raise OutriderError(f"fc.weight takes {count} states, but config.json does not name their layers; add {_IDS}")
    layers = source.target_layers()
    return 1, layers // 2 - 1, layers - 4


def _layers_from_usual(aux_layers: tuple[int, ...]) -> int:
    """Return the number of target layers for which `_usual_layers` gives `aux_layers`, or 0 if there is none."""
    layers = aux_layers[-1] + 4
    return layers if aux_layers == (1, layers // 2 - 1, layers - 4) else 0


def read_ids(source: Source, vocab: int, head: torch.Tensor | None) -> Tensors:
    """Return the target ids of the draft vocabulary as `ids`, or {} if all tokens can be drafted.

    d2t holds the differences between these ids and 0, 1, 2, ...

    Args:
        vocab: the vocabulary size of the target.
        head: the draft head's own LM head [Vd, H], if it has one.
    """
    num_ids = vocab if head is None else len(head)
    configured = source.config.size("draft_vocab_size", num_ids)
    if configured != num_ids:
        raise OutriderError(
            f"draft_vocab_size is {configured}, but the LM head has {num_ids} rows; correct draft_vocab_size"
        )
    if "d2t" not in source:
        if num_ids != vocab:
            raise OutriderError(
                f"the draft vocabulary has {num_ids} of {vocab} tokens, but d2t, which maps them,"
                " is missing; copy the draft head again"
            )
        source.ignore(["t2d"], "all tokens can be drafted")
        return {}
    offsets = source.take("d2t").long()
    if offsets.shape != (num_ids,):
        raise OutriderError(
            f"d2t has shape {tuple(offsets.shape)}, but the LM head has {num_ids} rows; copy the draft head again"
        )
    ids = offsets + torch.arange(num_ids)
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise OutriderError(
            f"d2t must hold offsets that lead to ascending ids below {vocab}; copy the draft head again"
        )
    if "t2d" in source:
        is_drafted = source.take("t2d").bool()
        if is_drafted.shape != (vocab,) or int(is_drafted.sum()) != num_ids or not bool(is_drafted[ids].all()):
            raise OutriderError("t2d and d2t do not describe the same tokens; copy the draft head again")
    return {"ids": ids} if num_ids < vocab else {}


def _reasons(description: HeadDescription) -> dict[str, bool]:
    """Return why neither format can represent a draft head."""
    wrong_kind = {f"is of kind {description.kind}": description.kind is not Kind.EAGLE3}
    body = description.body
    fusion = description.input_fusion
    aux = description.aux_states
    if body is None or fusion is None:
        return wrong_kind
    standard_fusion = (
        fusion.at is FusionPoint.ATTENTION and fusion.norms and fusion.embedding_first and not fusion.zero_first
    )
    return {
        **wrong_kind,
        "combines embeddings and states in another way than EAGLE-3": not standard_fusion,
        "fuses states with a bias, or does not fuse them": aux.bias or not aux.fused,
        "takes a state after the target's final norm": aux.final,
        **unlike(body),
    }


def _tensors(description: HeadDescription, weights: Tensors, first: str) -> Tensors:
    """Return all tensors except for the LM head and the draft vocabulary. `first` is the first layer's prefix."""
    assert description.body is not None
    tensors = {"fc.weight": weights["fuse.weight"], **layer_tensors(weights, 0, first)}
    tensors |= {first + stored: weights[name] for stored, name in _FIRST_LAYER_NORMS.items()}
    for i in range(1, description.body.layers):
        tensors |= layer_tensors(weights, i, f"layers.{i}.")
    for name, value in weights.items():
        if norm := re.fullmatch(r"fuse_norm\.(\d+)\.weight", name):
            each = description.aux_states.norm is FuseNorm.EACH
            tensors[f"fc_norm.{norm[1]}.weight" if each else "input_norm.weight"] = value
    optional = {"norm.weight": "norm.weight", "embedding.weight": "embed_tokens.weight"}
    return tensors | stored(weights, optional, optional=True)


def _lm_head(description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> torch.Tensor:
    """Return the LM head [Vd, H], from the target if the draft head has none."""
    return weights["head.weight"] if description.own_lm_head else shared_lm_head(target, weights.get("ids"))


def write_ids(description: HeadDescription, weights: Tensors) -> Tensors:
    """Return d2t [Vd] and t2d [V]."""
    ids = weights["ids"].cpu() if description.draft_vocab else torch.arange(description.vocab)
    is_drafted = torch.zeros(description.vocab, dtype=torch.bool)
    is_drafted[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}
