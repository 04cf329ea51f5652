"""The structures that Python hands to the kernels, as decoder.cpp and linear.h declare them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_DIM = 256  # of a head
MOST_SHARING = 48  # query heads of a key head: kQueries of attention.h, what a thread has room for


class CLinear(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("bits", ctypes.c_int32),
    )


class CLayer(ctypes.Structure):
    """`Layer` of decoder.cpp: where the weights of one decoder layer lie."""

    _fields_ = (
        *((name, CLinear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("window", ctypes.c_int32),
    )


class CEntry(ctypes.Structure):
    """`Entry` of decoder.cpp: how a trained draft joins embeddings and states."""

    _fields_ = (
        *((name, CLinear) for name in ("fuse", "project")),
        *((name, ctypes.c_void_p) for name in ("last_norm", "tap_norm", "embedding_norm", "state_norm")),
        *((name, ctypes.c_int32) for name in ("tapped", "tap", "normed")),
        *((name, ctypes.c_int32) for name in ("embedding_first", "zero_first", "residual_normed", "recycle_normed")),
    )


class CModel(ctypes.Structure):
    """`Model` of decoder.cpp: sizes, tables and layers, which must outlive every pass."""

    _fields_ = (
        ("layer", ctypes.POINTER(CLayer)),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "frequency", "entry", "id", "pool")),
        ("head", CLinear),
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "key_heads", "dim", "ffn")),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("epsilon", "scale", "rotary_scale")),
    )


class CPass(ctypes.Structure):
    """`Pass` of decoder.cpp: addresses of the columns of one pass, and of what it writes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token", "position", "slot", "place", "seen", "tail_begin", "tail")),
        *((name, ctypes.c_void_p) for name in ("keep", "logits", "best", "exported", "features", "state")),
        *((name, ctypes.c_int32) for name in ("tapped", "columns", "kept", "exports")),
    )


class CChain(ctypes.Structure):
    """`Chain` of decoder.cpp: rows that go on by themselves, and how each token is chosen."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slot", "position", "place", "budget", "weight", "bias", "end")),
        *((name, ctypes.c_void_p) for name in ("token", "count", "looked", "margin", "chance")),
        *((name, ctypes.c_void_p) for name in ("worth", "want", "uniform", "law", "law_at")),
        ("keep", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("rows", "depth", "vocab", "kinds", "ends")),
    )


class CLaws(ctypes.Structure):
    """`Distributions` of rules.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("law", "want")),
        *((name, ctypes.c_int32) for name in ("count", "vocab", "each")),
    )


class CTrial(ctypes.Structure):
    """`Trial` of rules.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token", "parent", "law", "count", "p", "p_at", "q", "q_at")),
        *((name, ctypes.c_void_p) for name in ("seed", "first", "path", "accepted", "bonus", "logprob")),
        *((name, ctypes.c_int32) for name in ("rows", "nodes", "vocab", "rule")),
    )


@dataclass(slots=True, kw_only=True)
class Columns:
    """The tokens of one pass as the kernels take them, one entry a column."""

    token: array[int] = field(default_factory=lambda: array("i"))
    position: array[int] = field(default_factory=lambda: array("i"))
    slot: array[int] = field(default_factory=lambda: array("i"))
    place: array[int] = field(default_factory=lambda: array("i"))  # where in the slot it is written
    seen: array[int] = field(default_factory=lambda: array("i"))  # entries of the slot that it sees from the first on
    tail_begin: array[int] = field(default_factory=lambda: array("i", [0]))
    tail: array[int] = field(default_factory=lambda: array("i"))  # and those that it sees after them
    keep: array[int] = field(default_factory=lambda: array("i"))  # columns whose logits are wanted

    def text(self, tokens: Sequence[int], start: int, slot: int) -> None:
        """Tokens that follow each other from entry `start` of a slot on, and see all before them."""
        count = len(tokens)
        self.token.extend(tokens)
        self.position.extend(range(start, start + count))
        self.slot.extend([slot] * count)
        self.place.extend(range(start, start + count))
        self.seen.extend(range(start + 1, start + count + 1))
        self.tail_begin.extend([len(self.tail)] * count)

    def add(self, token: int, position: int, *, slot: int, place: int, seen: int, tail: Sequence[int] = ()) -> None:
        """Append one column, which sees the slot's first `seen` entries and those in `tail`."""
        self.token.append(token)
        self.position.append(position)
        self.slot.append(slot)
        self.place.append(place)
        self.seen.append(seen)
        self.tail.extend(tail)
        self.tail_begin.append(len(self.tail))

    def c(self, logits: int, best: int, exported: array[int], features: int, *state: int) -> CPass:
        """With the addresses of what the pass writes and of states, and whether those are as they were tapped."""
        fields = (self.token, self.position, self.slot, self.place, self.seen, self.tail_begin, self.tail, self.keep)
        addresses = (part.buffer_info()[0] for part in fields)
        counts = (len(self.token), len(self.keep), len(exported))
        return CPass(*addresses, logits, best, exported.buffer_info()[0], features, *(state or (0, 0)), *counts)
