"""The default description of each kind of draft head, for a target of any size."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from outrider.errors import OutriderError, either
from outrider.models.heads.description import (
    AuxStates,
    BlockView,
    Body,
    Centroids,
    Convolution,
    DraftBlock,
    Feedback,
    FuseNorm,
    FusionPoint,
    HeadDescription,
    InputFusion,
    Kind,
    MaskTokens,
    ParallelHeads,
    Recurrence,
    Refiner,
    Selector,
    SharedKV,
)

KV_SHARING = "kv-sharing"
# Kinds that fuse the hidden states of three layers.
_EAGLE3_KINDS = frozenset({"eagle3", "eagle31", "peagle", "slim"})
_DRAFT_TOKENS = 7  # default of the kinds that draft all tokens in one pass
_MAX_RANK = 256  # of what corrects a draft token by the tokens before it
_REFINER_RATIO, _JACOBI_PASSES, _CANDIDATES = 2, 6, 512  # of xpress: width of the MLP over the rank; as published
_TAPS, _GROUP, _SELECTED = 2, 16, 16  # of dflash2, as published
_MAX_STATE, _UNCORRECTED = 1024, 1  # of domino, as published
_MAX_AUX_LAYERS = 5  # layers of the target that a block head reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the target, and the options for the draft."""

    hidden: int  # of the target
    layers: int  # of the target
    vocab: int  # of the target
    epsilon: float  # of the target's norms
    draft_vocab: int = 0  # 0: all tokens
    depth: int = 1  # decoder layers, or parallel heads
    ffn: int = 0  # width of the MLP; 0: as in Llama
    width: int = 0  # of decoder layers; 0: that of the target, half of it for slim
    draft_tokens: int = 0  # draft tokens of the kinds that draft all tokens in one pass; 0: 7
    modules: int = 1  # of mtp
    # The target's keys and values, for kv-sharing: of its last layer with full attention, and of
    # the last one with a window.
    view: SharedKV | None = None
    sliding_view: SharedKV | None = None
    centroids: Centroids | None = None  # of the LM head, for kv-sharing
    own_lm_head: bool | None = None  # whether the draft has its own LM head; None: as the kind was published


def describe(kind: str, sizes: Sizes) -> HeadDescription:
    """Return the description of a draft head of this kind.

    Raises:
        OutriderError: the kind is unknown, or the sizes do not fit it.
    """
    if kind not in KINDS:
        raise OutriderError(f"kind {kind!r} is unknown; use {either(KINDS)}")
    if sizes.layers < 4 and kind in _EAGLE3_KINDS:
        raise OutriderError(f"{kind} reads three layers, and this target has {sizes.layers}; use mtp or medusa")
    if sizes.width and kind not in _EAGLE3_KINDS:
        raise OutriderError(f"{kind} is as wide as its target; leave --hidden-size out, or train slim or eagle31")
    if sizes.width > sizes.hidden:
        raise OutriderError(f"--hidden-size is {sizes.width}, and the target is {sizes.hidden} wide; use at most that")
    return KINDS[kind](sizes)


def _body(sizes: Sizes) -> Body:
    """Return decoder layers of width `sizes.width`, or of the target's width."""
    width = sizes.width or sizes.hidden
    dim = next((size for size in (128, 64, 32, 16) if width % size == 0 and width // size >= 4), 0)
    if not dim:
        raise OutriderError(
            f"a hidden size of {width} does not divide into heads; use --hidden-size with a multiple of 64"
        )
    heads = width // dim
    return Body(
        layers=sizes.depth,
        hidden=width,
        heads=heads,
        key_heads=next(size for size in (heads // 3, heads // 4, heads // 2, heads) if size and heads % size == 0),
        dim=dim,
        ffn=sizes.ffn or (width * 8 // 3 + 63) // 64 * 64,
        epsilon=sizes.epsilon,
    )


def _head(sizes: Sizes, kind: Kind, *, own_lm_head: bool | None = None, **fields: Any) -> HeadDescription:
    """Return a description for the target. `own_lm_head` is that of `sizes` if it is None."""
    return HeadDescription(
        kind=kind,
        target_hidden=sizes.hidden,
        target_layers=sizes.layers,
        vocab=sizes.vocab,
        draft_vocab=sizes.draft_vocab,
        own_lm_head=bool(sizes.own_lm_head) if own_lm_head is None else own_lm_head,
        **fields,
    )


def _eagle3(sizes: Sizes) -> HeadDescription:
    # In a small target, the fourth layer from the end carries too little information.
    last_layer = sizes.layers - (4 if sizes.layers >= 16 else 2)
    has_own_width = sizes.width not in (0, sizes.hidden)  # then the target's tables do not fit
    if has_own_width and sizes.own_lm_head is False:
        raise OutriderError(
            f"a draft of width {sizes.width} cannot share the LM head of a target of width"
            f" {sizes.hidden}; leave --shared-lm-head out, or --hidden-size"
        )
    return _head(
        sizes,
        Kind.EAGLE3,
        aux_states=AuxStates(layers=(1, sizes.layers // 2 - 1, last_layer), fused=True),
        input_fusion=InputFusion(at=FusionPoint.ATTENTION),
        body=_body(sizes),
        own_lm_head=sizes.own_lm_head is not False,
        own_embedding=has_own_width,
    )


def _eagle31(sizes: Sizes) -> HeadDescription:
    eagle3 = _eagle3(sizes)
    aux_states = replace(eagle3.aux_states, norm=FuseNorm.EACH)
    return replace(eagle3, aux_states=aux_states, feedback=Feedback.NORMED)


def _slim(sizes: Sizes) -> HeadDescription:
    half_width = (sizes.hidden // 2 + 63) // 64 * 64
    eagle31 = _eagle31(replace(sizes, width=sizes.width or half_width))
    return replace(eagle31, input_fusion=InputFusion(at=FusionPoint.PROJECTION))


def _peagle(sizes: Sizes) -> HeadDescription:
    if sizes.draft_tokens == 1:
        raise OutriderError("peagle drafts all tokens after the first with masks; use --draft-tokens 2 or more")
    # The last token of a vocabulary is padding, reserved or rare.
    masks = MaskTokens(draft_tokens=sizes.draft_tokens or _DRAFT_TOKENS, token=sizes.vocab - 1)
    return replace(_eagle3(sizes), kind=Kind.PEAGLE, masks=masks)


def _mtp(sizes: Sizes) -> HeadDescription:
    # Several modules work as in DeepSeek-V3, whose checkpoint format is the only one that can hold them.
    several = sizes.modules > 1
    return _head(
        sizes,
        Kind.MTP,
        aux_states=AuxStates(layers=(sizes.layers - 1,), final=True),
        input_fusion=InputFusion(at=FusionPoint.PROJECTION, zero_first=several),
        body=_body(sizes),
        modules=sizes.modules,
        feedback=Feedback.RAW if several else Feedback.NORMED,
    )


def _kv_sharing(sizes: Sizes) -> HeadDescription:
    view = sizes.view
    if view is None:
        raise OutriderError(
            "kv-sharing reads the keys and values of the target, and this target does not export them; use mtp"
        )
    _check_centroids(sizes)
    # As in Gemma 4's assistants, all layers but the last one attend to a window if the target has such layers.
    shared_kv = (*((sizes.sliding_view or view,) * (sizes.depth - 1)), view)
    # As many query heads as fit into the width, in equal groups for the key heads.
    key_heads = math.lcm(*(shared.key_heads for shared in shared_kv))
    heads = max(sizes.hidden // view.dim // key_heads, 1) * key_heads
    return _head(
        sizes,
        Kind.KV_SHARING,
        aux_states=AuxStates(layers=(sizes.layers - 1,), final=True),
        input_fusion=InputFusion(at=FusionPoint.PROJECTION),
        body=replace(_body(sizes), heads=heads, key_heads=view.key_heads, dim=view.dim, head_norms=True),
        shared_kv=shared_kv,
        centroids=sizes.centroids,
    )


def _check_centroids(sizes: Sizes) -> None:
    """Raise OutriderError if the tokens do not divide into the clusters, or there are too few clusters."""
    if sizes.centroids is None:
        return
    count, top_k = sizes.centroids.count, sizes.centroids.top_k
    vocab = sizes.draft_vocab or sizes.vocab
    if vocab % count:
        divisor = next(number for number in range(min(count, vocab), 0, -1) if vocab % number == 0)
        raise OutriderError(
            f"--centroids is {count}, and {vocab} tokens do not divide into so many clusters of"
            f" equal size; use {divisor}, or another divisor of {vocab}"
        )
    if top_k > count:
        raise OutriderError(f"--centroid-top-k is {top_k}, and there are {count} clusters; use {count} at most")


def _parallel_heads(kind: Kind) -> Callable[[Sizes], HeadDescription]:
    """Return a function that describes a draft of this kind, medusa or hydra."""

    def describe_kind(sizes: Sizes) -> HeadDescription:
        own_lm_head = bool(sizes.own_lm_head)
        heads = sizes.depth if sizes.depth > 1 else 4
        return _head(
            sizes,
            kind,
            aux_states=AuxStates(layers=(sizes.layers - 1,), final=True),
            stack=ParallelHeads(heads=heads, shared_head=not own_lm_head, one_head=own_lm_head),
        )

    return describe_kind


def _dflash(sizes: Sizes, kind: Kind = Kind.DFLASH, **parts: Any) -> HeadDescription:
    """Return a draft whose block has these parts. By default, the first column predicts no token."""
    draft_tokens = sizes.draft_tokens or _DRAFT_TOKENS
    return _head(
        sizes,
        kind,
        aux_states=AuxStates(layers=_block_aux_layers(sizes.layers), fused=True),
        body=replace(_body(sizes), head_norms=True),
        block=DraftBlock(**{"size": draft_tokens + 1, **parts}),
    )


def _rank(sizes: Sizes) -> int:
    """Return the rank of a correction.

    It is at most a quarter of the width, because the two tables of a correction have a row for every token.
    """
    return max(min(_MAX_RANK, sizes.hidden // 4), 1)


def _jetspec(sizes: Sizes) -> HeadDescription:
    return _dflash(sizes, views=(BlockView(causal=True),) * sizes.depth)


def _dflash2(sizes: Sizes) -> HeadDescription:
    return _dflash(
        sizes,
        Kind.DFLASH2,
        convolution=Convolution(taps=_TAPS, group=math.gcd(_GROUP, sizes.hidden)),
        selector=Selector(rank=_rank(sizes), candidates=_SELECTED),
    )


def _dspark(sizes: Sizes) -> HeadDescription:
    draft_tokens = sizes.draft_tokens or _DRAFT_TOKENS
    parts = {"size": draft_tokens, "sample_from_anchor": True, "markov_rank": _rank(sizes), "confidence": True}
    return _dflash(sizes, Kind.DSPARK, **parts)


def _domino(sizes: Sizes) -> HeadDescription:
    recurrence = Recurrence(state=min(_MAX_STATE, sizes.hidden), rank=_rank(sizes), first=_UNCORRECTED)
    draft_tokens = sizes.draft_tokens or _DRAFT_TOKENS
    return _dflash(sizes, Kind.DOMINO, size=draft_tokens, sample_from_anchor=True, recurrence=recurrence)


def _xpress(sizes: Sizes) -> HeadDescription:
    rank = _rank(sizes)
    refiner = Refiner(rank=rank, ffn=_REFINER_RATIO * rank, passes=_JACOBI_PASSES, candidates=_CANDIDATES)
    return _dflash(sizes, Kind.XPRESS, refiner=refiner)


def _block_aux_layers(layers: int) -> tuple[int, ...]:
    """Return evenly spaced layers, from the second one to one near the end."""
    # In a small target, the third layer from the end carries too little information.
    last = max(layers - (3 if layers >= 16 else 2), 0)
    first = min(1, last)
    count = min(_MAX_AUX_LAYERS, last - first + 1)
    return tuple(first + (last - first) * i // max(count - 1, 1) for i in range(count))


KINDS: Mapping[str, Callable[[Sizes], HeadDescription]] = MappingProxyType(
    {
        "eagle3": _eagle3,
        "eagle31": _eagle31,
        "peagle": _peagle,
        "slim": _slim,
        "mtp": _mtp,
        "medusa": _parallel_heads(Kind.MEDUSA),
        "hydra": _parallel_heads(Kind.HYDRA),
        "dflash": _dflash,
        "jetspec": _jetspec,
        "dflash2": _dflash2,
        "dspark": _dspark,
        "xpress": _xpress,
        "domino": _domino,
        KV_SHARING: _kv_sharing,
    }
)
