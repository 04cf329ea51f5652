"""What speculation should gain on a machine that is not here: roof lines (Williams et al. 2009) of a round's passes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from outrider.errors import OutriderError
from outrider.plan.speedup import decode_limit, expected_tau, roof, speedup

_MOST_NODES = 1024  # of one position: no tree that anybody has verified is so wide
_MOST_ROWS = 65536  # where the search for the batch that stops paying ends


class Bound(StrEnum):
    """What a pass waits for."""

    BANDWIDTH = "bandwidth"
    ARITHMETIC = "arithmetic"


def loaded_experts(count: int, active: int, tokens: float) -> float:
    """N(t) = E (1 - (1 - k/E)^t): experts that t tokens need together, each choosing k of E alike (MoESD 2025).

    Real routing is correlated and needs fewer.
    """
    return count * (1 - float((1 - active / count) ** tokens))


def free_tokens(*, bandwidth: float, arithmetic: float, bits: float) -> float:
    """m* = (F / BW) (bits / 8) / 2: columns of a pass whose products take as long as reading the weights."""
    return arithmetic / bandwidth * bits / 8 / 2


def ahead_bound(*, draft: float, verify: float) -> float:
    """1 + T_draft / T_verify: the most that drafting beside verification gains over drafting before it (SSD 2026)."""
    return 1 + draft / verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Layers that cache alike."""

    numbers: float  # that they cache for a token, all layers together
    products: float  # of one column with one cached token, all layers together
    window: int | None = None  # tokens that they look back at most

    def reach(self, context: float) -> float:
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The part of a model of which a token meets a few."""

    count: int
    active: int  # for each token
    weights: float  # of one expert, all layers together


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder, by what its passes read, multiply and keep."""

    name: str
    layers: int
    weights: float  # that every token meets; experts and a table for looking up are not among them
    table: float = 0.0  # weights of embeddings that serve for looking up alone
    experts: Experts | None = None
    attention: tuple[Attention, ...] = ()
    bits: float = 16.0  # of a weight
    cache_bits: float = 16.0  # of a cached number
    int8: bool = False  # products are of 8-bit numbers

    def held_bytes(self) -> float:
        """Bytes of all weights."""
        experts = self.experts.count * self.experts.weights if self.experts else 0.0
        return (self.weights + self.table + experts) * self.bits / 8

    def active(self) -> float:
        """Weights that one token meets."""
        return self.weights + (self.experts.active * self.experts.weights if self.experts else 0.0)

    def read_bytes(self, columns: float) -> float:
        """Bytes of weights that a pass over so many columns reads."""
        parts = self.experts
        experts = loaded_experts(parts.count, parts.active, columns) * parts.weights if parts else 0.0
        return (self.weights + experts) * self.bits / 8

    def cache_bytes(self, context: float) -> float:
        """Bytes of one row's cache, and as many are read for it in each pass."""
        return sum(each.numbers * each.reach(context) for each in self.attention) * self.cache_bits / 8

    def operations(self, context: float) -> float:
        """Of one column: two for each weight that it meets, and two for each product with a cached number."""
        return 2 * (self.active() + sum(each.products * each.reach(context) for each in self.attention))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a datasheet promises; all devices together."""

    name: str
    bandwidth: float  # bytes a second
    bf16: float  # operations a second
    int8: float  # operations a second
    memory: float | None = None  # bytes
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What software makes of a datasheet."""

    name: str
    bandwidth: float  # share that is reached
    arithmetic: float  # share that is reached
    exposed: float  # share of the shorter of reading and multiplying that the longer does not hide
    round_seconds: float  # all that a round takes beside its passes
    layer_seconds: float  # that a layer takes however little it computes
    allreduce_seconds: float = 0.0  # the same again where devices must add up what each computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of one model."""

    seconds: float
    bound: Bound


def one_pass(
    model: Model, machine: Machine, efficiency: Efficiency, *, columns: float, rows: float, context: float
) -> Pass:
    """t = max(r, a) + exposed x min(r, a) + layers x overhead; r = bytes / bandwidth, a = operations / rate.

    With nothing exposed it is the roof line; with all of it, reading and multiplying take turns.

    Args:
        model: whose pass it is.
        machine: that it runs on.
        efficiency: of the software.
        columns: tokens of all rows that the pass computes.
        rows: whose caches it reads.
        context: tokens that each of them has cached.
    """
    size, operations = (
        model.read_bytes(columns) + rows * model.cache_bytes(context),
        columns * model.operations(context),
    )
    bandwidth = machine.bandwidth * efficiency.bandwidth
    rate = (machine.int8 if model.int8 else machine.bf16) * efficiency.arithmetic
    longer = 1 / roof(bytes_per_pass=size, flops_per_pass=operations, bandwidth=bandwidth, gemm=rate)
    reading, multiplying = 1 / decode_limit(size, bandwidth), operations / rate
    layer = efficiency.layer_seconds + (efficiency.allreduce_seconds if machine.devices > 1 else 0.0)
    return Pass(
        seconds=longer + efficiency.exposed * min(reading, multiplying) + model.layers * layer,
        bound=Bound.BANDWIDTH if reading >= multiplying else Bound.ARITHMETIC,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Who guesses, and how."""

    model: Model | None = None  # None: guesses cost the host's time alone
    at_once: bool = False  # one pass makes all guesses of a round, rather than one pass each
    row_seconds: float = 0.0  # of the host, for each row


def head(target: Model, share: float) -> Model:
    """A head that reads this share of what one token of the target meets, and caches what one layer does.

    Raises:
        OutriderError: the share is not one.
    """
    if not 0 < share <= 1:
        raise OutriderError(f"a head's share of the target is {share}; use a share above 0 and up to 1, such as 0.04")
    one = tuple(
        replace(each, numbers=each.numbers / target.layers, products=each.products / target.layers)
        for each in target.attention
    )
    return replace(
        target, name="head", layers=1, weights=share * target.active(), table=0.0, experts=None, attention=one
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How often guesses are kept."""

    rates: tuple[float, ...]  # by position, where all before were kept
    endless: bool = False  # the last rate holds for all further positions
    nodes: float = 1.0  # guesses for each position: below 1 where passes come without any, above in trees

    def __post_init__(self) -> None:
        expected_tau(self.rates)  # which raises
        if not self.rates:
            raise OutriderError("no acceptance rate is given; give at least one, such as 0.8")
        if not 0 < self.nodes <= _MOST_NODES:
            raise OutriderError(
                f"nodes is {self.nodes}; use a number above 0 and up to {_MOST_NODES}, and 1 for chains"
            )

    @property
    def depth(self) -> int | None:
        """Positions of which something is known; None for all."""
        return None if self.endless else len(self.rates)

    def tau(self, k: int) -> float:
        """Expected tokens of a pass with guesses at k positions."""
        return expected_tau((*self.rates, *[self.rates[-1]] * (k - len(self.rates)))[:k])


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A projection for one batch."""

    rows: int
    context: int
    k: int
    tau: float
    speedup: float
    tokens_per_s: float  # of all rows
    plain_tokens_per_s: float  # of all rows
    draft_seconds: float  # of a round
    verify_seconds: float  # of a round
    bound: Bound  # of the target's pass
    ahead: float  # what drafting beside verification could gain more, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and who guesses for it, on a machine."""

    target: Model
    drafting: Drafting
    acceptance: Acceptance
    machine: Machine
    efficiency: Efficiency

    def point(self, rows: int, context: int, k: int) -> Point:
        """A round with guesses at k positions for each row; 0 is plain decoding."""
        host = self.efficiency.round_seconds
        plain = self._verify(rows, context, 0.0).seconds + host
        verify, draft = self._verify(rows, context, k * self.acceptance.nodes), self._draft(rows, context, k)
        tau = self.acceptance.tau(k)
        # All guesses of a round are one item here.
        gain = speedup(tau, k=1, draft=draft / plain, verify=verify.seconds / plain, host=host / plain)
        return Point(
            rows=rows,
            context=context,
            k=k,
            tau=tau,
            speedup=gain,
            tokens_per_s=gain * rows / plain,
            plain_tokens_per_s=rows / plain,
            draft_seconds=draft,
            verify_seconds=verify.seconds,
            bound=verify.bound,
            ahead=ahead_bound(draft=draft, verify=verify.seconds + host),
        )

    def best(self, rows: int, context: int, ks: Sequence[int]) -> Point:
        """The fastest of these k and of plain decoding, the one with the fewest guesses among equals."""
        return max((self.point(rows, context, k) for k in sorted({0, *ks})), key=lambda point: point.speedup)

    def stops_paying(self, context: int, ks: Sequence[int]) -> int | None:
        """The batch from which no k gains; None when guesses still pay at 65536 rows.

        Where experts are few at a time a middling batch can pay though a small one does not: it is the last such
        batch that counts, and it is searched for at powers of two, then between them.
        """

        def pays(rows: int) -> bool:
            return self.best(rows, context, ks).k > 0

        paying = [rows for i in range(_MOST_ROWS.bit_length()) if pays(rows := 1 << i)]
        if not paying or paying[-1] == _MOST_ROWS:
            return None if paying else 1
        between = range(paying[-1], 2 * paying[-1])
        return between[0] + bisect_left(between, True, key=lambda rows: not pays(rows))

    def _verify(self, rows: int, context: int, guesses: float) -> Pass:
        columns = rows * (1 + guesses)
        return one_pass(self.target, self.machine, self.efficiency, columns=columns, rows=rows, context=context)

    def _draft(self, rows: int, context: int, k: int) -> float:
        model, at_once = self.drafting.model, self.drafting.at_once
        host = rows * self.drafting.row_seconds if k else 0.0
        if model is None or not k:
            return host
        columns = rows * k if at_once else rows
        each = one_pass(model, self.machine, self.efficiency, columns=columns, rows=rows, context=context)
        return host + each.seconds * (1 if at_once else k)
