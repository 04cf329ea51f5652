"""DFlash, DSpark and XPress in the formats of z-lab, DeepSpec, SpecForge and vLLM, and in that of speculators.

The layers are the same in all formats. The formats differ in two ways that tensors do not show.
Speculators counts the target's layers by inputs, the others by outputs. And the column of the last
committed token predicts a draft token (`sample_from_anchor`) by default in DSpark, but not in
DFlash and XPress. If this is misread, each draft token is shifted by one position.

The mask is a row of the embedding, which is the target's if the draft head has none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import AuxStates, Body, DraftBlock, HeadDescription, Kind, Refiner
from outrider.models.heads.formats.base import (
    Config,
    Source,
    TargetInfo,
    Tensors,
    refuse,
    same,
    shared_embedding,
    shared_lm_head,
    stored,
)
from outrider.models.heads.formats.eagle3 import read_ids, to_output_layers, write_ids
from outrider.models.heads.formats.llama import LLAMAS, layer_tensors, read_body, take_layer, unlike, write_body
from outrider.models.heads.formats.speculators import speculators

_TABLES: Mapping[str, str] = MappingProxyType(
    {"head.weight": "lm_head.weight", "embedding.weight": "embed_tokens.weight"}
)
_REQUIRED: Mapping[str, str] = MappingProxyType(
    {
        "fuse.weight": "fc.weight",
        "state_norm.weight": "hidden_norm.weight",
        "norm.weight": "norm.weight",
    }
)
_MARKOV: Mapping[str, str] = MappingProxyType(
    {
        "markov_in.weight": "markov_head.markov_w1.weight",
        "markov_out.weight": "markov_head.markov_w2.weight",
    }
)
# The refiner of XPress as it is stored for vLLM, and by speculators. The weight `mix` is stored as
# it is trained.
_REFINER: Mapping[str, str] = MappingProxyType(
    {
        "refiner.token_in.weight": "xpress_head.w1.weight",
        "refiner.column_in.weight": "xpress_head.down_h.weight",
        "refiner.block_in.weight": "xpress_head.down_g.weight",
        "refiner.join.weight": "xpress_head.in_proj.weight",
        "refiner.mix": "xpress_head.mix.L",
        "refiner.gate.weight": "xpress_head.mlp.gate_proj.weight",
        "refiner.up.weight": "xpress_head.mlp.up_proj.weight",
        "refiner.down.weight": "xpress_head.mlp.down_proj.weight",
        "refiner.token_out.weight": "xpress_head.w2.weight",
    }
)
_NESTED_REFINER: Mapping[str, str] = MappingProxyType(
    {
        "refiner.token_in.weight": "refiner_head.token_embed.weight",
        "refiner.column_in.weight": "refiner_head.down_h.weight",
        "refiner.block_in.weight": "refiner_head.down_g.weight",
        "refiner.join.weight": "refiner_head.in_proj.weight",
        "refiner.mix": "refiner_head.mix_l",
        "refiner.gate.weight": "refiner_head.mlp_gate.weight",
        "refiner.up.weight": "refiner_head.mlp_up.weight",
        "refiner.down.weight": "refiner_head.mlp_down.weight",
        "refiner.token_out.weight": "refiner_head.readout.weight",
    }
)
_PASSES, _CANDIDATES = 6, 512  # of XPress, where the config has none; engines choose the candidates
_CONFIDENCE_PREFIX = "confidence_head.proj."
_IDS = "aux_hidden_state_layer_ids"  # counted by inputs
# Switches of the attention, and the values that are supported.
_MUST_BE_FALSE = ("is_causal", "causal", "use_swa", "attention_sink_bias", "add_swa_attention_sink_bias")
_MUST_BE_TRUE = ("is_neox_style", "rope_is_neox_style", "use_aux_hidden_state")
_SPECULATORS: Mapping[Kind, str] = MappingProxyType(  # classes of speculators
    {Kind.DFLASH: "DFlashSpeculator", Kind.DSPARK: "DSparkSpeculator", Kind.XPRESS: "XPressSpeculator"}
)
_NUM_ANCHORS = 512  # blocks of a sequence in training; DeepSpec's model requires the key


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """One of the formats: a flat config, or that of speculators with nested layers."""

    name: str
    title: str
    kind: Kind  # dflash, dspark or xpress
    nested: bool
    file: str = "model.safetensors"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        if self.nested or "speculators_model_type" in config:
            return self.nested and config.get("speculators_model_type") == self.kind
        kind = Kind.DFLASH
        if "XPress" in str(config.get("architectures")) or _REFINER["refiner.mix"] in names:
            kind = Kind.XPRESS
        elif "DSpark" in str(config.get("architectures")) or _MARKOV["markov_in.weight"] in names:
            kind = Kind.DSPARK
        return kind is self.kind and {"fc.weight", "hidden_norm.weight"} <= set(names)

    def module(self, names: Collection[str]) -> str | None:
        return None

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        layer = config.object("transformer_layer_config") if self.nested else config
        block_config = _BlockConfig(config)
        block_config.check(layer)
        if self._is_spark and self.nested and "sample_from_anchor" not in config:
            raise OutriderError("config.json lacks sample_from_anchor; add the value that the training used")
        source.ignore(["verifier_lm_head.weight", "verifier_norm.weight"], "weights of the target, for training only")
        body = read_body(layer, layer.size("num_hidden_layers"), lambda name: f"layers.0.{name}" in source)
        target_layers = source.target_layers()
        vocab = layer.size("vocab_size")
        mask_token = block_config.at("mask_token_id").integer("mask_token_id")
        weights = _take_tables(source, vocab, mask_token)
        weights |= source.take_all(_REQUIRED)
        weights |= source.take_all(_MARKOV, optional=True)
        weights |= source.take_all(self._refiner_names)
        for i in range(body.layers):
            weights |= take_layer(source, f"layers.{i}.", f"layers.{i}.")
        rank = weights["markov_in.weight"].shape[-1] if "markov_in.weight" in weights else 0
        weights |= _take_confidence(source, body.hidden + rank)
        block = DraftBlock(
            size=block_config.at("block_size").size("block_size"),
            sample_from_anchor=block_config.at("sample_from_anchor").boolean("sample_from_anchor", self._is_spark),
            markov_rank=rank,
            confidence="judge.weight" in weights,
            refiner=_read_refiner(config, weights) if self.kind is Kind.XPRESS else None,
        )
        target_hidden = block_config.at("target_hidden_size").size("target_hidden_size", body.hidden)
        if self.nested:
            aux_layers = block_config.layers_by_inputs()
        else:
            aux_layers = block_config.layers_by_outputs(target_layers, body.layers)
        description = HeadDescription(
            kind=self.kind if block.refiner else Kind.DSPARK if rank or block.confidence else Kind.DFLASH,
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

    def write(
        self, description: HeadDescription, weights: Tensors, target: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        body = description.body
        block = description.block
        refuse(self.name, {f"is of kind {description.kind}": block is None})
        assert body is not None
        assert block is not None
        refuse(self.name, self._reasons(description, body, block))
        tensors = self._tensors(description, body, weights, target)
        base = write_body(body, description.vocab, target)
        config: Config = {
            "block_size": block.size,
            "target_hidden_size": description.target_hidden,
            "num_target_layers": description.target_layers,
        }
        if block.refiner:
            config |= self._refiner_config(block, block.refiner)
        if self._is_spark:
            confidence = _written_confidence(weights, body.hidden)
            tensors |= confidence.tensors
            config["sample_from_anchor"] = block.sample_from_anchor
            config["markov_rank"] = block.markov_rank
            config["markov_head_type"] = "vanilla"
            config["confidence_head_with_markov"] = confidence.uses_markov
            config["enable_confidence_head"] = block.confidence
        mask_token = _mask_row(self.name, weights["mask"], tensors, target)
        aux_layers = description.aux_states.layers
        if self.nested:
            config |= speculators(self.kind, _SPECULATORS[self.kind], target, block.draft_tokens)
            config["transformer_layer_config"] = base
            config["draft_vocab_size"] = description.output_vocab
            config["mask_token_id"] = mask_token
            config[_IDS] = [layer + 1 for layer in aux_layers]
            # Otherwise vLLM makes the attention of all layers causal, not only of sliding ones.
            config["sliding_window_non_causal"] = True
            return config, tensors
        inputs = {"mask_token_id": mask_token, "target_layer_ids": list(aux_layers)}
        if self._is_spark:
            config = {**base, **config, **inputs, "num_anchors": _NUM_ANCHORS}
            return {"architectures": ["Qwen3DSparkModel"], **config}, tensors
        architecture = "Qwen3XPressModel" if block.refiner else "DFlashDraftModel"
        return {"architectures": [architecture], **base, **config, "dflash_config": inputs}, tensors

    def _tensors(
        self, description: HeadDescription, body: Body, weights: Tensors, target: TargetInfo | None
    ) -> Tensors:
        """Return all tensors except for the confidence head."""
        stored_names = {**_REQUIRED, **_MARKOV, **_TABLES, **self._refiner_names}
        tensors = stored(weights, stored_names, optional=True)
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
    def _refiner_names(self) -> Mapping[str, str]:
        """The stored names of the weights of the refiner."""
        if self.kind is not Kind.XPRESS:
            return {}
        return _NESTED_REFINER if self.nested else _REFINER

    def _refiner_config(self, block: DraftBlock, refiner: Refiner) -> Config:
        """Return the values of a config that describe a refiner."""
        config: Config = {"sample_from_anchor": block.sample_from_anchor, "xpress_rank": refiner.rank}
        if self.nested:
            return {**config, "xpress_mlp_ratio": refiner.ffn // refiner.rank, "num_jacobi_passes": refiner.passes}
        return {
            **config,
            "xpress_mlp_hidden": refiner.ffn,
            "xpress_block_size": block.size,
            "xpress_num_passes": refiner.passes,
        }

    def _reasons(self, description: HeadDescription, body: Body, block: DraftBlock) -> dict[str, bool]:
        """Return why this format cannot represent a draft head."""
        aux = description.aux_states
        refiner = block.refiner
        is_dflash = not (block.markov_rank or block.confidence or block.sample_from_anchor)
        has_norms = body.head_norms and body.first_norm and description.final_norm
        has_own_tables = description.own_lm_head or description.own_embedding
        nested_format = f"use --to {self.kind}-speculators"
        return {
            "has a causal refiner; use --to xpress": refiner is not None and self.kind is not Kind.XPRESS,
            f"has no causal refiner; use --to {description.kind}": refiner is None and self.kind is Kind.XPRESS,
            "has an MLP in its refiner whose width is no multiple of its rank; use --to xpress": (
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

    def check(self, layer: ConfigReader) -> None:
        """Raise OutriderError for values that are known but not supported. `layer` is the config of the layers."""
        model_type = layer.string("model_type", "qwen3")
        markov_type = self.at("markov_head_type").string("markov_head_type", "vanilla")
        projector = self.at("projector_type").string("projector_type", "dflash")
        switches = [name for name in _MUST_BE_FALSE if self.at(name).boolean(name, False)]
        switches += [name for name in _MUST_BE_TRUE if not self.at(name).boolean(name, True)]
        problems = {
            f"the layers of model_type {model_type!r} are not supported; supported are {', '.join(sorted(LLAMAS))}": (
                model_type not in LLAMAS
            ),
            f"projector_type {projector!r} is not supported; supported are dflash and dspark": (
                projector not in ("dflash", "dspark")
            ),
            f"markov_head_type {markov_type!r} is not supported; supported is vanilla": (
                markov_type.lower() != "vanilla"
            ),
            f"the attention that {', '.join(switches)} selects is not supported; use a draft head without it": (
                bool(switches)
            ),
            "capped logits (final_logit_softcapping) are not supported; use a draft head without them": (
                "final_logit_softcapping" in layer
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


def _read_refiner(config: ConfigReader, weights: Tensors) -> Refiner:
    """Return the description of a refiner from the shapes of its weights and from a config."""
    passes = "num_jacobi_passes" if "num_jacobi_passes" in config else "xpress_num_passes"
    return Refiner(
        rank=weights["refiner.token_in.weight"].shape[-1],
        ffn=len(weights["refiner.gate.weight"]),
        passes=config.size(passes, _PASSES),
        candidates=_CANDIDATES,
    )


def _take_confidence(source: Source, width: int) -> Tensors:
    """Return the confidence head. Columns for the previous token are zeros if the stored head does not use it."""
    if _CONFIDENCE_PREFIX + "weight" not in source:
        return {}
    weight = source.take(_CONFIDENCE_PREFIX + "weight")
    return {
        "judge.weight": functional.pad(weight, (0, max(width - weight.shape[-1], 0))),
        "judge.bias": source.take(_CONFIDENCE_PREFIX + "bias"),
    }


class _WrittenConfidence(NamedTuple):
    """The stored confidence head."""

    tensors: Tensors
    uses_markov: bool  # its input includes the Markov embedding of the previous token


def _written_confidence(weights: Tensors, hidden: int) -> _WrittenConfidence:
    """Return the confidence head as it is stored, without the columns for the previous token if they are zeros."""
    if "judge.weight" not in weights:
        return _WrittenConfidence({}, False)
    weight = weights["judge.weight"]
    uses_markov = bool(weight[:, hidden:].any())
    tensors = {
        _CONFIDENCE_PREFIX + "weight": weight if uses_markov else weight[:, :hidden],
        _CONFIDENCE_PREFIX + "bias": weights["judge.bias"],
    }
    return _WrittenConfidence(tensors, uses_markov)


def _mask_row(name: str, mask: torch.Tensor, tensors: Tensors, target: TargetInfo | None) -> int:
    """Return the row of the embedding that equals the mask.

    If there is none, and `tensors` has an embedding, the mask is written to a row that no token
    uses.
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


BLOCKS: tuple[Blocks, ...] = (
    Blocks(name="dflash-speculators", title="DFlash (speculators, vLLM)", kind=Kind.DFLASH, nested=True),
    Blocks(name="dspark-speculators", title="DSpark (speculators, vLLM)", kind=Kind.DSPARK, nested=True),
    Blocks(name="xpress-speculators", title="XPress (speculators)", kind=Kind.XPRESS, nested=True),
    Blocks(name="dflash", title="DFlash (z-lab, SpecForge, SGLang, vLLM)", kind=Kind.DFLASH, nested=False),
    Blocks(name="dspark", title="DSpark (DeepSpec, SGLang, vLLM)", kind=Kind.DSPARK, nested=False),
    Blocks(name="xpress", title="XPress (vLLM)", kind=Kind.XPRESS, nested=False),
)
