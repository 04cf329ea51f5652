"""The parts of block heads besides their layers, by kind: names of tensors, and values of configs."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.nn import functional

from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import Convolution, DraftBlock, Kind, Recurrence, Refiner, Selector
from outrider.models.heads.formats.base import Config, Source, Tensors

# From the names of our weights to those of a format.
Names = Mapping[str, str]
# From a name to the object of a config that has a value of this name, or else its top level.
At = Callable[[str], ConfigReader]

_PASSES, _CANDIDATES = 6, 512  # of XPress, where the config has none; engines choose the candidates
_TAPS, _GROUP, _RANK, _SELECTED = 2, 16, 256, 16  # of DFlash 2 of speculators, which leaves out its defaults
_UNCORRECTED = 1  # draft tokens of Domino of speculators, likewise
_CONFIDENCE_PREFIX = "confidence_head.proj."


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """One kind of block heads."""

    kind: Kind
    mark: str  # in `architectures`
    architecture: str  # as it is written
    speculator: str = ""  # the class of speculators; "": named after the mark
    names: Names
    nested_names: Names | None = None  # of speculators; None: the same
    # Where the config does not say: whether the column of the last committed token drafts, in a flat config and in one
    # of speculators, and whether blocks with windows are causal in one of speculators.
    anchored: bool = False
    nested_anchored: bool = False
    nested_causal: bool = True
    inside: bool = False  # whether a flat config has the values in its `dflash_config`
    # Returns fields of a `DraftBlock` from the values of a config, the weights and whether the
    # format is that of speculators.
    read: Callable[[At, Tensors, bool], dict[str, Any]] = lambda _at, _weights, _nested: {}
    # Returns values of a config, from a block, the weights and whether the format is that of speculators.
    write: Callable[[DraftBlock, Tensors, bool], Config] = lambda _block, _weights, _nested: {}

    def names_in(self, nested: bool) -> Names:
        """Return the names of the tensors of a format: that of speculators if `nested`."""
        return self.nested_names if nested and self.nested_names is not None else self.names


_MARKOV: Names = MappingProxyType(
    {"markov_in.weight": "markov_head.markov_w1.weight", "markov_out.weight": "markov_head.markov_w2.weight"}
)
# By our names: those of the flat format, and those of speculators. `mix` is stored as it is trained.
_REFINER_PARTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "token_in.weight": ("w1.weight", "token_embed.weight"),
        "column_in.weight": ("down_h.weight", "down_h.weight"),
        "block_in.weight": ("down_g.weight", "down_g.weight"),
        "join.weight": ("in_proj.weight", "in_proj.weight"),
        "mix": ("mix.L", "mix_l"),
        "gate.weight": ("mlp.gate_proj.weight", "mlp_gate.weight"),
        "up.weight": ("mlp.up_proj.weight", "mlp_up.weight"),
        "down.weight": ("mlp.down_proj.weight", "mlp_down.weight"),
        "token_out.weight": ("w2.weight", "readout.weight"),
    }
)
_REFINER: Names = {f"refiner.{name}": f"xpress_head.{flat}" for name, (flat, _) in _REFINER_PARTS.items()}
_NESTED_REFINER: Names = {f"refiner.{name}": f"refiner_head.{nested}" for name, (_, nested) in _REFINER_PARTS.items()}
_SELECTOR: Names = MappingProxyType(
    {
        "selector.before": "candidate_selector.predecessor_codebook",
        "selector.after": "candidate_selector.successor_codebook",
        "selector.gate.weight": "candidate_selector.hidden_projection.weight",
    }
)
_RECURRENCE: Names = MappingProxyType(
    {
        "recurrence.gru.weight_ih": "prefix_gru.weight_ih_l0",
        "recurrence.gru.weight_hh": "prefix_gru.weight_hh_l0",
        "recurrence.join.weight": "embed_proj.0.weight",
        "recurrence.token_out.weight": "embed_proj.2.weight",
    }
)


def _read_refiner(at: At, weights: Tensors, _nested: bool) -> dict[str, Any]:
    top = at("")
    refiner = Refiner(
        rank=weights["refiner.token_in.weight"].shape[-1],
        ffn=len(weights["refiner.gate.weight"]),
        passes=top.size("num_jacobi_passes" if "num_jacobi_passes" in top else "xpress_num_passes", _PASSES),
        candidates=_CANDIDATES,
    )
    return {"refiner": refiner}


def _write_refiner(block: DraftBlock, _weights: Tensors, nested: bool) -> Config:
    refiner = block.refiner
    assert refiner is not None
    config: Config = {"sample_from_anchor": block.sample_from_anchor, "xpress_rank": refiner.rank}
    if nested:
        return {**config, "xpress_mlp_ratio": refiner.ffn // refiner.rank, "num_jacobi_passes": refiner.passes}
    return {
        **config,
        "xpress_mlp_hidden": refiner.ffn,
        "xpress_block_size": block.size,
        "xpress_num_passes": refiner.passes,
    }


def _read_markov(_at: At, weights: Tensors, _nested: bool) -> dict[str, Any]:
    rank = weights["markov_in.weight"].shape[-1] if "markov_in.weight" in weights else 0
    return {"markov_rank": rank, "confidence": "judge.weight" in weights}


def _write_markov(block: DraftBlock, weights: Tensors, _nested: bool) -> Config:
    return {
        "sample_from_anchor": block.sample_from_anchor,
        "markov_rank": block.markov_rank,
        "markov_head_type": "vanilla",
        "confidence_head_with_markov": _confidence_uses_markov(block, weights),
        "enable_confidence_head": block.confidence,
    }


def take_confidence(source: Source, width: int) -> Tensors:
    """Return the confidence head. Columns for the previous token are zeros if the stored head does not use it."""
    if _CONFIDENCE_PREFIX + "weight" not in source:
        return {}
    weight = source.take(_CONFIDENCE_PREFIX + "weight")
    return {
        "judge.weight": functional.pad(weight, (0, max(width - weight.shape[-1], 0))),
        "judge.bias": source.take(_CONFIDENCE_PREFIX + "bias"),
    }


def stored_confidence(block: DraftBlock, weights: Tensors) -> Tensors:
    """Return the confidence head as it is stored, without the columns for the previous token if they are zeros."""
    if not block.confidence:
        return {}
    weight = weights["judge.weight"]
    stored = weight if _confidence_uses_markov(block, weights) else weight[:, : weight.shape[1] - block.markov_rank]
    return {_CONFIDENCE_PREFIX + "weight": stored, _CONFIDENCE_PREFIX + "bias": weights["judge.bias"]}


def _confidence_uses_markov(block: DraftBlock, weights: Tensors) -> bool:
    """Return whether the confidence head reads the Markov embedding of the previous token."""
    if not (block.confidence and block.markov_rank):
        return False
    return bool(weights["judge.weight"][:, -block.markov_rank :].any())


def _read_selector(at: At, _weights: Tensors, nested: bool) -> dict[str, Any]:
    def size(name: str, default: int) -> int:
        return at(name).size(name, default if nested else None)

    return {
        "convolution": Convolution(taps=size("conv_kernel_size", _TAPS), group=size("conv_group_size", _GROUP)),
        "selector": Selector(rank=size("selector_rank", _RANK), candidates=size("selector_top_k", _SELECTED)),
    }


def _write_selector(block: DraftBlock, weights: Tensors, _nested: bool) -> Config:
    assert block.convolution is not None
    assert block.selector is not None
    return {
        "conv_kernel_size": block.convolution.taps,
        "conv_group_size": block.convolution.group,
        "selector_rank": block.selector.rank,
        "selector_top_k": block.selector.candidates or len(weights["selector.after"]),
    }


def _read_recurrence(at: At, weights: Tensors, nested: bool) -> dict[str, Any]:
    name = "pure_draft_prefix_len"
    recurrence = Recurrence(
        state=weights["recurrence.gru.weight_hh"].shape[-1],
        rank=len(weights["recurrence.join.weight"]),
        first=at(name).integer(name, _UNCORRECTED if nested else 0),
    )
    return {"recurrence": recurrence}


def _write_recurrence(block: DraftBlock, _weights: Tensors, nested: bool) -> Config:
    recurrence = block.recurrence
    assert recurrence is not None
    config: Config = {"gru_hidden_dim": recurrence.state, "pure_draft_prefix_len": recurrence.first}
    if nested:
        anchored = block.sample_from_anchor
        return {**config, "logits_correction_emb_dim": recurrence.rank, "sample_from_anchor": anchored}
    names = {"projector_type": "domino", "emb_dim": recurrence.rank, "shift_label": block.sample_from_anchor}
    return {**config, **names}


BLOCK_KINDS: tuple[BlockKind, ...] = (
    BlockKind(
        kind=Kind.XPRESS,
        mark="XPress",
        architecture="Qwen3XPressModel",
        names=_REFINER,
        nested_names=_NESTED_REFINER,
        read=_read_refiner,
        write=_write_refiner,
    ),
    BlockKind(
        kind=Kind.DSPARK,
        mark="DSpark",
        architecture="Qwen3DSparkModel",
        names=_MARKOV,
        anchored=True,
        nested_anchored=True,
        read=_read_markov,
        write=_write_markov,
    ),
    BlockKind(
        kind=Kind.DFLASH2,
        mark="DFlash2",
        architecture="DFlash2DraftModel",
        speculator="DFlash2DraftModel",
        names=_SELECTOR,
        nested_causal=False,
        inside=True,
        read=_read_selector,
        write=_write_selector,
    ),
    BlockKind(
        kind=Kind.DOMINO,
        mark="Domino",
        architecture="DominoDraftModel",
        names=_RECURRENCE,
        nested_names={name: f"logits_correction.{stored}" for name, stored in _RECURRENCE.items()},
        nested_anchored=True,
        inside=True,
        read=_read_recurrence,
        write=_write_recurrence,
    ),
    # The last one, because it has none of the marks above.
    BlockKind(kind=Kind.DFLASH, mark="DFlash", architecture="DFlashDraftModel", names={}),
)


def flat_kind(config: Mapping[str, Any], names: Collection[str]) -> Kind:
    """Return the kind of a block head with a flat config, from its class, its projector or the names of its tensors."""
    inner = config.get("dflash_config")
    projector = (inner if isinstance(inner, dict) else config).get("projector_type")
    architectures = str(config.get("architectures"))
    for each in BLOCK_KINDS:
        marked = each.mark in architectures or projector == each.kind
        if marked or any(name.endswith(tuple(each.names.values())) for name in names):
            return each.kind
    return Kind.DFLASH
