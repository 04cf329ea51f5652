"""Hydra heads, of the architecture `mlp`: each reads the embeddings of the guesses before it, too."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.heads.description import AuxStates, HeadDescription, Kind, ParallelHeads
from outrider.heads.formats.base import Config, Source, TargetInfo, Tensors, refuse, shared_lm_head
from outrider.heads.formats.medusa import counted, described

_BLOCK = re.compile(r"hydra_mlp\.(?P<head>\d+)\.(?P<layer>\d+)\.linear\.weight")


class Hydra:
    """`hydra_mlp.{head}.{layer}`, and an output layer with a bias for each head.

    Its heads read the state of `hidden_state_offset` layers before the last; ungrounded ones are Medusa's. A bias of
    zeros is none: a draft without one is written with zeros, and so comes back as it was.
    """

    name, title, file = "hydra", "Hydra (its authors')", "hydra_lm_head.pt"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return "hydra_num_heads" in config or any(name.startswith("hydra_mlp.") for name in names)

    def module(self, names: Collection[str]) -> str | None:
        return None

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        if (arch := config.text("hydra_head_arch", "mlp")) != "mlp":
            raise OutriderError(f"its hydra_head_arch is {arch}, which has attention of its own; only mlp is handled")
        source.ignore(["input_embed_fn.weight"], "the target's own embeddings")
        grounded, (heads, layers) = config.flag("grounded_heads", False), counted(source, _BLOCK)
        weights: Tensors = {}
        for i, kind in product(range(heads), ("weight", "bias")):
            for j in range(layers):
                weights[f"blocks.{i}.{j}.linear.{kind}"] = source.take(f"hydra_mlp.{i}.{j}.linear.{kind}")
            if grounded:  # the first block's input is wider than its output, and its residual takes a linear way
                weights[f"blocks.{i}.0.res_connection.{kind}"] = source.take(f"hydra_mlp.{i}.0.res_connection.{kind}")
            weights[f"heads.{i}.{kind}"] = source.take(f"hydra_lm_head.{i}.{kind}")
        biased = any(bool(weights[f"heads.{i}.bias"].any()) for i in range(heads))
        if not biased:
            weights = {name: value for name, value in weights.items() if not re.fullmatch(r"heads\.\d+\.bias", name)}
        stack = ParallelHeads(heads=heads, layers=layers, head_bias=biased)
        found = described(source, stack, weights, vocab=len(weights["heads.0.weight"]))
        before = config.whole("hidden_state_offset", 0)
        taps = AuxStates(layers=(found.target_layers - 1 - before,), final=not before)
        return replace(found, kind=Kind.HYDRA if grounded else Kind.MEDUSA, aux_states=taps), weights

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it, stack = description, description.stack
        refuse(self.name, {f"is of kind {it.kind}": it.kind not in (Kind.HYDRA, Kind.MEDUSA)})
        assert stack is not None
        before = it.target_layers - 1 - it.aux_states.layers[-1]
        reasons = {
            "guesses a part of the vocabulary": bool(it.draft_vocab),
            "has blocks without a bias": not stack.bias,
            "reads more than one state": len(it.aux_states.layers) > 1,
            "reads a state that Hydra has not": it.aux_states.final == bool(before),
        }
        refuse(self.name, reasons)
        tensors = {f"hydra_mlp.{n.removeprefix('blocks.')}": v for n, v in weights.items() if n.startswith("blocks.")}
        for i in range(stack.heads):
            at = 0 if stack.one_head else i
            table = shared_lm_head(partner) if stack.shared_head else weights[f"heads.{at}.weight"]
            zeros = torch.zeros(len(table), dtype=table.dtype)
            tensors[f"hydra_lm_head.{i}.weight"] = table
            tensors[f"hydra_lm_head.{i}.bias"] = weights[f"heads.{at}.bias"] if stack.head_bias else zeros
        config = {
            "hydra_num_heads": stack.heads,
            "hydra_num_layers": stack.layers,
            "hydra_head_arch": "mlp",
            "grounded_heads": it.kind is Kind.HYDRA,
            "hidden_state_offset": before,
            "base_model_name_or_path": partner.name if partner else None,
            "hidden_size": it.target_hidden,
            "vocab_size": it.vocab,
            "num_target_layers": it.target_layers,
        }
        return config, tensors
