"""Hydra heads with the architecture `mlp`, which also read the earlier draft tokens."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.models.heads.description import AuxStates, HeadDescription, Kind, ParallelHeads
from outrider.models.heads.formats.base import Format, Source, TargetInfo, Tensors, Written, refuse, shared_lm_head
from outrider.models.heads.formats.medusa import count_blocks, describe_heads

_BLOCK = re.compile(r"hydra_mlp\.(?P<head>\d+)\.(?P<layer>\d+)\.linear\.weight")


class Hydra(Format):
    """Blocks are named `hydra_mlp.{head}.{layer}`. Each head has an LM head with a bias.

    Heads take the state `hidden_state_offset` layers before the last. Heads that are not `grounded_heads` are Medusa
    heads. Heads without a bias are stored with a bias of zeros, which is removed when they are read.
    """

    name = "hydra"
    title = "Hydra (its authors')"
    file = "hydra_lm_head.pt"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return "hydra_num_heads" in config or any(name.startswith("hydra_mlp.") for name in names)

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        architecture = config.string("hydra_head_arch", "mlp")
        if architecture != "mlp":
            raise OutriderError(f"hydra_head_arch {architecture} is not supported; use a draft head with mlp")
        source.ignore(["input_embed_fn.weight"], "the target's embedding")
        grounded = config.boolean("grounded_heads", False)
        heads, layers = count_blocks(source, _BLOCK)
        weights: Tensors = {}
        for i in range(heads):
            for kind in ("weight", "bias"):
                for j in range(layers):
                    weights[f"blocks.{i}.{j}.linear.{kind}"] = source.take(f"hydra_mlp.{i}.{j}.linear.{kind}")
                # The input of the first block is wider than its output, so a layer maps the residual.
                if grounded:
                    residual = f"0.res_connection.{kind}"
                    weights[f"blocks.{i}.{residual}"] = source.take(f"hydra_mlp.{i}.{residual}")
                weights[f"heads.{i}.{kind}"] = source.take(f"hydra_lm_head.{i}.{kind}")
        has_bias = any(bool(weights[f"heads.{i}.bias"].any()) for i in range(heads))
        if not has_bias:
            weights = {name: value for name, value in weights.items() if not re.fullmatch(r"heads\.\d+\.bias", name)}
        stack = ParallelHeads(heads=heads, layers=layers, head_bias=has_bias)
        description = describe_heads(source, stack, weights, vocab=len(weights["heads.0.weight"]))
        offset = config.integer("hidden_state_offset", 0)
        aux_states = AuxStates(layers=(description.target_layers - 1 - offset,), final=not offset)
        kind_of_head = Kind.HYDRA if grounded else Kind.MEDUSA
        return replace(description, kind=kind_of_head, aux_states=aux_states), weights

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        stack = description.stack
        aux = description.aux_states
        refuse(self.name, {f"is of kind {description.kind}": description.kind not in (Kind.HYDRA, Kind.MEDUSA)})
        assert stack is not None
        offset = description.target_layers - 1 - aux.layers[-1]
        reasons = {
            "has a reduced draft vocabulary": bool(description.draft_vocab),
            "has blocks without a bias": not stack.bias,
            "takes more than one state": len(aux.layers) > 1,
            "takes the last state before the final norm, or an earlier state after it": aux.final == bool(offset),
        }
        refuse(self.name, reasons)
        tensors = {
            f"hydra_mlp.{name.removeprefix('blocks.')}": value
            for name, value in weights.items()
            if name.startswith("blocks.")
        }
        for i in range(stack.heads):
            head = 0 if stack.one_head else i
            table = shared_lm_head(target) if stack.shared_head else weights[f"heads.{head}.weight"]
            zeros = torch.zeros(len(table), dtype=table.dtype)
            tensors[f"hydra_lm_head.{i}.weight"] = table
            tensors[f"hydra_lm_head.{i}.bias"] = weights[f"heads.{head}.bias"] if stack.head_bias else zeros
        config = {
            "hydra_num_heads": stack.heads,
            "hydra_num_layers": stack.layers,
            "hydra_head_arch": "mlp",
            "grounded_heads": description.kind is Kind.HYDRA,
            "hidden_state_offset": offset,
            "base_model_name_or_path": target.name if target else None,
            "hidden_size": description.target_hidden,
            "vocab_size": description.vocab,
            "num_target_layers": description.target_layers,
        }
        return config, tensors
