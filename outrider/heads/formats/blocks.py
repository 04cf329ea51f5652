"""DFlash and DSpark, as z-lab, DeepSpec and SpecForge write them down, and as speculators does.

All have the same layers. What they disagree about shows in no tensor: speculators counts the target's layers by inputs,
the others by outputs; and whether the column of the text's last token guesses too (`sample_from_anchor`) goes without
saying in DSpark, and without being so in DFlash. Read the other way, every guess stands one place off.

The mask is a row of the table of embeddings, which is the target's where the draft brings none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from outrider.errors import OutriderError
from outrider.heads.config import Settings
from outrider.heads.description import AuxStates, DraftBlock, HeadDescription, Kind
from outrider.heads.formats.base import (
    Config,
    Source,
    TargetInfo,
    Tensors,
    refuse,
    same,
    shared_embedding,
    shared_lm_head,
)
from outrider.heads.formats.eagle3 import by_outputs, read_ids, write_ids
from outrider.heads.formats.llama import LLAMAS, layer_tensors, read_body, take_layer, unlike, write_body
from outrider.heads.formats.speculators import speculators

_TABLES: Mapping[str, str] = MappingProxyType(
    {"head.weight": "lm_head.weight", "embedding.weight": "embed_tokens.weight"}
)
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "fuse.weight": "fc.weight",
        "state_norm.weight": "hidden_norm.weight",
        "norm.weight": "norm.weight",
        "markov_in.weight": "markov_head.markov_w1.weight",
        "markov_out.weight": "markov_head.markov_w2.weight",
    }
)
_NEEDED = 3  # the first of these
_JUDGE = "confidence_head.proj."
_IDS = "aux_hidden_state_layer_ids"  # by inputs
_OFF = ("is_causal", "causal", "use_swa", "attention_sink_bias", "add_swa_attention_sink_bias")
_ON = ("is_neox_style", "rope_is_neox_style", "use_aux_hidden_state")
_ANCHORS = 512  # of a text in training, which DeepSpec's model asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """One of the layouts: flat, or speculators' config around a config."""

    name: str
    title: str
    spark: bool  # DSpark
    nested: bool
    file: str = "model.safetensors"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        if self.nested or "speculators_model_type" in config:
            return self.nested and config.get("speculators_model_type") == self._kind
        spark = "DSpark" in str(config.get("architectures")) or _NAMES["markov_in.weight"] in names
        return spark is self.spark and {"fc.weight", "hidden_norm.weight"} <= set(names)

    def module(self, names: Collection[str]) -> str | None:
        return None

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        layer = config.table("transformer_layer_config") if self.nested else config
        here = _Asked(config)
        here.check(layer)
        if self.spark and self.nested and "sample_from_anchor" not in config:
            raise OutriderError("it does not say sample_from_anchor; add it to config.json, as it was trained")
        source.ignore(["verifier_lm_head.weight", "verifier_norm.weight"], "the target's own, for training")
        body = read_body(layer, layer.size("num_hidden_layers"), lambda name: f"layers.0.{name}" in source)
        layers, vocab = source.target_layers(), layer.size("vocab_size")
        weights = _tables(source, vocab, here.at("mask_token_id").whole("mask_token_id"))
        for i, (ours, theirs) in enumerate(_NAMES.items()):
            if i < _NEEDED or theirs in source:
                weights[ours] = source.take(theirs)
        for i in range(body.layers):
            weights |= take_layer(source, f"layers.{i}.", f"layers.{i}.")
        rank = weights["markov_in.weight"].shape[-1] if "markov_in.weight" in weights else 0
        weights |= _judge(source, body.hidden + rank)
        block = DraftBlock(
            size=here.at("block_size").size("block_size"),
            sample_from_anchor=here.at("sample_from_anchor").flag("sample_from_anchor", self.spark),
            markov_rank=rank,
            confidence="judge.weight" in weights,
        )
        description = HeadDescription(
            kind=Kind.DSPARK if rank or block.confidence else Kind.DFLASH,
            target_hidden=here.at("target_hidden_size").size("target_hidden_size", body.hidden),
            target_layers=layers,
            vocab=vocab,
            draft_vocab=len(weights["ids"]) if "ids" in weights else 0,
            aux_states=AuxStates(
                layers=here.by_inputs() if self.nested else here.by_outputs(layers, body.layers), fused=True
            ),
            body=body,
            block=block,
            own_lm_head="head.weight" in weights,
            own_embedding="embedding.weight" in weights,
        )
        return description, weights

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it, body, block = description, description.body, description.block
        refuse(self.name, {f"is of kind {it.kind}": block is None})
        assert body is not None
        assert block is not None
        refuse(self.name, self._unfit(it, block))
        tensors = {theirs: weights[ours] for ours, theirs in {**_NAMES, **_TABLES}.items() if ours in weights}
        for i in range(body.layers):
            tensors |= layer_tensors(weights, i, f"layers.{i}.")
        if self.nested:
            tensors |= {} if it.own_lm_head else {"lm_head.weight": shared_lm_head(partner, weights.get("ids"))}
            tensors |= {} if it.own_embedding else {"embed_tokens.weight": shared_embedding(partner)}
            tensors |= write_ids(it, weights) if it.draft_vocab else {}
        base, own = (
            write_body(body, it.vocab, partner),
            {"block_size": block.size, "target_hidden_size": it.target_hidden},
        )
        config: Config = {**own, "num_target_layers": it.target_layers}
        if self.spark:
            judge, sees = _written_judge(weights, body.hidden)
            tensors |= judge
            config |= {"sample_from_anchor": block.sample_from_anchor, "markov_rank": block.markov_rank}
            config |= {"markov_head_type": "vanilla", "confidence_head_with_markov": sees}
            config["enable_confidence_head"] = block.confidence
        mask = _row(self.name, weights["mask"], tensors, partner)
        if not self.nested:
            where = {"mask_token_id": mask, "target_layer_ids": list(it.aux_states.layers)}
            kind = "Qwen3DSparkModel" if self.spark else "DFlashDraftModel"
            more = {**where, "num_anchors": _ANCHORS} if self.spark else {"dflash_config": where}
            return {"architectures": [kind], **base, **config, **more}, tensors
        kind = "DSparkSpeculator" if self.spark else "DFlashSpeculator"
        config |= speculators(self._kind, kind, partner, block.draft_tokens)
        config |= {"transformer_layer_config": base, "draft_vocab_size": it.output_vocab, "mask_token_id": mask}
        config[_IDS] = [layer + 1 for layer in it.aux_states.layers]
        config["sliding_window_non_causal"] = True  # else vLLM makes all layers causal, not sliding ones alone
        return config, tensors

    @property
    def _kind(self) -> str:
        return "dspark" if self.spark else "dflash"

    def _unfit(self, it: HeadDescription, block: DraftBlock) -> dict[str, bool]:
        """Why this layout cannot hold a draft."""
        body = it.body
        assert body is not None
        plain = not (block.markov_rank or block.confidence or block.sample_from_anchor)
        bare = body.head_norms and body.first_norm and it.final_norm
        return {
            "neither corrects nor judges its guesses, nor begins with its anchor: write dflash": self.spark and plain,
            "corrects or judges its guesses, or begins with its anchor: write dspark": not (self.spark or plain),
            f"guesses a part of the vocabulary: write {self._kind}-speculators": bool(
                it.draft_vocab and not self.nested
            ),
            f"has tables of its own: write {self._kind}-speculators": not (self.nested or self.spark)
            and (it.own_lm_head or it.own_embedding),
            "fuses with a bias, or not at all, or behind the target's final norm": it.aux_states.bias
            or not it.aux_states.fused
            or it.aux_states.final,
            "has no norms of queries and keys, or none before its first layer or behind its last": not bare,
            "has biases at some of its attention's matrices alone": body.attention_bias is not body.output_bias,
            **unlike(body),
        }


class _Asked:
    """What a config says of a block, in its `dflash_config` or at its top."""

    def __init__(self, config: Settings) -> None:
        self._places = config.table("dflash_config"), config

    def at(self, name: str) -> Settings:
        """Where a name stands."""
        return next((place for place in self._places if name in place), self._places[-1])

    def by_inputs(self) -> tuple[int, ...]:
        """The layers that are tapped, as speculators names them."""
        if found := self.at(_IDS).wholes(_IDS):
            return by_outputs(found)
        raise OutriderError(f"config.json lacks {_IDS!r}; copy the draft again")

    def by_outputs(self, layers: int, count: int) -> tuple[int, ...]:
        """The same where the others name them; else as many as the draft has layers, evenly from 1 to N - 3."""
        found = self.at("target_layer_ids").wholes("target_layer_ids")
        if found and min(found) < 0:
            raise OutriderError(
                "its target_layer_ids begin with -1, the target's embeddings, which no draft reads here"
            )
        if found or count == 1:
            return found or (layers // 2,)
        return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))

    def check(self, layer: Settings) -> None:
        """Refuse what is known, and computed otherwise than here."""
        kind, head = layer.text("model_type", "qwen3"), self.at("markov_head_type").text("markov_head_type", "vanilla")
        projector = self.at("projector_type").text("projector_type", "dflash")
        wrong = [name for name in _OFF if self.at(name).flag(name, False)]
        wrong += [name for name in _ON if not self.at(name).flag(name, True)]
        problems = {
            f"model_type is {kind!r}, and what its layers compute is not known here": kind not in LLAMAS,
            f"its projector_type is {projector!r}; known are dflash and dspark": projector not in ("dflash", "dspark"),
            f"its markov_head_type is {head!r}; known is vanilla": head.lower() != "vanilla",
            f"it asks for another attention by {', '.join(wrong)}": bool(wrong),
            "it caps its logits (final_logit_softcapping)": "final_logit_softcapping" in layer,
        }
        if found := [text for text, holds in problems.items() if holds]:
            raise OutriderError(found[0])


def _tables(source: Source, vocab: int, mask: int) -> Tensors:
    """The mask, the tables that are not mere copies of the target's, and the ids of what is guessed."""
    held = {ours: source.take(theirs) for ours, theirs in _TABLES.items() if theirs in source}
    ids, partner = read_ids(source, vocab, held.get("head.weight")), source.partner
    table = held["embedding.weight"] if "embedding.weight" in held else shared_embedding(partner)
    if not 0 <= mask < len(table):
        raise OutriderError(f"mask_token_id is {mask}, and the table of embeddings has {len(table)} rows")
    out = {**ids, "mask": table[mask].cpu().clone()}
    if partner and partner.head and "head.weight" in held:
        theirs = partner.head()
        if same(held["head.weight"], theirs[ids["ids"].to(theirs.device)] if ids else theirs):
            del held["head.weight"]
    if partner and partner.embedding and "embedding.weight" in held and same(table, partner.embedding()):
        del held["embedding.weight"]
    return out | held


def _judge(source: Source, width: int) -> Tensors:
    """The confidence head; columns for the token before are zeros where it does not see that."""
    if _JUDGE + "weight" not in source:
        return {}
    weight = source.take(_JUDGE + "weight")
    return {
        "judge.weight": functional.pad(weight, (0, max(width - weight.shape[-1], 0))),
        "judge.bias": source.take(_JUDGE + "bias"),
    }


def _written_judge(weights: Tensors, width: int) -> tuple[Tensors, bool]:
    """The inverse, and whether it sees the token before."""
    if "judge.weight" not in weights:
        return {}, False
    weight = weights["judge.weight"]
    sees = bool(weight[:, width:].any())
    return {_JUDGE + "weight": weight if sees else weight[:, :width], _JUDGE + "bias": weights["judge.bias"]}, sees


def _row(name: str, mask: torch.Tensor, tensors: Tensors, partner: TargetInfo | None) -> int:
    """Which row of the table is the mask; where the table is written too, a row that no token has can become it."""
    own = tensors.get("embed_tokens.weight")
    table = shared_embedding(partner) if own is None else own
    rows = (table[:, 0].to(mask) == mask[0]).nonzero()[:, 0]
    rows = rows[(table[rows].to(mask) == mask).all(1)]
    if len(rows):
        return int(rows[0])
    spare = partner.spare if partner else None
    if own is None or spare is None:
        why = " (the target's table has no row to spare)" if own is not None else ""
        refuse(name, {f"has a mask that is no token's embedding{why}; train it with --mask-token-id": True})
    assert own is not None
    assert spare is not None
    tensors["embed_tokens.weight"] = own.index_copy(0, torch.tensor([spare]), mask[None].to(own))
    return spare


BLOCKS: tuple[Blocks, ...] = (
    Blocks(name="dflash-speculators", title="DFlash (speculators, vLLM)", spark=False, nested=True),
    Blocks(name="dspark-speculators", title="DSpark (speculators, vLLM)", spark=True, nested=True),
    Blocks(name="dflash", title="DFlash (z-lab, SpecForge, SGLang, vLLM)", spark=False, nested=False),
    Blocks(name="dspark", title="DSpark (DeepSpec, SGLang, vLLM)", spark=True, nested=False),
)
