"""Medusa heads, as their authors write them down and as vLLM does."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.heads.description import AuxStates, HeadDescription, Kind, ParallelHeads
from outrider.heads.formats.base import Config, Source, TargetInfo, Tensors, UnusedTensors, refuse, same, shared_lm_head

_BLOCK = re.compile(r"(?P<at>medusa_head\.)?(?P<head>\d+)\.(?P<layer>\d+)\.linear\.weight")
_VLLM = re.compile(r"(?P<at>medusa_heads\.)?blocks\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Medusa:
    """`{head}.{layer}.linear`, and a head's output layer behind its blocks, if it has one."""

    name: str
    title: str
    file: str

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return any(_BLOCK.fullmatch(name) for name in names)

    def module(self, names: Collection[str]) -> str | None:
        return next((found["at"] for name in names if (found := _BLOCK.fullmatch(name))), None)

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        at = self.module(source.names) or ""
        if at:
            source.ignore((name for name in source.names if not name.startswith(at)), "the target's own")
        heads, layers = counted(source, _BLOCK)
        if (said := source.config.whole("medusa_num_layers", layers)) != layers:
            raise OutriderError(f"medusa_num_layers is {said}, and there are {layers} blocks a head; mend config.json")
        weights: Tensors = {}
        for i in range(heads):
            for j in range(layers):
                for kind in ("weight", "bias"):
                    weights[f"blocks.{i}.{j}.linear.{kind}"] = source.take(f"{at}{i}.{j}.linear.{kind}")
            if (own := f"{at}{i}.{layers}.weight") in source:
                weights[f"heads.{i}.weight"] = source.take(own)
        rows = [len(value) for name, value in weights.items() if name.startswith("heads.")]
        vocab = rows[0] if rows else _vocabulary(source)
        stack = ParallelHeads(heads=heads, layers=layers, shared_head=not rows)
        whole = source.config.whole("num_hidden_layers", 0) if at else 0  # the config is then the model's
        return described(source, stack, weights, vocab=vocab, guess=whole), weights

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it, stack = description, description.stack
        refuse(self.name, unfit(it))
        refuse(self.name, {"guesses a part of the vocabulary": bool(it.draft_vocab)})
        assert stack is not None
        refuse(
            self.name, {"has output layers with a bias": stack.head_bias, "has blocks without a bias": not stack.bias}
        )
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
            "base_model_name_or_path": partner.name if partner else None,
            "version": "2",
            "hidden_size": it.target_hidden,
            "vocab_size": it.vocab,
            "num_target_layers": it.target_layers,
        }
        return config, tensors


class VllmMedusa:
    """`blocks.{head}.layers.{layer}`, output layers apart, and perhaps only for some tokens."""

    name, title, file = "medusa-vllm", "Medusa (vLLM)", "model.safetensors"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return any(_VLLM.fullmatch(name) for name in names)

    def module(self, names: Collection[str]) -> str | None:
        return None

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        heads, layers = counted(source, _VLLM)
        at = next(found["at"] or "" for name in source.names if (found := _VLLM.fullmatch(name)))
        bias = f"{at}blocks.0.layers.0.bias" in source
        weights: Tensors = {}
        for i in range(heads):
            for j in range(layers):
                for kind in ("weight", "bias") if bias else ("weight",):
                    weights[f"blocks.{i}.{j}.linear.{kind}"] = source.take(f"{at}blocks.{i}.layers.{j}.{kind}")
        one = config.flag("original_lm_head", False)
        names = _one_head(source, at) if one else [f"{at}lm_heads.{i}.weight" for i in range(heads)]
        tables = [source.take(name) for name in names]
        vocab = config.size("vocab_size")
        ids = self._ids(source, at, vocab)
        for i, table in enumerate(tables):
            weights[f"heads.{i}.weight"] = table if ids is None else _rows(table, *ids, vocab)
        if ids is not None:
            weights["ids"] = ids[0]
        target = source.partner
        borrowed = bool(one and ids is None and target and target.head and same(tables[0], target.head()))
        if borrowed:
            del weights["heads.0.weight"]
        stack = ParallelHeads(
            heads=heads, layers=layers, bias=bias, shared_head=borrowed, one_head=one and not borrowed
        )
        return described(source, stack, weights, vocab=vocab), weights

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it, stack = description, description.stack
        refuse(self.name, unfit(it))
        assert stack is not None
        refuse(self.name, {"has output layers with a bias": stack.head_bias})
        tensors: Tensors = {}
        for i in range(stack.heads):
            for j in range(stack.layers):
                for kind in ("weight", "bias") if stack.bias else ("weight",):
                    tensors[f"blocks.{i}.layers.{j}.{kind}"] = weights[f"blocks.{i}.{j}.linear.{kind}"]
        one = stack.one_head or stack.shared_head
        if one:
            tensors["lm_head.weight"] = (
                shared_lm_head(partner, weights.get("ids")) if stack.shared_head else weights["heads.0.weight"]
            )
        else:
            tensors |= {f"lm_heads.{i}.weight": weights[f"heads.{i}.weight"] for i in range(stack.heads)}
        if it.draft_vocab:
            tensors["token_map"] = weights["ids"]
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": stack.heads,
            "num_hidden_layers": stack.layers,
            "hidden_size": it.target_hidden,
            "vocab_size": it.vocab,
            "truncated_vocab_size": it.output_vocab,
            "original_lm_head": one,
            "medusa_fc_bias": stack.bias,
            "target_layers": it.target_layers,  # vLLM takes any name with "num" and "layers" for the blocks' own
        }
        return config, tensors

    def _ids(self, source: Source, at: str, vocab: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The guessed ids in rising order, and which row of the map each of them comes from."""
        said = source.config.size("truncated_vocab_size", vocab)
        name = "token_map" if "token_map" in source else f"{at}token_map"
        if said == vocab:
            source.ignore([name], "all tokens are guessed")
            return None
        ids = source.take(name).long()
        if ids.shape != (said,) or len(set(ids.tolist())) != said or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise OutriderError(f"token_map does not hold {said} different ids below {vocab}; copy the draft again")
        ordered = ids.sort()
        return ordered.values, ordered.indices


def counted(source: Source, pattern: re.Pattern[str]) -> tuple[int, int]:
    """Heads, and blocks in each, of which there are as many everywhere."""
    found = [(int(at["head"]), int(at["layer"])) for name in source.names if (at := pattern.fullmatch(name))]
    if not found:
        raise OutriderError("there are no heads; copy the draft again")
    heads, layers = (max(each) + 1 for each in zip(*found, strict=True))
    if len(found) != heads * layers:
        raise OutriderError(f"there are {len(found)} blocks where {heads} heads with {layers} each would have others")
    return heads, layers


def described(source: Source, stack: ParallelHeads, weights: Tensors, *, vocab: int, guess: int = 0) -> HeadDescription:
    """Heads that read the target's last state after its final norm; `guess` as for `Source.target_layers`."""
    layers, first = source.target_layers(guess), weights["blocks.0.0.linear.weight"]
    return HeadDescription(
        kind=Kind.MEDUSA,
        target_hidden=len(first),
        target_layers=layers,
        vocab=vocab,
        draft_vocab=len(weights["ids"]) if "ids" in weights else 0,
        aux_states=AuxStates(layers=(layers - 1,), final=True),
        stack=stack,
        own_lm_head=not stack.shared_head,
    )


def unfit(it: HeadDescription) -> dict[str, bool]:
    """Why no format of Medusa can hold a draft."""
    last = it.aux_states.layers == (it.target_layers - 1,) and it.aux_states.final
    return {f"is of kind {it.kind}": it.kind is not Kind.MEDUSA, "reads another state than the target's last": not last}


def _vocabulary(source: Source) -> int:
    if "vocab_size" in source.config:
        return source.config.size("vocab_size")
    if source.partner is None:
        raise UnusedTensors("its heads use the target's output layer; give the target with --target DIR")
    return source.partner.vocab


def _one_head(source: Source, at: str) -> list[str]:
    """The output layer that all heads use, which older files hold once for each."""
    names = [name for name in (f"{at}lm_head.weight", f"{at}lm_heads.0.weight") if name in source]
    if not names:
        raise OutriderError("original_lm_head is true, and there is no lm_head.weight; copy the draft again")
    others = (name for name in source.names if name.startswith(f"{at}lm_heads.") and name != names[0])
    source.ignore(others, "copies of the one output layer (original_lm_head)")
    return names[:1]


def _rows(table: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, vocab: int) -> torch.Tensor:
    """Rows of what is guessed, out of a table of all tokens or of those of the map in its order."""
    if len(table) not in (len(ids), vocab):
        raise OutriderError(f"an output layer has {len(table)} rows, for {len(ids)} of {vocab} tokens; copy it again")
    return table[ids] if len(table) > len(ids) else table[order]


MEDUSA = Medusa(name="medusa", title="Medusa (its authors')", file="medusa_lm_head.pt")
MEDUSA_SAFE = Medusa(
    name="medusa-safetensors", title="Medusa (its authors', safetensors)", file="medusa_lm_head.safetensors"
)
