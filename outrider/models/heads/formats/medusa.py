"""Medusa heads in the format of their authors, and in that of vLLM."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outrider.errors import OutriderError
from outrider.models.heads.description import AuxStates, HeadDescription, Kind, ParallelHeads
from outrider.models.heads.formats.base import (
    Format,
    Source,
    TargetInfo,
    TargetRequired,
    Tensors,
    Written,
    refuse,
    same,
    shared_lm_head,
)

_BLOCK = re.compile(r"(?P<prefix>medusa_head\.)?(?P<head>\d+)\.(?P<layer>\d+)\.linear\.weight")
_VLLM_BLOCK = re.compile(r"(?P<prefix>medusa_heads\.)?blocks\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Medusa(Format):
    """Blocks are named `{head}.{layer}.linear`. The LM head of each head, if any, has the next layer number."""

    name: str
    title: str
    file: str

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return any(map(_BLOCK.fullmatch, names))

    def module(self, names: Collection[str]) -> str | None:
        return next((match["prefix"] for name in names if (match := _BLOCK.fullmatch(name))), None)

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        prefix = self.module(source.names) or ""
        if prefix:
            source.ignore((name for name in source.names if not name.startswith(prefix)), "weights of the target")
        heads, layers = count_blocks(source, _BLOCK)
        configured = source.config.integer("medusa_num_layers", layers)
        if configured != layers:
            raise OutriderError(
                f"medusa_num_layers is {configured}, but each head has {layers} blocks; correct config.json"
            )
        weights: Tensors = {}
        for i in range(heads):
            for j in range(layers):
                for kind in ("weight", "bias"):
                    weights[f"blocks.{i}.{j}.linear.{kind}"] = source.take(f"{prefix}{i}.{j}.linear.{kind}")
            lm_head = f"{prefix}{i}.{layers}.weight"
            if lm_head in source:
                weights[f"heads.{i}.weight"] = source.take(lm_head)
        num_rows = [len(value) for name, value in weights.items() if name.startswith("heads.")]
        vocab = num_rows[0] if num_rows else _vocab_size(source)
        stack = ParallelHeads(heads=heads, layers=layers, shared_head=not num_rows)
        # With a prefix, the checkpoint is a full model and the config is that of the model.
        target_layers = source.config.integer("num_hidden_layers", 0) if prefix else 0
        return describe_heads(source, stack, weights, vocab=vocab, target_layers=target_layers), weights

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        stack = description.stack
        refuse(self.name, _reasons(description))
        refuse(self.name, {"has a reduced draft vocabulary; use --to medusa-vllm": bool(description.draft_vocab)})
        assert stack is not None
        refuse(self.name, {"has LM heads with a bias": stack.head_bias, "has blocks without a bias": not stack.bias})
        tensors: Tensors = {}
        for i in range(stack.heads):
            for j in range(stack.layers):
                for kind in ("weight", "bias"):
                    tensors[f"{i}.{j}.linear.{kind}"] = weights[f"blocks.{i}.{j}.linear.{kind}"]
            if not stack.shared_head:
                tensors[f"{i}.{stack.layers}.weight"] = weights[f"heads.{0 if stack.one_head else i}.weight"]
        config = {
            "medusa_num_heads": stack.heads,
            "medusa_num_layers": stack.layers,
            "base_model_name_or_path": target.name if target else None,
            "version": "2",
            "hidden_size": description.target_hidden,
            "vocab_size": description.vocab,
            "num_target_layers": description.target_layers,
        }
        return config, tensors


class VllmMedusa(Format):
    """Blocks are named `blocks.{head}.layers.{layer}`. LM heads are separate, perhaps with a reduced vocabulary."""

    name = "medusa-vllm"
    title = "Medusa (vLLM)"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return any(map(_VLLM_BLOCK.fullmatch, names))

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        heads, layers = count_blocks(source, _VLLM_BLOCK)
        prefix = next(match["prefix"] or "" for name in source.names if (match := _VLLM_BLOCK.fullmatch(name)))
        bias = f"{prefix}blocks.0.layers.0.bias" in source
        kinds = ("weight", "bias") if bias else ("weight",)
        weights: Tensors = {}
        for i in range(heads):
            for j in range(layers):
                for kind in kinds:
                    weights[f"blocks.{i}.{j}.linear.{kind}"] = source.take(f"{prefix}blocks.{i}.layers.{j}.{kind}")
        one_head = config.boolean("original_lm_head", False)
        if one_head:
            names = [_one_lm_head(source, prefix)]
        else:
            names = [f"{prefix}lm_heads.{i}.weight" for i in range(heads)]
        tables = list(map(source.take, names))
        vocab = config.size("vocab_size")
        token_map = _read_token_map(source, prefix, vocab)
        for i, table in enumerate(tables):
            weights[f"heads.{i}.weight"] = table if token_map is None else _drafted_rows(table, token_map, vocab)
        if token_map is not None:
            weights["ids"] = token_map.ids
        target = source.target
        shared_head = bool(one_head and token_map is None and target and target.head and same(tables[0], target.head()))
        if shared_head:
            del weights["heads.0.weight"]
        stack = ParallelHeads(
            heads=heads, layers=layers, bias=bias, shared_head=shared_head, one_head=one_head and not shared_head
        )
        return describe_heads(source, stack, weights, vocab=vocab), weights

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        stack = description.stack
        refuse(self.name, _reasons(description))
        assert stack is not None
        refuse(self.name, {"has LM heads with a bias": stack.head_bias})
        kinds = ("weight", "bias") if stack.bias else ("weight",)
        tensors: Tensors = {}
        for i in range(stack.heads):
            for j in range(stack.layers):
                for kind in kinds:
                    tensors[f"blocks.{i}.layers.{j}.{kind}"] = weights[f"blocks.{i}.{j}.linear.{kind}"]
        if stack.shared_head:
            tensors["lm_head.weight"] = shared_lm_head(target, weights.get("ids"))
        elif stack.one_head:
            tensors["lm_head.weight"] = weights["heads.0.weight"]
        else:
            tensors |= {f"lm_heads.{i}.weight": weights[f"heads.{i}.weight"] for i in range(stack.heads)}
        if description.draft_vocab:
            tensors["token_map"] = weights["ids"]
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": stack.heads,
            "num_hidden_layers": stack.layers,
            "hidden_size": description.target_hidden,
            "vocab_size": description.vocab,
            "truncated_vocab_size": description.output_vocab,
            "original_lm_head": stack.one_head or stack.shared_head,
            "medusa_fc_bias": stack.bias,
            # vLLM takes any key with "num" and "layers" for the number of blocks.
            "target_layers": description.target_layers,
        }
        return config, tensors


class _TokenMap(NamedTuple):
    """The draft vocabulary."""

    ids: torch.Tensor  # [Vd] target ids in ascending order
    rows: torch.Tensor  # [Vd] index of each of these ids in the stored map


def _read_token_map(source: Source, prefix: str, vocab: int) -> _TokenMap | None:
    """Return the draft vocabulary, or None if all tokens can be drafted."""
    size = source.config.size("truncated_vocab_size", vocab)
    name = "token_map" if "token_map" in source else f"{prefix}token_map"
    if size == vocab:
        source.ignore([name], "all tokens can be drafted")
        return None
    ids = source.take(name).long()
    if ids.shape != (size,) or len(set(ids.tolist())) != size or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise OutriderError(f"token_map does not hold {size} different ids below {vocab}; copy the draft head again")
    ascending = ids.sort()
    return _TokenMap(ids=ascending.values, rows=ascending.indices)


def count_blocks(source: Source, pattern: re.Pattern[str]) -> tuple[int, int]:
    """Return the number of heads, and of blocks in each head, from the names of tensors.

    `pattern` matches the names of blocks and has the groups `head` and `layer`.
    """
    matches = list(filter(None, map(pattern.fullmatch, source.names)))
    if not matches:
        raise OutriderError("the checkpoint has no heads; copy the draft head again")
    heads = 1 + max(int(match["head"]) for match in matches)
    layers = 1 + max(int(match["layer"]) for match in matches)
    if len(matches) != heads * layers:
        raise OutriderError(
            f"the checkpoint has {len(matches)} blocks instead of {heads} heads with {layers}"
            " blocks each; copy the draft head again"
        )
    return heads, layers


def describe_heads(
    source: Source, stack: ParallelHeads, weights: Tensors, *, vocab: int, target_layers: int = 0
) -> HeadDescription:
    """Return a description of heads that take the target's last hidden state after its final norm.

    `target_layers` is the number of layers of the target, if it follows from the config; 0:
    unknown.
    """
    layers = source.target_layers(target_layers)
    return HeadDescription(
        kind=Kind.MEDUSA,
        target_hidden=len(weights["blocks.0.0.linear.weight"]),
        target_layers=layers,
        vocab=vocab,
        draft_vocab=len(weights["ids"]) if "ids" in weights else 0,
        aux_states=AuxStates(layers=(layers - 1,), final=True),
        stack=stack,
        own_lm_head=not stack.shared_head,
    )


def _reasons(description: HeadDescription) -> dict[str, bool]:
    """Return why no Medusa format can represent a draft head."""
    aux = description.aux_states
    takes_last_state = aux.layers == (description.target_layers - 1,) and aux.final
    return {
        f"is of kind {description.kind}": description.kind is not Kind.MEDUSA,
        "takes another state than the target's last": not takes_last_state,
    }


def _vocab_size(source: Source) -> int:
    if "vocab_size" in source.config:
        return source.config.size("vocab_size")
    if source.target is None:
        raise TargetRequired("the heads use the target's LM head; give the target with --target DIR")
    return source.target.vocab


def _one_lm_head(source: Source, prefix: str) -> str:
    """Return the name of the LM head that all heads share. Older checkpoints store a copy for each head."""
    names = [name for name in (f"{prefix}lm_head.weight", f"{prefix}lm_heads.0.weight") if name in source]
    if not names:
        raise OutriderError("original_lm_head is true, but lm_head.weight is missing; copy the draft head again")
    copies = (name for name in source.names if name.startswith(f"{prefix}lm_heads.") and name != names[0])
    source.ignore(copies, "copies of the shared LM head (original_lm_head)")
    return names[0]


def _drafted_rows(table: torch.Tensor, token_map: _TokenMap, vocab: int) -> torch.Tensor:
    """Return the rows [Vd, H] of the draft vocabulary. `table` may have rows for all tokens, or in order of the map."""
    num_ids = len(token_map.ids)
    if len(table) not in (num_ids, vocab):
        raise OutriderError(f"an LM head has {len(table)} rows instead of {num_ids} or {vocab}; copy it again")
    return table[token_map.ids] if len(table) > num_ids else table[token_map.rows]


MEDUSA = Medusa(name="medusa", title="Medusa (its authors')", file="medusa_lm_head.pt")
MEDUSA_SAFE = Medusa(
    name="medusa-safetensors", title="Medusa (its authors', safetensors)", file="medusa_lm_head.safetensors"
)
