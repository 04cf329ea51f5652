"""EAGLE-1 and 2: a projection of the target's last hidden state and the next embedding, and decoder layers."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from outrider.models.heads.description import AuxStates, Feedback, FusionPoint, HeadDescription, InputFusion, Kind
from outrider.models.heads.formats.base import Format, Source, TargetInfo, Tensors, Written, refuse, stored
from outrider.models.heads.formats.llama import layer_tensors, read_body, take_layer, unlike, write_body

_OPTIONAL: Mapping[str, str] = MappingProxyType(
    {"project.bias": "fc.bias", "head.weight": "lm_head.weight", "embedding.weight": "embed_tokens.weight"}
)


class Eagle(Format):
    """A Llama config with the number of layers of the draft head.

    The target's LM head gets the output of the last layer without a norm. The first layer has no
    norm before its attention.
    """

    name = "eagle"
    title = "EAGLE-1 and 2 (SafeAILab, vLLM)"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return (
            "speculators_model_type" not in config
            and {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(names)
            and "layers.0.hidden_norm.weight" not in names
        )

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        body = read_body(
            source.config, source.config.size("num_hidden_layers", 1), lambda name: f"layers.0.{name}" in source
        )
        body = replace(body, first_norm=False)
        weights = {"project.weight": source.take("fc.weight")}
        weights |= source.take_all(_OPTIONAL, optional=True)
        for i in range(body.layers):
            weights |= take_layer(source, f"layers.{i}.", f"layers.{i}.")
        target_layers = source.target_layers()
        description = HeadDescription(
            kind=Kind.EAGLE,
            target_hidden=body.hidden,
            target_layers=target_layers,
            vocab=source.config.size("vocab_size"),
            aux_states=AuxStates(layers=(target_layers - 1,), final=True),
            input_fusion=InputFusion(at=FusionPoint.PROJECTION, norms=False, bias="project.bias" in weights),
            body=body,
            final_norm=False,
            own_lm_head="head.weight" in weights,
            own_embedding="embedding.weight" in weights,
        )
        return description, weights

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        body = description.body
        fusion = description.input_fusion
        aux = description.aux_states
        other_kind = description.kind is not Kind.EAGLE or body is None or fusion is None
        refuse(self.name, {f"is of kind {description.kind}": other_kind})
        assert body is not None
        assert fusion is not None
        standard_fusion = (
            fusion.at is FusionPoint.PROJECTION and fusion.embedding_first and not (fusion.norms or fusion.zero_first)
        )
        takes_last_state = aux.layers == (description.target_layers - 1,) and aux.final and not aux.fused
        reasons = {
            "combines embeddings and states in another way than EAGLE-1": not standard_fusion,
            "takes another state than the target's last": not takes_last_state,
            "has a norm before its first layer or after its last": body.first_norm or description.final_norm,
            "feeds back the normed state": description.feedback is Feedback.NORMED,
            "has a reduced draft vocabulary": bool(description.draft_vocab),
            **unlike(body),
        }
        refuse(self.name, reasons)
        config = {
            "architectures": ["LlamaForCausalLM"],
            **write_body(body, description.vocab, target),
            "bias": fusion.bias,
            "num_target_layers": description.target_layers,
        }
        tensors = {"fc.weight": weights["project.weight"]}
        tensors |= stored(weights, _OPTIONAL, optional=True)
        for i in range(body.layers):
            tensors |= layer_tensors(weights, i, f"layers.{i}.")
        return config, tensors
