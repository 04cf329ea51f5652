"""Heads that fill in blocks, in the formats of z-lab, DeepSpec, SpecForge and vLLM, and in that of speculators.

The layers are the same in all formats. The formats differ in two ways that tensors do not show.
Speculators counts the target's layers by inputs, the others by outputs. And the column of the last
committed token predicts a draft token (`sample_from_anchor`) by default in DSpark and in Domino of
speculators, but not in the others. If this is misread, each draft token is shifted by one position.

The mask is a row of the embedding, which is the target's if the draft head has none.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import AuxStates, Body, DraftBlock, HeadDescription, Kind
from outrider.models.heads.formats.base import (
    Config,
    Format,
    Source,
    TargetInfo,
    Tensors,
    Written,
    refuse,
    same,
    shared_embedding,
    shared_lm_head,
    stored,
)
from outrider.models.heads.formats.block_parts import (
    BLOCK_KINDS,
    BlockKind,
    flat_kind,
    stored_confidence,
    take_confidence,
)
from outrider.models.heads.formats.block_views import read_views, written_views
from outrider.models.heads.formats.eagle3 import read_ids, to_output_layers, write_ids
from outrider.models.heads.formats.llama import LLAMAS, layer_tensors, read_body, take_layer, unlike, write_body
from outrider.models.heads.formats.speculators import speculators

_TABLES: Mapping[str, str] = MappingProxyType(
    {"head.weight": "lm_head.weight", "embedding.weight": "embed_tokens.weight"}
)
_REQUIRED: Mapping[str, str] = MappingProxyType(
    {"fuse.weight": "fc.weight", "state_norm.weight": "hidden_norm.weight", "norm.weight": "norm.weight"}
)
_IDS = "aux_hidden_state_layer_ids"  # counted by inputs
# Switches, and the values that are supported.
_MUST_BE_FALSE = ("attention_sink_bias", "add_swa_attention_sink_bias")
_MUST_BE_TRUE = ("is_neox_style", "rope_is_neox_style", "use_aux_hidden_state")
_MUST_BE_ONE = ("input_embedding_scale", "output_multiplier")
_PROJECTORS = (Kind.DFLASH, Kind.DSPARK, Kind.DOMINO)
_NUM_ANCHORS = 512  # blocks of a sequence in training; DeepSpec's model requires the key


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Format):
    """One of the formats: a flat config, or that of speculators with nested layers."""

    name: str
    title: str
    kind: Kind  # of block heads
    nested: bool

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        if self.nested or "speculators_model_type" in config:
            return self.nested and config.get("speculators_model_type") == self.kind
        return {"fc.weight", "hidden_norm.weight"} <= set(names) and flat_kind(config, names) is self.kind

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        layer = config.object("transformer_layer_config") if self.nested else config
        block_config = _BlockConfig(config)
        block_config.check(layer)
        kind = self._kind
        if self._is_spark and self.nested and "sample_from_anchor" not in config:
            raise OutriderError("config.json lacks sample_from_anchor; add the value that the training used")
        source.ignore(["verifier_lm_head.weight", "verifier_norm.weight"], "weights of the target, for training only")
        count = layer.size("num_hidden_layers")
        body = read_body(layer, count, lambda name: f"layers.0.{name}" in source, windows=True)
        target_layers = source.target_layers()
        vocab = layer.size("vocab_size")
        mask_token = block_config.at("mask_token_id").integer("mask_token_id")
        weights = source.take_all(_REQUIRED)
        weights |= source.take_all(self._names_in(source), optional=self._is_spark)
        for i in range(body.layers):
            weights |= take_layer(source, f"layers.{i}.", f"layers.{i}.")
        if self._is_spark:
            rank = weights["markov_in.weight"].shape[-1] if "markov_in.weight" in weights else 0
            weights |= take_confidence(source, body.hidden + rank)
        anchored = kind.nested_anchored if self.nested else kind.anchored
        block = DraftBlock(
            size=block_config.at("block_size").size("block_size"),
            sample_from_anchor=block_config.anchored(anchored),
            views=read_views(block_config.at, layer, count, kind.nested_causal if self.nested else None),
            **kind.read(block_config.at, weights, self.nested),
        )
        weights |= _take_tables(source, vocab, mask_token)
        target_hidden = block_config.at("target_hidden_size").size("target_hidden_size", body.hidden)
        if self.nested:
            aux_layers = block_config.layers_by_inputs()
        else:
            aux_layers = block_config.layers_by_outputs(target_layers, body.layers)
        description = HeadDescription(
            kind=Kind.DFLASH if self._is_spark and not (block.markov_rank or block.confidence) else self.kind,
            target_hidden=target_hidden,
            target_layers=target_layers,
            vocab=vocab,
            draft_vocab=len(weights["ids"]) if "ids" in weights else 0,
            aux_states=AuxStates(layers=aux_layers, fused=True),
            body=body,
            block=block,
            own_lm_head="head.weight" in weights,
            own_embedding="embedding.weight" in weights,
        )
        return description, weights

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        body = description.body
        block = description.block
        refuse(self.name, {f"is of kind {description.kind}": block is None})
        assert body is not None
        assert block is not None
        refuse(self.name, self._reasons(description, body, block))
        kind = self._kind
        views = written_views(self.name, block, nested=self.nested)
        tensors = self._tensors(description, body, weights, target)
        base = {**write_body(body, description.vocab, target), **views.layers}
        config: Config = {
            "block_size": block.size,
            "target_hidden_size": description.target_hidden,
            "num_target_layers": description.target_layers,
        }
        values = kind.write(block, weights, self.nested)
        mask_token = _mask_row(self.name, weights["mask"], tensors, target)
        aux_layers = description.aux_states.layers
        if self.nested:
            config |= values
            config |= speculators(self.kind, kind.speculator or f"{kind.mark}Speculator", target, block.draft_tokens)
            config["transformer_layer_config"] = base
            config["draft_vocab_size"] = description.output_vocab
            config["mask_token_id"] = mask_token
            config[_IDS] = [layer + 1 for layer in aux_layers]
            return {**config, **views.block}, tensors
        inputs = {"mask_token_id": mask_token, "target_layer_ids": list(aux_layers), **views.block}
        if self._is_spark:
            config = {**base, **config, **values, **inputs, "num_anchors": _NUM_ANCHORS}
            return {"architectures": [kind.architecture], **config}, tensors
        if kind.inside:
            inputs |= {"block_size": block.size, **values}
        else:
            config |= values
        return {"architectures": [kind.architecture], **base, **config, "dflash_config": inputs}, tensors

    def _tensors(
        self, description: HeadDescription, body: Body, weights: Tensors, target: TargetInfo | None
    ) -> Tensors:
        assert description.block is not None
        stored_names = {**_REQUIRED, **_TABLES, **self._kind.names_in(self.nested)}
        tensors = stored(weights, stored_names, optional=True) | stored_confidence(description.block, weights)
        for i in range(body.layers):
            tensors |= layer_tensors(weights, i, f"layers.{i}.")
        if self.nested:
            if not description.own_lm_head:
                tensors["lm_head.weight"] = shared_lm_head(target, weights.get("ids"))
            if not description.own_embedding:
                tensors["embed_tokens.weight"] = shared_embedding(target)
            if description.draft_vocab:
                tensors |= write_ids(description, weights)
        return tensors

    @property
    def _is_spark(self) -> bool:
        return self.kind is Kind.DSPARK

    @property
    def _kind(self) -> BlockKind:
        return next(each for each in BLOCK_KINDS if each.kind is self.kind)

    def _names_in(self, source: Source) -> Mapping[str, str]:
        """Return the names of the tensors that only this kind has."""
        names = self._kind.names_in(self.nested)
        # The first heads of Domino have them in a container.
        prefix = "logit_head." if any(name.startswith("logit_head.") for name in source.names) else ""
        return {name: prefix + stored for name, stored in names.items()}

    def _reasons(self, description: HeadDescription, body: Body, block: DraftBlock) -> dict[str, bool]:
        """Return why this format cannot represent a draft head."""
        aux = description.aux_states
        refiner = block.refiner
        special = description.kind not in (Kind.DFLASH, Kind.DSPARK)
        full_vocab = self.kind in (Kind.DFLASH2, Kind.DOMINO)
        is_dflash = not (block.markov_rank or block.confidence or block.sample_from_anchor)
        has_norms = body.head_norms and body.first_norm and description.final_norm
        has_own_tables = description.own_lm_head or description.own_embedding
        nested_format = f"use --to {self.kind}-speculators"
        return {
            f"is of kind {description.kind}; use --to {description.kind}": (
                special and self.kind is not description.kind
            ),
            f"is not of kind {self.kind}; use --to {description.kind}": (
                not special and self.kind not in (Kind.DFLASH, Kind.DSPARK)
            ),
            "has a reduced draft vocabulary, which this format does not have; use --to outrider": (
                full_vocab and bool(description.draft_vocab)
            ),
            "has an anchor that predicts a token; use --to outrider": (
                self.kind is Kind.DFLASH2 and block.sample_from_anchor
            ),
            "has an MLP in its refiner whose width is not a multiple of its rank; use --to xpress": (
                refiner is not None and self.nested and refiner.ffn % refiner.rank > 0
            ),
            "has no Markov correction and no confidence head, and its anchor predicts no token; use --to dflash": (
                self._is_spark and is_dflash
            ),
            "has a Markov correction or a confidence head, or its anchor predicts a token; use --to dspark": (
                self.kind is Kind.DFLASH and not is_dflash
            ),
            f"has a reduced draft vocabulary; {nested_format}": bool(description.draft_vocab and not self.nested),
            f"has its own embedding or LM head; {nested_format}": (
                not (self.nested or self._is_spark) and has_own_tables
            ),
            "fuses states with a bias, or does not fuse them, or takes them after the target's final norm": (
                aux.bias or not aux.fused or aux.final
            ),
            "has no norms of queries and keys, or none before its first layer or after its last": not has_norms,
            "has biases in only some projections of its attention": body.attention_bias is not body.output_bias,
            **unlike(body),
        }


class _BlockConfig:
    """The values of a config that describe the block. They are in its `dflash_config` or at its top level."""

    def __init__(self, config: ConfigReader) -> None:
        self._tables = config.object("dflash_config"), config

    def at(self, name: str) -> ConfigReader:
        """Return the object that has a value of this name, or else the top level."""
        return next((table for table in self._tables if name in table), self._tables[-1])

    def layers_by_inputs(self) -> tuple[int, ...]:
        """Return the target layers whose states are taken, from the key of speculators."""
        if by_inputs := self.at(_IDS).integers(_IDS):
            return to_output_layers(by_inputs)
        raise OutriderError(f"config.json lacks {_IDS!r}; copy the draft head again")

    def layers_by_outputs(self, target_layers: int, count: int) -> tuple[int, ...]:
        """Return the target layers whose states are taken, from the key of the other formats.

        Without the key, these are `count` layers, evenly spaced from 1 to `target_layers` - 3.
        """
        layers = self.at("target_layer_ids").integers("target_layer_ids")
        if layers and min(layers) < 0:
            raise OutriderError(
                "target_layer_ids has -1, the target's embeddings, which are not supported; use a"
                " draft head that takes outputs of layers only"
            )
        if layers:
            return layers
        if count == 1:
            return (target_layers // 2,)
        return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))

    def anchored(self, default: bool) -> bool:
        """Return whether the column of the last committed token drafts. SpecForge says that its labels are shifted."""
        name = "sample_from_anchor" if "sample_from_anchor" in self.at("sample_from_anchor") else "shift_label"
        return self.at(name).boolean(name, default)

    def check(self, layer: ConfigReader) -> None:
        """Raise OutriderError for values that are known but not supported. `layer` is the config of the layers."""
        model_type = layer.string("model_type", "qwen3")
        markov_type = self.at("markov_head_type").string("markov_head_type", "vanilla")
        projector = self.at("projector_type").string("projector_type", Kind.DFLASH)
        switches = [name for name in _MUST_BE_FALSE if self.at(name).boolean(name, False)]
        switches += [name for name in _MUST_BE_TRUE if not self.at(name).boolean(name, True)]
        scales = [name for name in _MUST_BE_ONE if self.at(name).number(name, 1.0) != 1]
        cap = "final_logit_softcapping"
        problems = {
            f"the layers of model_type {model_type!r} are not supported; supported are {', '.join(sorted(LLAMAS))}": (
                model_type not in LLAMAS
            ),
            f"projector_type {projector!r} is not supported; supported are {', '.join(_PROJECTORS)}": (
                projector not in _PROJECTORS
            ),
            f"markov_head_type {markov_type!r} is not supported; supported is vanilla": (
                markov_type.lower() != "vanilla"
            ),
            f"the attention that {', '.join(switches)} selects is not supported; use a draft head without it": (
                bool(switches)
            ),
            f"scaled embeddings or logits ({', '.join(scales)}) are not supported; use a draft head without them": (
                bool(scales)
            ),
            f"capped logits ({cap}) are not supported; use a draft head without them": (
                cap in layer or self.at(cap).number(cap, 0.0) > 0
            ),
        }
        for problem, exists in problems.items():
            if exists:
                raise OutriderError(problem)


def _take_tables(source: Source, vocab: int, mask_token: int) -> Tensors:
    """Return the mask, the ids of the draft vocabulary, and the tables that differ from the target's."""
    tables = source.take_all(_TABLES, optional=True)
    ids = read_ids(source, vocab, tables.get("head.weight"))
    target = source.target
    embedding = tables["embedding.weight"] if "embedding.weight" in tables else shared_embedding(target)
    if not 0 <= mask_token < len(embedding):
        raise OutriderError(
            f"mask_token_id is {mask_token}, but the embedding has {len(embedding)} rows; correct config.json"
        )
    weights = {**ids, "mask": embedding[mask_token].cpu().clone()}
    if target and target.head and "head.weight" in tables:
        target_head = target.head()
        if ids:
            target_head = target_head[ids["ids"].to(target_head.device)]
        if same(tables["head.weight"], target_head):
            del tables["head.weight"]
    if target and target.embedding and "embedding.weight" in tables and same(embedding, target.embedding()):
        del tables["embedding.weight"]
    return weights | tables


def _mask_row(name: str, mask: torch.Tensor, tensors: Tensors, target: TargetInfo | None) -> int:
    """Return the row of the embedding that equals the mask.

    If there is none, and `tensors` has an embedding, the mask is written to a row that no token uses.
    """
    stored = tensors.get("embed_tokens.weight")
    embedding = shared_embedding(target) if stored is None else stored
    rows = (embedding[:, 0].to(mask) == mask[0]).nonzero()[:, 0]
    rows = rows[(embedding[rows].to(mask) == mask).all(1)]
    if len(rows):
        return int(rows[0])
    unused_id = target.unused_id if target else None
    if stored is None or unused_id is None:
        detail = "" if stored is None else " and the target's embedding has no unused row"
        refuse(name, {f"has a mask that is not the embedding of a token{detail}; train it with --mask-token-id": True})
    assert stored is not None
    assert unused_id is not None
    tensors["embed_tokens.weight"] = stored.index_copy(0, torch.tensor([unused_id]), mask[None].to(stored))
    return unused_id


_ENGINES: Mapping[Kind, str] = MappingProxyType(  # that read the flat formats
    {
        Kind.DFLASH: "DFlash (z-lab, SpecForge, SGLang, vLLM)",
        Kind.DFLASH2: "DFlash 2 (z-lab, SGLang, vLLM)",
        Kind.DSPARK: "DSpark (DeepSpec, SGLang, vLLM)",
        Kind.XPRESS: "XPress (vLLM)",
        Kind.DOMINO: "Domino (SpecForge)",
    }
)


def _nested(kind: Kind, title: str) -> Blocks:
    return Blocks(name=f"{kind}-speculators", title=title, kind=kind, nested=True)


BLOCKS: tuple[Blocks, ...] = (
    _nested(Kind.DFLASH, "DFlash (speculators, vLLM)"),
    _nested(Kind.DFLASH2, "DFlash 2 (speculators, vLLM)"),
    _nested(Kind.DSPARK, "DSpark (speculators, vLLM)"),
    _nested(Kind.XPRESS, "XPress (speculators)"),
    _nested(Kind.DOMINO, "Domino (speculators)"),
    *(Blocks(name=str(kind), title=title, kind=kind, nested=False) for kind, title in _ENGINES.items()),
)
