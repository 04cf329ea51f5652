"""What a trained draft is: the one description from which its module is built, and every format written.

Formats disagree on how layers are counted, on the order in which two vectors are joined, and on which state goes round.
A matrix of the right shape loads without complaint in the wrong order and is merely never right; so each of these
choices has a field here, and importers translate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from outrider.errors import OutriderError

_MANY, _WIDE, _TOKENS = 1024, 1 << 20, 1 << 24  # layers or guesses, numbers of a width, and tokens, at most


class Kind(StrEnum):
    """The families, by what carries a guess on to the next one."""

    EAGLE = "eagle"  # the target's last state regressed by a decoder layer (EAGLE-1 and 2)
    EAGLE3 = "eagle3"  # states of three layers, fused (EAGLE-3, 3.1)
    PEAGLE = "peagle"  # nothing: one pass over such states and masks behind them says what the masks hide
    MTP = "mtp"  # a module for multi-token prediction that came with the target
    MEDUSA = "medusa"  # nothing: heads guess independently of each other
    HYDRA = "hydra"  # the embeddings of the tokens guessed before
    DFLASH = "dflash"  # nothing: one pass fills in a block of masks
    DSPARK = "dspark"  # the token guessed before, which corrects what the pass said
    KV_SHARING = "kv-sharing"  # a state made of the one before, by layers that look at the target's own keys and values


class FuseNorm(StrEnum):
    """What is normed before the taps are fused."""

    NONE = "none"
    EACH = "each"  # each tap by itself (EAGLE-3.1)
    WHOLE = "whole"  # all of them, one behind another


class FusionPoint(StrEnum):
    """Where a token's embedding and the state before it meet."""

    ATTENTION = "attention"  # at the attention's input, twice as wide; the state goes on as the residual (EAGLE-3)
    PROJECTION = "projection"  # in a linear layer before the first decoder layer (EAGLE-1, MTP)


class Feedback(StrEnum):
    """The state that stands in for the target's behind a guess."""

    RAW = "raw"  # the last layer's output as it is
    NORMED = "normed"  # after the draft's own final norm


class Scaling(StrEnum):
    """By which rule rotary positions are slowed down."""

    LINEAR = "linear"  # all pairs alike (Chen et al. 2023)
    LLAMA3 = "llama3"  # by how often a pair turns
    YARN = "yarn"  # by where it stands (Peng et al. 2023)
    PROPORTIONAL = "proportional"  # all pairs alike; those that `rotary` leaves out stand still (Gemma 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxStates:
    """What is taken from the target's pass."""

    layers: tuple[int, ...]  # whose outputs, counted from 0
    final: bool = False  # the last of them is taken after the target's final norm
    norm: FuseNorm = FuseNorm.NONE
    fused: bool = False  # by a linear layer, from all taps to the draft's width
    bias: bool = False  # of that layer


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFusion:
    """How a token's embedding and the state before it become a decoder layer's input."""

    at: FusionPoint
    embedding_first: bool = True
    norms: bool = True  # of both
    bias: bool = False  # of the projection
    zero_first: bool = False  # the text's first embedding is taken for zeros
    residual_normed: bool = False  # where they meet at the attention: the residual is the state after its norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions slowed down, for texts longer than those that a model began with."""

    scaling: Scaling
    factor: float
    original: int = 0  # tokens of the texts that it began with
    low: float = 1.0  # turns within them up to which a pair is slowed down by the whole factor
    high: float = 4.0  # turns from which on it is left as it is
    amplitude: float = 1.0  # of cosines and sines
    rounded: bool = True  # YaRN: from whole pair to whole pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Llama-like decoder layers."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    dim: int  # of a head
    ffn: int
    epsilon: float = 1e-6
    theta: float = 10000.0  # of rotary positions
    rope: Rope | None = None
    rotary: float = 1.0  # share of a head's numbers that positions turn, the first of them
    head_norms: bool = False  # of queries and keys
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of what the attention hands on
    attention_gate: bool = False  # what the attention found is multiplied by a sigmoid of what it reads
    gated: bool = True  # down(silu(gate x) * up x); else down(relu(up x) ** 2)
    first_norm: bool = True  # the first layer's before its attention; EAGLE-1 has none
    gemma: bool = False  # as Gemma 4 has them: norms behind both halves too, a scale, gelu, and unscaled attention


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKV:
    """What a decoder layer sees where it has no keys and values of its own: those of a layer of the target."""

    layer: int  # the target's, counted from 0
    key_heads: int
    dim: int  # of a head
    theta: float = 10000.0  # by which the keys are turned, and so must queries be
    rope: Rope | None = None
    rotary: float = 1.0
    window: int = 0  # entries that are seen, the last ones; 0 = all


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelHeads:
    """Heads that read one state, each guessing one token further."""

    heads: int
    layers: int = 1  # residual blocks in each
    bias: bool = True  # of the blocks
    shared_head: bool = False  # all of them use the target's output layer
    one_head: bool = False  # all of them use one of the draft's own
    head_bias: bool = False  # of the draft's own


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlock:
    """Guesses that are filled in by one pass: the text's last token, and masks behind it."""

    size: int  # columns, the text's last token among them
    sample_from_anchor: bool = False  # each guesses the token behind its own, the first one too; else its own
    markov_rank: int = 0  # of the matrix by which the token before corrects a guess; 0 = none does
    confidence: bool = False  # a head says how likely a guess is to be kept

    @property
    def draft_tokens(self) -> int:
        """Made by one pass."""
        return self.size if self.sample_from_anchor else self.size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTokens:
    """Guesses that are made in one pass: behind the text stand masks, which see what stands before them (P-EAGLE)."""

    draft_tokens: int  # made by one pass; the first of them by the text's last token
    token: int  # the target's id whose embedding masks have


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDescription:
    """A trained draft."""

    kind: Kind
    target_hidden: int
    target_layers: int
    vocab: int  # of the target
    draft_vocab: int = 0  # tokens that can be guessed, where not all can; 0 = all
    aux_states: AuxStates
    input_fusion: InputFusion | None = None
    body: Body | None = None
    stack: ParallelHeads | None = None
    block: DraftBlock | None = None  # in one pass of the body
    shared_kv: tuple[SharedKV, ...] = ()  # of the body's layers, where they have no keys and values of their own
    masks: MaskTokens | None = None  # behind the text, where nothing is recycled
    modules: int = 1  # of join and layers: each makes one guess, from the states of the one before; 1 makes all
    feedback: Feedback = Feedback.RAW
    final_norm: bool = True  # before the output layer
    own_lm_head: bool = False  # an output layer of its own, instead of the target's
    own_embedding: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @property
    def output_vocab(self) -> int:
        """Tokens that its output layer tells apart."""
        return self.draft_vocab or self.vocab

    @property
    def width(self) -> int:
        """Of the state that it carries on."""
        return self.body.hidden if self.body else self.target_hidden

    @property
    def max_draft_tokens(self) -> int:
        """Guesses that it makes in a row, where it does not go on as far as it is asked to; else 0."""
        if self.stack:
            return self.stack.heads
        return self.parallel_draft_tokens or (self.modules if self.modules > 1 else 0)

    @property
    def parallel_draft_tokens(self) -> int:
        """Guesses that one pass makes, where it makes them all; else 0."""
        return self.block.draft_tokens if self.block else self.masks.draft_tokens if self.masks else 0

    def to_json(self) -> dict[str, Any]:
        """As numbers, strings, lists and tables; `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadDescription:
        """The inverse of `to_json`.

        Raises:
            OutriderError: something is missing, unknown, or of another type.
        """
        return _read(cls, data, "description")  # type: ignore[no-any-return]


def _check(it: HeadDescription) -> None:
    last = max(it.aux_states.layers, default=-1)
    problems = {
        "names no layer of the target to read": min(it.aux_states.layers, default=-1) < 0,
        f"reads layer {last} of a target with {it.target_layers}": last >= it.target_layers,
        f"guesses {it.draft_vocab} of {it.vocab} tokens": not 0 <= it.draft_vocab <= it.vocab,
        "has both decoder layers and independent heads, or neither": (it.body is None) == (it.stack is None),
        "does not say how embeddings and states are joined": it.body is not None and not (it.input_fusion or it.block),
        f"carries a state of {it.width} on to where {it.target_hidden} are expected": not (
            it.aux_states.fused or it.shared_kv
        )
        and it.width != it.target_hidden,
        f"is {it.width} wide beside the target's tables of {it.target_hidden}": it.body is not None
        and it.width != it.target_hidden
        and not (it.own_lm_head and (it.own_embedding or it.shared_kv)),
        "shares the target's output layer and has one of its own": it.stack is not None
        and it.stack.shared_head
        and (it.stack.one_head or it.stack.head_bias),
        f"has {it.modules} modules": it.modules < 1,
        f"has {it.modules} modules, and is of a kind with one": it.modules > 1 and it.kind is not Kind.MTP,
        "guesses behind masks and has none": it.kind is Kind.PEAGLE and it.masks is None,
        f"has a vocabulary of {it.vocab} tokens": not 0 < it.vocab <= _TOKENS,
        f"belongs to a target {it.target_hidden} wide": not 0 < it.target_hidden <= _WIDE,
        f"has {it.max_draft_tokens} guesses": it.max_draft_tokens > _MANY,
        **(_body_problems(it.body) if it.body else {}),
        **(_stack_problems(it.stack) if it.stack else {}),
        **(_block_problems(it, it.block) if it.block else {}),
        **(_view_problems(it) if it.shared_kv else {}),
        **(_mask_problems(it, it.masks) if it.masks else {}),
    }
    if found := [text for text, wrong in problems.items() if wrong]:
        raise OutriderError(f"a draft of kind {it.kind} {found[0]}; its checkpoint is damaged or of another format")


def _body_problems(body: Body) -> dict[str, bool]:
    sizes = body.hidden, body.heads, body.key_heads, body.dim, body.ffn
    return {
        f"has {body.layers} decoder layers": not 0 < body.layers <= _MANY,
        f"has sizes of {', '.join(map(str, sizes))}": not all(0 < size <= _WIDE for size in sizes),
        f"shares {body.key_heads} key heads unevenly among {body.heads}": body.heads % max(body.key_heads, 1) > 0,
        f"turns heads of {body.dim} numbers in pairs": body.rotary > 0 and body.dim % 2 > 0,
        f"norms with an epsilon of {body.epsilon}": not 0 <= body.epsilon < 1,
        f"turns positions by a theta of {body.theta}": not 0 < body.theta < math.inf,
    }


def _stack_problems(stack: ParallelHeads) -> dict[str, bool]:
    return {
        f"has {stack.heads} heads with {stack.layers} blocks each": not (
            0 < stack.heads <= _MANY and 0 < stack.layers <= _MANY
        )
    }


def _block_problems(it: HeadDescription, block: DraftBlock) -> dict[str, bool]:
    return {
        "fills in a block without decoder layers": it.body is None,
        "joins states and embeddings, which a block reads apart": it.input_fusion is not None,
        "norms what it taps before it is fused, where a block norms it behind": it.aux_states.norm is not FuseNorm.NONE,
        f"guesses nothing in a block of {block.size}": block.draft_tokens < 1,
        f"corrects its guesses by a matrix of rank {block.markov_rank}": block.markov_rank < 0,
    }


def _view_problems(it: HeadDescription) -> dict[str, bool]:
    heads = it.body.heads if it.body else 0
    return {
        "does not say of each decoder layer what it sees": it.body is None or len(it.shared_kv) != it.body.layers,
        "joins states and embeddings elsewhere than in a projection": it.input_fusion is None
        or it.input_fusion.at is not FusionPoint.PROJECTION,
        "has embeddings of its own, where it reads the target's": it.own_embedding,
        f"sees a layer of a target with {it.target_layers}": any(v.layer >= it.target_layers for v in it.shared_kv),
        f"shares its {heads} heads unevenly": any(v.key_heads < 1 or heads % v.key_heads for v in it.shared_kv),
    }


def _mask_problems(it: HeadDescription, masks: MaskTokens) -> dict[str, bool]:
    return {
        "stands masks behind a text that it does not follow": it.input_fusion is None or it.block is not None,
        f"makes {masks.draft_tokens} guesses with masks, which takes 2 or more": masks.draft_tokens < 2,
        f"has masks with the embedding of token {masks.token} of {it.vocab}": not 0 <= masks.token < it.vocab,
    }


def _read(kind: Any, data: Any, where: str) -> Any:
    """A dataclass from what `asdict` made of it."""
    if not isinstance(data, Mapping):
        raise OutriderError(f"{where} is {data!r} and not a table; export the draft again")
    hints, known = get_type_hints(kind), {each.name: each for each in fields(kind)}
    if unknown := sorted(data.keys() - known.keys()):
        raise OutriderError(f"{where} has {unknown[0]!r}, which this version does not know; update Outrider")
    missing = [n for n, each in known.items() if each.default is MISSING and n not in data]
    if missing:
        raise OutriderError(f"{where} lacks {missing[0]!r}; export the draft again")
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return None if value is None else _value(get_args(kind)[0], value, where)
    if is_dataclass(kind):
        return _read(kind, value, where)
    if get_origin(kind) is tuple and is_dataclass(get_args(kind)[0]) and isinstance(value, list | tuple):
        return tuple(_read(get_args(kind)[0], each, where) for each in value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_value(get_args(kind)[0], each, where) for each in value)
    kind = get_origin(kind) or kind
    if not isinstance(value, _JSON.get(kind, (str,))) or (isinstance(value, bool) and kind is not bool):
        raise OutriderError(f"{where} is {value!r}; export the draft again")
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind) if issubclass(kind, StrEnum) else kind.__name__
        raise OutriderError(f"{where} is {value!r}; known are {known}") from None


_JSON: Mapping[Any, tuple[Any, ...]] = MappingProxyType(
    {int: (int,), bool: (bool,), float: (int, float), str: (str,), tuple: (list, tuple)}
)
