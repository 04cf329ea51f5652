"""The description of a draft head. Modules are built from it, and every checkpoint format is converted to and from it.

Checkpoint formats differ in how they count layers, in the order in which they concatenate two vectors, and in which
hidden state they feed back. A weight matrix in the wrong order has the right shape, so it loads without an error and
gives wrong predictions. Therefore each of these choices is a field here, and importers translate them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from outrider.errors import OutriderError

_MAX_COUNT = 1024  # of layers or draft tokens
_MAX_WIDTH = 1 << 20
_MAX_VOCAB = 1 << 24


class Kind(StrEnum):
    """The families of draft heads. They differ in what one draft token passes on to the next."""

    EAGLE = "eagle"  # EAGLE-1 and 2: a decoder layer predicts the target's next hidden state
    EAGLE3 = "eagle3"  # EAGLE-3 and 3.1: the same, with the fused hidden states of several target layers
    PEAGLE = "peagle"  # nothing: one pass over the states of EAGLE-3 and mask tokens predicts all draft tokens
    MTP = "mtp"  # multi-token prediction: modules that were trained together with the target
    MEDUSA = "medusa"  # nothing: the heads predict independently of each other
    HYDRA = "hydra"  # the embeddings of the earlier draft tokens
    DFLASH = "dflash"  # nothing: one pass fills in a block of mask tokens
    DSPARK = "dspark"  # the previous draft token, which corrects the logits of a DFlash pass
    DFLASH2 = "dflash2"  # the previous draft token, which ranks the likeliest tokens of a DFlash pass
    XPRESS = "xpress"  # all earlier draft tokens, with which a causal refiner corrects the logits of a DFlash pass
    DOMINO = "domino"  # the same, with a recurrent correction
    KV_SHARING = "kv-sharing"  # a hidden state, from layers that attend to the target's own keys and values


class FuseNorm(StrEnum):
    """The input that is normalized before the target's hidden states are fused."""

    NONE = "none"
    EACH = "each"  # the state of each layer separately (EAGLE-3.1)
    WHOLE = "whole"  # the concatenation of all states


class FusionPoint(StrEnum):
    """Where a token's embedding and the hidden state before it are combined."""

    ATTENTION = "attention"  # concatenated as the input of the attention; the state is the residual (EAGLE-3)
    PROJECTION = "projection"  # in a linear layer before the first decoder layer (EAGLE-1, MTP)


class Feedback(StrEnum):
    """The hidden state that replaces the target's after a draft token."""

    RAW = "raw"  # the output of the last layer
    NORMED = "normed"  # the same after the draft head's final norm


class Scaling(StrEnum):
    """How rotary frequencies are scaled for long contexts."""

    LINEAR = "linear"  # all frequencies by the same factor (Chen et al. 2023)
    LLAMA3 = "llama3"  # by the number of turns in the original context
    YARN = "yarn"  # by the index of the frequency (Peng et al. 2023)
    PROPORTIONAL = "proportional"  # by the same factor; dimensions outside `rotary` are not rotated (Gemma 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxStates:
    """The hidden states that a draft head takes from the target's forward pass."""

    layers: tuple[int, ...]  # target layers whose outputs are taken, counted from 0
    final: bool = False  # the state of the last one is taken after the target's final norm
    norm: FuseNorm = FuseNorm.NONE
    fused: bool = False  # a linear layer maps the concatenated states to the draft head's width
    bias: bool = False  # of that layer


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFusion:
    """How an embedding and the hidden state before it become the input of a decoder layer."""

    at: FusionPoint
    embedding_first: bool = True
    norms: bool = True  # embedding and state are normalized separately
    bias: bool = False  # of the projection
    zero_first: bool = False  # the embedding at position 0 is replaced by zeros
    residual_normed: bool = False  # with FusionPoint.ATTENTION: the residual is the state after its norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Scaling of rotary positions for contexts that are longer than the original one."""

    scaling: Scaling
    factor: float
    original: int = 0  # original context, in tokens
    low: float = 1.0  # frequencies with at most this many turns in it are divided by the whole factor
    high: float = 4.0  # frequencies with at least this many turns are not changed
    amplitude: float = 1.0  # multiplier of cosines and sines
    rounded: bool = True  # YaRN: round the bounds to whole frequency indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Decoder layers of the Llama type."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    dim: int  # of an attention head
    ffn: int
    epsilon: float = 1e-6
    theta: float = 10000.0  # base of the rotary frequencies
    rope: Rope | None = None
    rotary: float = 1.0  # share of a head's dimensions that are rotated, from the first on
    head_norms: bool = False  # norms of queries and keys
    attention_bias: bool = False  # of the query, key and value projections
    output_bias: bool = False  # of the attention's output projection
    attention_gate: bool = False  # multiplies the attention output by a sigmoid of a projection of its input
    gated: bool = True  # the MLP is down(silu(gate x) * up x); otherwise down(relu(up x) ** 2)
    first_norm: bool = True  # the first layer has a norm before its attention; EAGLE-1 has none
    # Gemma 4 layers: norms also after attention and MLP, a layer scale, GELU, and unscaled attention.
    gemma: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKV:
    """The keys and values of a target layer that a decoder layer attends to instead of its own."""

    layer: int  # of the target, counted from 0
    key_heads: int
    dim: int  # of an attention head
    theta: float = 10000.0  # base of the rotary frequencies of the keys; queries are rotated likewise
    rope: Rope | None = None
    rotary: float = 1.0
    window: int = 0  # the number of latest entries that are visible; 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Centroids:
    """Token clusters of equal size. Only tokens of the likeliest clusters get logits (Gemma 4's assistants)."""

    count: int  # clusters
    top_k: int  # clusters whose tokens get logits


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelHeads:
    """Heads that share one input state. Each predicts one position further than the one before."""

    heads: int
    layers: int = 1  # residual blocks in each head
    bias: bool = True  # of the blocks
    shared_head: bool = False  # all heads use the target's LM head
    one_head: bool = False  # all heads share one LM head of the draft head
    head_bias: bool = False  # of the draft head's own LM heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Refiner:
    """A causal refiner of the logits of a block (XPress)."""

    rank: int  # width of its states
    ffn: int  # width of its MLP
    passes: int  # Jacobi passes of a greedy draft, at most as many as draft tokens
    candidates: int = 0  # likeliest tokens before the correction that can be drafted; 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """The positions that the columns of a block attend to in one decoder layer."""

    window: int = 0  # the number of latest positions that a column sees, its own included; 0: all
    causal: bool = False  # a column sees no later column (JetSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """Convolutions over the columns of a block, before and after attention and MLP of each layer (DFlash 2)."""

    taps: int  # columns that a column reads: its own, and those before it
    group: int  # adjacent channels that share the part of their coefficients that depends on the input


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A score of each token after the one before it, for the likeliest tokens of a column (DFlash 2)."""

    rank: int
    candidates: int  # likeliest tokens of a column that can be drafted; 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A recurrent correction of the logits of a block, by all tokens before a draft token (Domino)."""

    state: int  # width of the recurrent state
    rank: int  # width of the hidden layer that maps it to logits
    first: int = 0  # draft tokens at the start of a block that are not corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlock:
    """A block that one pass fills in: the last committed token, and mask tokens after it."""

    size: int  # columns, including the last committed token
    # Each column predicts the next token, also the first column. Otherwise a mask column predicts its own token.
    sample_from_anchor: bool = False
    markov_rank: int = 0  # rank of the matrix that corrects logits by the previous token; 0: no correction
    confidence: bool = False  # a confidence head estimates the acceptance probability
    refiner: Refiner | None = None  # corrects logits by all earlier draft tokens
    views: tuple[BlockView, ...] = ()  # by decoder layer; (): a column attends to everything
    convolution: Convolution | None = None
    selector: Selector | None = None
    recurrence: Recurrence | None = None

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of one pass."""
        return self.size if self.sample_from_anchor else self.size - 1

    @property
    def first_column(self) -> int:
        """The column that predicts the first draft token."""
        return 0 if self.sample_from_anchor else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTokens:
    """Mask tokens after the sequence, so that one pass predicts several draft tokens (P-EAGLE)."""

    draft_tokens: int  # of one pass; the last committed token predicts the first one
    token: int  # id in the target's vocabulary whose embedding the mask tokens have


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDescription:
    """The architecture of a draft head. It determines the names and shapes of its weights."""

    kind: Kind
    target_hidden: int
    target_layers: int
    vocab: int  # of the target
    draft_vocab: int = 0  # number of tokens that can be drafted; 0: all
    aux_states: AuxStates
    input_fusion: InputFusion | None = None
    body: Body | None = None
    stack: ParallelHeads | None = None
    block: DraftBlock | None = None
    shared_kv: tuple[SharedKV, ...] = ()  # by layer of the body, if it attends to the target's KV cache
    masks: MaskTokens | None = None
    centroids: Centroids | None = None  # of the LM head
    # Modules that predict one token each, from the output of the module before. A single module predicts all tokens.
    modules: int = 1
    feedback: Feedback = Feedback.RAW
    final_norm: bool = True  # a norm before the LM head
    own_lm_head: bool = False  # has its own LM head instead of the target's
    own_embedding: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @property
    def output_vocab(self) -> int:
        """Number of logits of the LM head."""
        return self.draft_vocab or self.vocab

    @property
    def width(self) -> int:
        """Size of the hidden states of the draft head."""
        return self.body.hidden if self.body else self.target_hidden

    @property
    def max_draft_tokens(self) -> int:
        """The most draft tokens in a row; 0: no limit."""
        if self.stack:
            return self.stack.heads
        return self.parallel_draft_tokens or (self.modules if self.modules > 1 else 0)

    @property
    def parallel_draft_tokens(self) -> int:
        """Draft tokens that one pass predicts together; 0: one token per pass."""
        if self.block:
            return self.block.draft_tokens
        return self.masks.draft_tokens if self.masks else 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadDescription:
        """Return the description that `to_json` wrote.

        Raises:
            OutriderError: a field is missing, unknown, or has the wrong type.
        """
        return _parse_dataclass(cls, data, "description")  # type: ignore[no-any-return]


def _check(description: HeadDescription) -> None:
    """Raise OutriderError if the fields contradict each other or are out of range."""
    aux_layers = description.aux_states.layers
    last_layer = max(aux_layers, default=-1)
    body = description.body
    stack = description.stack
    width = description.width
    target_hidden = description.target_hidden
    maps_states = description.aux_states.fused or bool(description.shared_kv)
    has_own_tables = description.own_lm_head and (description.own_embedding or bool(description.shared_kv))
    problems = {
        "it takes the hidden states of no valid target layer": min(aux_layers, default=-1) < 0,
        f"it takes the hidden states of layer {last_layer}, but its target has {description.target_layers} layers": (
            last_layer >= description.target_layers
        ),
        f"its draft vocabulary has {description.draft_vocab} of {description.vocab} tokens": (
            not 0 <= description.draft_vocab <= description.vocab
        ),
        "it must have either decoder layers or parallel heads": (body is None) == (stack is None),
        "it does not say how embeddings and hidden states are combined": (
            body is not None and not (description.input_fusion or description.block)
        ),
        f"its hidden size is {width}, but its input states have size {target_hidden}": (
            not maps_states and width != target_hidden
        ),
        f"its hidden size is {width}, but the target's embedding and LM head have size {target_hidden}": (
            body is not None and width != target_hidden and not has_own_tables
        ),
        "it has its own LM head and also uses the target's": (
            stack is not None and stack.shared_head and (stack.one_head or stack.head_bias)
        ),
        f"it has {description.modules} modules": description.modules < 1,
        f"it has {description.modules} modules, but only MTP can have several": (
            description.modules > 1 and description.kind is not Kind.MTP
        ),
        "it predicts from mask tokens but has none": description.kind is Kind.PEAGLE and description.masks is None,
        f"its vocabulary has {description.vocab} tokens": not 0 < description.vocab <= _MAX_VOCAB,
        f"its target has hidden size {target_hidden}": not 0 < target_hidden <= _MAX_WIDTH,
        f"it predicts {description.max_draft_tokens} draft tokens": description.max_draft_tokens > _MAX_COUNT,
        **(_body_problems(body) if body else {}),
        **(_stack_problems(stack) if stack else {}),
        **(_block_problems(description, description.block) if description.block else {}),
        **(_shared_kv_problems(description) if description.shared_kv else {}),
        **(_mask_problems(description, description.masks) if description.masks else {}),
        **(_centroid_problems(description, description.centroids) if description.centroids else {}),
    }
    for problem, exists in problems.items():
        if exists:
            raise OutriderError(
                f"this draft head of kind {description.kind} is invalid: {problem}; its checkpoint"
                " is damaged or of another format"
            )


def _body_problems(body: Body) -> dict[str, bool]:
    """Return what may be wrong with decoder layers, and whether it is."""
    sizes = body.hidden, body.heads, body.key_heads, body.dim, body.ffn
    return {
        f"it has {body.layers} decoder layers": not 0 < body.layers <= _MAX_COUNT,
        f"it has sizes of {', '.join(map(str, sizes))}": not all(0 < size <= _MAX_WIDTH for size in sizes),
        f"its {body.heads} query heads are not a multiple of its {body.key_heads} key heads": (
            body.heads % max(body.key_heads, 1) > 0
        ),
        f"rotary positions need an even head size, not {body.dim}": body.rotary > 0 and body.dim % 2 > 0,
        f"its norms have an epsilon of {body.epsilon}": not 0 <= body.epsilon < 1,
        f"its rotary positions have a theta of {body.theta}": not 0 < body.theta < math.inf,
    }


def _stack_problems(stack: ParallelHeads) -> dict[str, bool]:
    valid = 0 < stack.heads <= _MAX_COUNT and 0 < stack.layers <= _MAX_COUNT
    return {f"it has {stack.heads} heads with {stack.layers} blocks each": not valid}


def _block_problems(description: HeadDescription, block: DraftBlock) -> dict[str, bool]:
    return {
        "it fills in a block but has no decoder layers": description.body is None,
        "it fills in a block, so it cannot combine hidden states with embeddings": (
            description.input_fusion is not None
        ),
        "it fills in a block, so it must normalize hidden states after they are fused, not before": (
            description.aux_states.norm is not FuseNorm.NONE
        ),
        f"a block of size {block.size} has no draft token": block.draft_tokens < 1,
        f"its Markov correction has rank {block.markov_rank}": block.markov_rank < 0,
        f"it has {len(block.views)} views, which is not one for each decoder layer": (
            description.body is not None and len(block.views) not in (0, description.body.layers)
        ),
        "its attention has a negative window": any(view.window < 0 for view in block.views),
        **{
            f"its kind is {kind} but it has no {name}, or the reverse": (description.kind is kind) != (part is not None)
            for kind, name, part in _parts(block)
        },
        "it has several corrections of its logits, or a confidence head beside one": (
            sum(part is not None for _, _, part in _parts(block)) + (block.markov_rank > 0 or block.confidence) > 1
        ),
        **(_refiner_problems(block.refiner) if block.refiner else {}),
        **_selector_problems(description, block),
        **(_recurrence_problems(block.recurrence) if block.recurrence else {}),
    }


class _Part(NamedTuple):
    """A part of a block head that only one kind has."""

    kind: Kind
    name: str
    part: object | None


def _parts(block: DraftBlock) -> tuple[_Part, ...]:
    return (
        _Part(Kind.XPRESS, "causal refiner", block.refiner),
        _Part(Kind.DFLASH2, "candidate selector", block.selector),
        _Part(Kind.DOMINO, "recurrent correction", block.recurrence),
    )


def _selector_problems(description: HeadDescription, block: DraftBlock) -> dict[str, bool]:
    convolution = block.convolution
    selector = block.selector
    problems = {
        "it has a candidate selector but no convolutions, or the reverse": (convolution is None) != (selector is None)
    }
    if convolution:
        taps, group = convolution.taps, convolution.group
        problems[f"its convolutions read {taps} columns of a block of size {block.size}"] = not 0 < taps <= block.size
        problems[f"its hidden size is {description.width}, which groups of {group} channels do not divide"] = (
            group < 1 or description.width % group > 0
        )
        problems["it has convolutions, but no norm before its first layer"] = (
            description.body is not None and not description.body.first_norm
        )
    if selector:
        problems[f"its candidate selector has rank {selector.rank} and {selector.candidates} candidates"] = (
            not 0 < selector.rank <= _MAX_WIDTH or not 0 <= selector.candidates <= _MAX_VOCAB
        )
    return problems


def _recurrence_problems(recurrence: Recurrence) -> dict[str, bool]:
    sizes = recurrence.state, recurrence.rank
    return {
        f"its recurrent correction has sizes of {sizes[0]}, {sizes[1]}": (
            not all(0 < size <= _MAX_WIDTH for size in sizes)
        ),
        f"its recurrent correction begins after {recurrence.first} draft tokens": not 0
        <= recurrence.first
        < _MAX_COUNT,
    }


def _refiner_problems(refiner: Refiner) -> dict[str, bool]:
    return {
        f"its causal refiner has sizes of {refiner.rank}, {refiner.ffn}": (
            not (0 < refiner.rank <= _MAX_WIDTH and 0 < refiner.ffn <= _MAX_WIDTH)
        ),
        f"its causal refiner makes {refiner.passes} passes over {refiner.candidates} candidates": (
            not (0 < refiner.passes <= _MAX_COUNT and 0 <= refiner.candidates <= _MAX_VOCAB)
        ),
    }


def _shared_kv_problems(description: HeadDescription) -> dict[str, bool]:
    body = description.body
    fusion = description.input_fusion
    shared = description.shared_kv
    heads = body.heads if body else 0
    return {
        "it does not say which keys and values each decoder layer attends to": (
            body is None or len(shared) != body.layers
        ),
        "it shares keys and values, so it must combine hidden states and embeddings in a projection": (
            fusion is None or fusion.at is not FusionPoint.PROJECTION
        ),
        "it has its own embeddings, but a head that shares keys and values uses the target's": (
            description.own_embedding
        ),
        f"it attends to a layer that its target with {description.target_layers} layers does not have": any(
            layer.layer >= description.target_layers for layer in shared
        ),
        f"its {heads} query heads are not a multiple of the key heads that it shares": any(
            layer.key_heads < 1 or heads % layer.key_heads for layer in shared
        ),
    }


def _centroid_problems(description: HeadDescription, centroids: Centroids) -> dict[str, bool]:
    vocab = description.output_vocab
    return {
        "it has centroids, but only heads that share keys and values can have them": not description.shared_kv,
        f"its {vocab} tokens do not divide into {centroids.count} clusters of equal size": (
            centroids.count < 1 or vocab % centroids.count > 0
        ),
        f"it computes the logits of {centroids.top_k} of {centroids.count} clusters": (
            not 0 < centroids.top_k <= centroids.count
        ),
    }


def _mask_problems(description: HeadDescription, masks: MaskTokens) -> dict[str, bool]:
    return {
        "it has mask tokens, so it must combine hidden states with embeddings and cannot fill in a block": (
            description.input_fusion is None or description.block is not None
        ),
        f"it predicts {masks.draft_tokens} draft tokens from mask tokens, which needs at least 2": (
            masks.draft_tokens < 2
        ),
        f"its mask token is {masks.token}, but its vocabulary has {description.vocab} tokens": (
            not 0 <= masks.token < description.vocab
        ),
    }


def _parse_dataclass(cls: Any, data: Any, path: str) -> Any:
    """Return the dataclass that `asdict` made `data` of. `path` names it in error messages."""
    if not isinstance(data, Mapping):
        raise OutriderError(f"{path} is {data!r} instead of a JSON object; export the draft head again")
    hints = get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}
    if unknown := sorted(data.keys() - known.keys()):
        raise OutriderError(f"{path} has {unknown[0]!r}, which this version does not know; update Outrider")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in data]
    if missing:
        raise OutriderError(f"{path} lacks {missing[0]!r}; export the draft head again")
    return cls(**{name: _parse_value(hints[name], value, f"{path}.{name}") for name, value in data.items()})


def _parse_value(hint: Any, value: Any, path: str) -> Any:
    """Return `value` as the type that `hint` says."""
    if get_origin(hint) in (Union, UnionType):
        return None if value is None else _parse_value(get_args(hint)[0], value, path)
    if is_dataclass(hint):
        return _parse_dataclass(hint, value, path)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_parse_value(get_args(hint)[0], item, path) for item in value)
    cls = get_origin(hint) or hint
    if not isinstance(value, _JSON_TYPES.get(cls, (str,))) or (isinstance(value, bool) and cls is not bool):
        raise OutriderError(f"{path} is {value!r}, which has the wrong type; export the draft head again")
    try:
        return cls(value)
    except ValueError:
        known = ", ".join(cls) if issubclass(cls, StrEnum) else cls.__name__
        raise OutriderError(f"{path} is {value!r}; use one of {known}") from None


_JSON_TYPES: Mapping[Any, tuple[Any, ...]] = MappingProxyType(
    {int: (int,), bool: (bool,), float: (int, float), str: (str,), tuple: (list, tuple)}
)
