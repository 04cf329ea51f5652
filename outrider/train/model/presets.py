"""What is trained where nothing else is said, for a target of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from outrider.errors import OutriderError
from outrider.heads.description import (
    AuxStates,
    Body,
    DraftBlock,
    Feedback,
    FuseNorm,
    FusionPoint,
    HeadDescription,
    InputFusion,
    Kind,
    MaskTokens,
    ParallelHeads,
    SharedKV,
)

KV_SHARING = "kv-sharing"
_THREE = frozenset({"eagle3", "eagle31", "peagle", "slim"})  # kinds that read three layers, and fuse them
_GUESSES = 7  # of a pass that makes them all
_RANK, _TAPS = 256, 5  # at most: of the correction by the token before; layers that a block reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the target is, and how much of a draft is wanted."""

    hidden: int
    layers: int
    vocab: int
    epsilon: float
    draft_vocab: int = 0  # 0 = all
    depth: int = 1  # decoder layers, or independent heads
    ffn: int = 0  # 0 = as Llama has it
    width: int = 0  # of decoder layers; 0 = the target's, for slim half of it
    guesses: int = 0  # of a pass that makes them all; 0 = 7
    modules: int = 1  # for multi-token prediction
    view: SharedKV | None = None  # what can be seen of the target's memory
    own_lm_head: bool | None = None  # an output layer of its own, or the target's; None = as the kind is published


def describe(kind: str, sizes: Sizes) -> HeadDescription:
    """The description of a draft of this kind.

    Raises:
        OutriderError: there is no such kind, or the target is too small for it.
    """
    if kind not in KINDS:
        raise OutriderError(f"kind {kind!r} is unknown; use {', '.join(KINDS)}")
    if sizes.layers < 4 and kind in _THREE:
        raise OutriderError(f"{kind} reads three layers, and this target has {sizes.layers}; use mtp or medusa")
    if sizes.width and kind not in _THREE:
        raise OutriderError(f"{kind} is as wide as its target; leave --hidden-size out, or train slim or eagle31")
    if sizes.width > sizes.hidden:
        raise OutriderError(f"--hidden-size is {sizes.width}, and the target is {sizes.hidden} wide; use that at most")
    return KINDS[kind](sizes)


def body(sizes: Sizes) -> Body:
    """Decoder layers of the target's width, or of the one that is asked for."""
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


def _eagle3(sizes: Sizes) -> HeadDescription:
    # Small targets say little four layers before their end, where large ones are tapped.
    high = sizes.layers - (4 if sizes.layers >= 16 else 2)
    own = sizes.width not in (0, sizes.hidden)  # the target's tables have another width
    if own and sizes.own_lm_head is False:
        raise OutriderError(
            f"a draft {sizes.width} wide cannot use the output layer of a target {sizes.hidden} wide; leave"
            " --shared-lm-head out, or --hidden-size"
        )
    return HeadDescription(
        kind=Kind.EAGLE3,
        target_hidden=sizes.hidden,
        target_layers=sizes.layers,
        vocab=sizes.vocab,
        draft_vocab=sizes.draft_vocab,
        aux_states=AuxStates(layers=(1, sizes.layers // 2 - 1, high), fused=True),
        input_fusion=InputFusion(at=FusionPoint.ATTENTION),
        body=body(sizes),
        own_lm_head=sizes.own_lm_head is not False,
        own_embedding=own,
    )


def _eagle31(sizes: Sizes) -> HeadDescription:
    plain = _eagle3(sizes)
    return replace(plain, aux_states=replace(plain.aux_states, norm=FuseNorm.EACH), feedback=Feedback.NORMED)


def _slim(sizes: Sizes) -> HeadDescription:
    half = (sizes.hidden // 2 + 63) // 64 * 64
    wide = _eagle31(replace(sizes, width=sizes.width or half))
    return replace(wide, input_fusion=InputFusion(at=FusionPoint.PROJECTION))


def _peagle(sizes: Sizes) -> HeadDescription:
    if sizes.guesses == 1:
        raise OutriderError("peagle drafts all tokens after the first with masks; use --draft-tokens 2 or more")
    # The last token of a vocabulary is padding, kept in reserve, or as rare as any.
    masks = MaskTokens(draft_tokens=sizes.guesses or _GUESSES, token=sizes.vocab - 1)
    return replace(_eagle3(sizes), kind=Kind.PEAGLE, masks=masks)


def _mtp(sizes: Sizes) -> HeadDescription:
    several = sizes.modules > 1  # as DeepSeek has them: theirs is the one naming that holds several
    return HeadDescription(
        kind=Kind.MTP,
        target_hidden=sizes.hidden,
        target_layers=sizes.layers,
        vocab=sizes.vocab,
        draft_vocab=sizes.draft_vocab,
        aux_states=AuxStates(layers=(sizes.layers - 1,), final=True),
        input_fusion=InputFusion(at=FusionPoint.PROJECTION, zero_first=several),
        body=body(sizes),
        modules=sizes.modules,
        feedback=Feedback.RAW if several else Feedback.NORMED,
        own_lm_head=bool(sizes.own_lm_head),
    )


def _kv_sharing(sizes: Sizes) -> HeadDescription:
    view = sizes.view
    if view is None:
        raise OutriderError(
            "kv-sharing reads the keys and values of the target, and this target does not export them; use mtp"
        )
    # As many heads as fit into the width, and each key head has as many of them.
    heads = max(sizes.hidden // view.dim // view.key_heads, 1) * view.key_heads
    return HeadDescription(
        kind=Kind.KV_SHARING,
        target_hidden=sizes.hidden,
        target_layers=sizes.layers,
        vocab=sizes.vocab,
        draft_vocab=sizes.draft_vocab,
        aux_states=AuxStates(layers=(sizes.layers - 1,), final=True),
        input_fusion=InputFusion(at=FusionPoint.PROJECTION),
        body=replace(body(sizes), heads=heads, key_heads=view.key_heads, dim=view.dim, head_norms=True),
        shared_kv=(view,) * sizes.depth,
        own_lm_head=bool(sizes.own_lm_head),
    )


def _stack(kind: Kind) -> Callable[[Sizes], HeadDescription]:
    def make(sizes: Sizes) -> HeadDescription:
        own = bool(sizes.own_lm_head)
        return HeadDescription(
            kind=kind,
            target_hidden=sizes.hidden,
            target_layers=sizes.layers,
            vocab=sizes.vocab,
            draft_vocab=sizes.draft_vocab,
            aux_states=AuxStates(layers=(sizes.layers - 1,), final=True),
            stack=ParallelHeads(heads=sizes.depth if sizes.depth > 1 else 4, shared_head=not own, one_head=own),
            own_lm_head=own,
        )

    return make


def _block(kind: Kind) -> Callable[[Sizes], HeadDescription]:
    def make(sizes: Sizes) -> HeadDescription:
        corrected, guesses = kind is Kind.DSPARK, sizes.guesses or _GUESSES
        return HeadDescription(
            kind=kind,
            target_hidden=sizes.hidden,
            target_layers=sizes.layers,
            vocab=sizes.vocab,
            draft_vocab=sizes.draft_vocab,
            aux_states=AuxStates(layers=_evenly(sizes.layers), fused=True),
            body=replace(body(sizes), head_norms=True),
            block=DraftBlock(
                size=guesses if corrected else guesses + 1,
                sample_from_anchor=corrected,
                # At most a quarter of the width: two tables of all tokens would outweigh a small draft.
                markov_rank=min(_RANK, sizes.hidden // 4) if corrected else 0,
                confidence=corrected,
            ),
            own_lm_head=bool(sizes.own_lm_head),
        )

    return make


def _evenly(layers: int) -> tuple[int, ...]:
    """Layers from the second one to one near the end, at like distances."""
    last = max(layers - (3 if layers >= 16 else 2), 0)  # small targets say little three layers before their end
    first = min(1, last)
    count = min(_TAPS, last - first + 1)
    return tuple(first + (last - first) * i // max(count - 1, 1) for i in range(count))


KINDS: Mapping[str, Callable[[Sizes], HeadDescription]] = MappingProxyType(
    {
        "eagle3": _eagle3,
        "eagle31": _eagle31,
        "peagle": _peagle,
        "slim": _slim,
        "mtp": _mtp,
        "medusa": _stack(Kind.MEDUSA),
        "hydra": _stack(Kind.HYDRA),
        "dflash": _block(Kind.DFLASH),
        "dspark": _block(Kind.DSPARK),
        KV_SHARING: _kv_sharing,
    }
)
