"""The structures that the kernels take, as declared in the C++ sources.

`check_layout` compares every field with the compiled kernels. A field that one side lacks would let
the kernels read and write wrong memory.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch

from outrider.core.draws import DrawParams
from outrider.models.cache.pool import CPool

if TYPE_CHECKING:
    from outrider.core.cache import SequenceSpan

MAX_HEAD_DIM = 256  # kMaxHeadDim of attention.h
MAX_QUERIES_PER_KEY_HEAD = 48  # kMaxTileRows of attention.h


_Fields = Iterator[tuple[str, type]]


def _typed(kind: type, names: Iterable[str]) -> _Fields:
    return ((name, kind) for name in names)


def _pointers(*names: str) -> _Fields:
    return _typed(ctypes.c_void_p, names)


def _integers(*names: str) -> _Fields:
    return _typed(ctypes.c_int32, names)


def _floats(*names: str) -> _Fields:
    return _typed(ctypes.c_float, names)


def _linears(*names: str) -> _Fields:
    return _typed(CLinear, names)


class CLinear(ctypes.Structure):
    """`Linear` of weights.h."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("weight", "scale", "minimum", "sub_scale", "sub_minimum"),
        *_pointers("zero", "order", "bias"),
        *_integers("inputs", "outputs", "bits", "group", "offset", "values", "number"),
    )


class CBlockMatrix(ctypes.Structure):
    """`BlockMatrix` of blocks.cpp: a matrix in GGUF blocks, and where it is written."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("row", "words", "scale", "minimum", "sub_scale", "sub_minimum"),
        ("dense", ctypes.c_void_p),
        *_integers("inputs", "outputs"),
    )


class CLayer(ctypes.Structure):
    """`Layer` of decoder.cpp: the weights of one decoder layer."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_linears("qkv", "out", "gate_up", "down", "value", "router"),
        *_pointers("attention_norm", "mlp_norm"),
        *_pointers("attention_post_norm", "mlp_post_norm", "query_norm", "key_norm"),
        *_integers("window", "wide_norms", "rotary", "top", "normalized"),
    )


class CEntry(ctypes.Structure):
    """`Entry` of decoder.cpp: how a draft head combines embeddings and hidden states."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_linears("fuse", "project"),
        *_pointers("last_norm", "tap_norm", "embedding_norm", "state_norm"),
        *_integers("tapped", "tap", "normed"),
        *_integers("embedding_first", "zero_first", "residual_normed", "recycle_normed"),
    )


class CModel(ctypes.Structure):
    """`Model` of decoder.cpp: sizes, tables and layers. They must live as long as the model is open."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        ("layer", ctypes.POINTER(CLayer)),
        *_pointers("embedding", "norm", "frequency", "rotary_scale", "entry", "id", "pool"),
        *_linears("head", "table", "reduce", "rank"),
        *_integers("bits", "layers", "hidden", "heads", "key_heads", "dim", "ffn"),
        *_integers("threads", "rotaries", "rotary_dim", "gelu", "candidates", "rounds_table"),
        *_floats("epsilon", "scale", "table_scale", "embedding_scale"),
        *_floats("residual_scale", "logit_divisor", "score_cap", "logit_cap"),
    )


class CPass(ctypes.Structure):
    """`Pass` of decoder.cpp: addresses of the inputs and outputs of one forward pass."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("token", "position", "slot", "entry", "prefix", "tail_begin", "tail"),
        *_pointers("output_columns", "logits", "best"),
        *_pointers("export_layers", "hidden_states", "moments", "state"),
        *_integers("needs_fusion", "num_columns", "num_outputs", "num_exports"),
    )


class CChain(ctypes.Structure):
    """`Chain` of decoder.cpp: chains of draft tokens that the kernels extend."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("slot", "position", "entry", "budget", "weight", "bias", "end_ids"),
        *_pointers("token", "count", "scored", "margin", "accept_prob"),
        *_pointers("min_draft_prob", "params", "adjustment", "uniform", "race_keys", "q", "q_index"),
        ("min_path_prob", ctypes.c_float),
        *_integers("batch_size", "depth", "vocab", "num_weights", "num_end_ids"),
    )


class CAdjustment(ctypes.Structure):
    """`Adjustment` of adjust.h: how the logits of a sequence are changed."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("token", "bias_id", "bias", "end_id"),
        *_integers("num_tokens", "num_prompt", "num_biases", "num_ends", "minimum"),
        *_floats("repetition", "presence", "frequency"),
    )


class CAdjustments(ctypes.Structure):
    """`Adjustments` of rules.cpp: logits to change, and the paths of draft tokens before them."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("sequence", "logits", "adjusted", "row", "of", "begin", "depth", "path"),
        *_integers("count", "vocab", "nodes"),
    )


class CDistributions(ctypes.Structure):
    """`Distributions` of rules.cpp."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("logits", "probs", "params"),
        *_integers("count", "vocab", "nodes"),
    )


class CLogprobs(ctypes.Structure):
    """`Logprobs` of rules.cpp."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("logits", "row", "token", "logprob", "top_id", "top_logprob"),
        *_integers("count", "vocab", "top"),
    )


class CVerification(ctypes.Structure):
    """`Verification` of rules.cpp."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("token", "parent", "kind", "count", "p", "p_index", "q", "q_index"),
        *_pointers("seed", "first", "path", "accepted", "bonus", "logprob"),
        *_integers("batch_size", "nodes", "vocab", "rule"),
    )


class CSuffixDraft(ctypes.Structure):
    """`SuffixDraft` of suffix.cpp."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        *_pointers("calibration", "continuation", "lengths", "outputs"),
        *_pointers("token", "parent", "kind", "continuations", "prob"),
        *_integers("num_continuations", "matched_outputs", "budget", "count"),
    )


class CSamplingParams(ctypes.Structure):
    """`SamplingParams` of sampling.h: one row of a tensor of `DrawParams` in float32."""

    __slots__ = ()
    _fields_ = tuple(_floats(*DrawParams._fields))


_STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    CLinear,
    CBlockMatrix,
    CLayer,
    CPool,
    CEntry,
    CModel,
    CPass,
    CChain,
    CSamplingParams,
    CAdjustment,
    CAdjustments,
    CDistributions,
    CLogprobs,
    CVerification,
    CSuffixDraft,
)


def check_layout(code: ctypes.CDLL) -> None:
    """Compare the names, offsets and sizes of the fields of all structures with those of the compiled kernels.

    Raises:
        RuntimeError: they differ. The message names the structure and the first field that differs.
    """
    for structure in _STRUCTURES:
        _compare_layout(structure, code)


class Field(NamedTuple):
    """A field of a structure."""

    name: str
    offset: int  # bytes
    size: int  # bytes

    def __str__(self) -> str:
        return f"{self.name} ({self.size} bytes from byte {self.offset})"


def _compare_layout(structure: type[ctypes.Structure], code: ctypes.CDLL) -> None:
    name = structure.__name__.removeprefix("C")
    c_names = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(code, f"outrider_fields_{name}"))).decode()
    fields = c_names.split(", ")
    numbers = (ctypes.c_int32 * (1 + 2 * len(fields))).in_dll(code, f"outrider_layout_{name}")
    c_layout = [Field(*field) for field in zip(fields, numbers[1::2], numbers[2::2], strict=True)]
    descriptors = [(field, getattr(structure, field)) for field, *_ in structure._fields_]
    layout = [Field(field, descriptor.offset, descriptor.size) for field, descriptor in descriptors]
    if layout == c_layout and ctypes.sizeof(structure) == numbers[0]:
        return
    differing = (pair for pair in zip_longest(layout, c_layout, fillvalue="no further field") if pair[0] != pair[1])
    in_python, in_c = next(differing, (f"{ctypes.sizeof(structure)} bytes", f"{numbers[0]} bytes"))
    raise RuntimeError(
        f"the structure {name} differs between Python and C++: {structure.__name__} in"
        f" {structure.__module__} has {in_python}, and the compiled kernels have {in_c}; make both"
        " equal"
    )


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(slots=True, kw_only=True)
class Columns:
    """The tokens of one forward pass. A column is a token of the pass."""

    token: array[int]
    position: array[int]
    slot: array[int]
    entry: array[int]  # index in the slot where keys and values are written
    prefix: array[int]  # leading entries of the slot that the column attends to
    tail_begin: array[int]  # of each column in `tail`, and its end
    tail: array[int]  # further entries that a column attends to, for trees
    output_columns: array[int]  # columns that need logits

    @classmethod
    def consecutive(cls, tokens: Sequence[int], spans: Iterable[SequenceSpan]) -> Columns:
        """Return the columns of `tokens`, each of which attends to all entries before it in its slot."""
        slots: list[int] = []
        entries: list[int] = []
        outputs: list[int] = []
        for span in spans:
            count = span.end - span.begin
            slots += [span.slot] * count
            entries += range(span.start, span.start + count)
            outputs += range(span.end - span.num_outputs, span.end)
        entry = array("i", entries)
        return cls(
            token=array("i", tokens),
            position=entry,
            slot=array("i", slots),
            entry=entry,
            prefix=array("i", [each + 1 for each in entries]),
            tail_begin=array("i", bytes(4 * len(entries) + 4)),
            tail=array("i"),
            output_columns=array("i", outputs),
        )

    def c_pass(self, output: PassOutput, state: torch.Tensor | None) -> CPass:
        """Return the structure of a pass with these columns. `state` is the input of a draft head, see `Passes.run`."""
        if state is not None:
            assert state.dtype is torch.float32
            assert state.is_contiguous()
        return CPass(
            token=self.token.buffer_info()[0],
            position=self.position.buffer_info()[0],
            slot=self.slot.buffer_info()[0],
            entry=self.entry.buffer_info()[0],
            prefix=self.prefix.buffer_info()[0],
            tail_begin=self.tail_begin.buffer_info()[0],
            tail=self.tail.buffer_info()[0],
            output_columns=self.output_columns.buffer_info()[0],
            logits=output.logits,
            best=output.best,
            export_layers=output.layers.buffer_info()[0],
            hidden_states=output.hidden_states,
            moments=output.moments,
            state=address(state),
            needs_fusion=state is not None and state.dim() == 3,  # states of several layers, which the kernels fuse
            num_columns=len(self.token),
            num_outputs=len(self.output_columns),
            num_exports=len(output.layers),
        )


@dataclass(slots=True, kw_only=True)
class PassOutput:
    """Addresses that a pass writes to. 0 means that an output is not needed."""

    logits: int = 0
    best: int = 0
    layers: array[int] = field(default_factory=lambda: array("i"))  # layers whose outputs are exported
    hidden_states: int = 0
    moments: int = 0
