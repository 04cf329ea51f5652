"""EAGLE-1 and 2: the target's last state, a projection with the embedding before it, and decoder layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from outrider.heads.description import AuxStates, Feedback, FusionPoint, HeadDescription, InputFusion, Kind
from outrider.heads.formats.base import Config, Source, TargetInfo, Tensors, refuse
from outrider.heads.formats.llama import layer_tensors, read_body, take_layer, unlike, write_body

_OPTIONAL: Mapping[str, str] = MappingProxyType(
    {"project.bias": "fc.bias", "head.weight": "lm_head.weight", "embedding.weight": "embed_tokens.weight"}
)


class Eagle:
    """A Llama's config, with the draft's number of layers; the target's output layer reads the last one's output as it
    is, without a norm, and the first layer has no norm before its attention.
    """

    name, title, file = "eagle", "EAGLE-1 and 2 (SafeAILab, vLLM)", "model.safetensors"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return (
            "speculators_model_type" not in config
            and {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(names)
            and "layers.0.hidden_norm.weight" not in names
        )

    def module(self, names: Collection[str]) -> str | None:
        return None

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        body = read_body(
            source.config, source.config.size("num_hidden_layers", 1), lambda name: f"layers.0.{name}" in source
        )
        body = replace(body, first_norm=False)
        weights = {"project.weight": source.take("fc.weight")}
        weights |= {ours: source.take(theirs) for ours, theirs in _OPTIONAL.items() if theirs in source}
        for i in range(body.layers):
            weights |= take_layer(source, f"layers.{i}.", f"layers.{i}.")
        layers = source.target_layers()
        description = HeadDescription(
            kind=Kind.EAGLE,
            target_hidden=body.hidden,
            target_layers=layers,
            vocab=source.config.size("vocab_size"),
            aux_states=AuxStates(layers=(layers - 1,), final=True),
            input_fusion=InputFusion(at=FusionPoint.PROJECTION, norms=False, bias="project.bias" in weights),
            body=body,
            final_norm=False,
            own_lm_head="head.weight" in weights,
            own_embedding="embedding.weight" in weights,
        )
        return description, weights

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it, body, join = description, description.body, description.input_fusion
        refuse(self.name, {f"is of kind {it.kind}": it.kind is not Kind.EAGLE or body is None or join is None})
        assert body is not None
        assert join is not None
        plain = join.at is FusionPoint.PROJECTION and join.embedding_first and not (join.norms or join.zero_first)
        last = it.aux_states.layers == (it.target_layers - 1,) and it.aux_states.final and not it.aux_states.fused
        reasons = {
            "is joined in another way than EAGLE-1's": not plain,
            "reads another state than the target's last": not last,
            "has a norm before its first layer or behind its last": body.first_norm or it.final_norm,
            "carries its normed state on": it.feedback is Feedback.NORMED,
            "guesses a part of the vocabulary": bool(it.draft_vocab),
            **unlike(body),
        }
        refuse(self.name, reasons)
        config = {
            "architectures": ["LlamaForCausalLM"],
            **write_body(body, it.vocab, partner),
            "bias": join.bias,
            "num_target_layers": it.target_layers,
        }
        tensors = {"fc.weight": weights["project.weight"]}
        tensors |= {theirs: weights[ours] for ours, theirs in _OPTIONAL.items() if ours in weights}
        for i in range(body.layers):
            tensors |= layer_tensors(weights, i, f"layers.{i}.")
        return config, tensors
