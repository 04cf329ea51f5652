"""Estimate the speedup of speculation on any machine, with rooflines of its passes (Williams et al. 2009)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from outrider.errors import OutriderError
from outrider.plan.speedup import decode_limit, expected_tau, roof, speedup

_MAX_NODES = 1024  # draft tokens per position; published trees are narrower
_MAX_BATCH = 65536  # largest batch in the search of `Pair.stops_paying`


class Bound(StrEnum):
    """What limits the speed of a pass."""

    BANDWIDTH = "bandwidth"
    ARITHMETIC = "arithmetic"


def loaded_experts(count: int, active: int, tokens: float) -> float:
    """Return N(t) = E (1 - (1 - k/E)^t), the expected number of experts that t tokens use (MoESD 2025).

    Each token chooses k of E experts uniformly at random. Real routing is correlated and uses fewer.
    """
    return count * (1 - float((1 - active / count) ** tokens))


def free_tokens(*, bandwidth: float, arithmetic: float, bits: float) -> float:
    """Return m* = (F / BW) (bits / 8) / 2. With m* tokens, arithmetic takes as long as reading the weights."""
    return arithmetic / bandwidth * bits / 8 / 2


def ahead_bound(*, draft: float, verify: float) -> float:
    """Return 1 + T_draft / T_verify, the largest gain from drafting in parallel with verification (SSD 2026)."""
    return 1 + draft / verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention layers of one kind."""

    numbers: float  # cached numbers per token, of all layers together
    products: float  # products of one token with one cached token, of all layers together
    window: int | None = None  # size of the sliding window in tokens; None: full attention

    def reach(self, context: float) -> float:
        """Return the number of cached tokens that a token attends to."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a mixture-of-experts model."""

    count: int
    active: int  # experts per token
    weights: float  # weights of one expert, of all layers together


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The size of a decoder model: what a pass reads, multiplies and caches."""

    name: str
    layers: int
    weights: float  # weights that every token is multiplied with, without experts and the embedding table
    table: float = 0.0  # weights of an embedding table that is not the output layer as well
    experts: Experts | None = None
    attention: tuple[Attention, ...] = ()
    bits: float = 16.0  # bits of a weight
    cache_bits: float = 16.0  # bits of a cached number
    int8: bool = False  # multiply in 8 bits

    def held_bytes(self) -> float:
        """Return the bytes of all weights."""
        experts = self.experts.count * self.experts.weights if self.experts else 0.0
        return (self.weights + self.table + experts) * self.bits / 8

    def active(self) -> float:
        """Return the number of weights that one token is multiplied with."""
        return self.weights + (self.experts.active * self.experts.weights if self.experts else 0.0)

    def read_bytes(self, tokens: float) -> float:
        """Return the bytes of weights that a pass over `tokens` tokens reads."""
        expert_weights = 0.0
        if self.experts:
            expert_weights = loaded_experts(self.experts.count, self.experts.active, tokens) * self.experts.weights
        return (self.weights + expert_weights) * self.bits / 8

    def cache_bytes(self, context: float) -> float:
        """Return the bytes of the KV cache of one sequence. Each pass reads all of them."""
        return sum(layers.numbers * layers.reach(context) for layers in self.attention) * self.cache_bits / 8

    def operations(self, context: float) -> float:
        """Return the operations of one token: two per weight, and two per product with a cached number."""
        return 2 * (self.active() + sum(layers.products * layers.reach(context) for layers in self.attention))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The datasheet figures of a machine, of all devices together."""

    name: str
    bandwidth: float  # bytes/s
    bf16: float  # operations/s
    int8: float  # operations/s
    memory: float | None = None  # bytes
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How much of the datasheet figures the software reaches, and its overheads."""

    name: str
    bandwidth: float  # share of the bandwidth that is reached
    arithmetic: float  # share of the arithmetic rate that is reached
    exposed: float  # share of the shorter time, of reading and arithmetic, that does not overlap with the longer one
    round_seconds: float  # seconds of a round outside of its passes
    layer_seconds: float  # overhead per layer
    allreduce_seconds: float = 0.0  # additional overhead per layer with several devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The estimate of one forward pass."""

    seconds: float
    bound: Bound


def one_pass(
    model: Model, machine: Machine, efficiency: Efficiency, *, tokens: float, seqs: float, context: float
) -> Pass:
    """Return the time max(r, a) + exposed x min(r, a) + layers x overhead of a pass.

    r = bytes / bandwidth is the time to read, and a = operations / rate is the time of the arithmetic. If
    `efficiency.exposed` is 0, both overlap completely, as in the roofline model. If it is 1, they do not overlap.

    Args:
        model: the model.
        machine: the machine that it runs on.
        efficiency: the efficiency of the software.
        tokens: tokens of the pass, of all sequences together.
        seqs: sequences whose KV caches the pass reads.
        context: cached tokens of each sequence.
    """
    read_bytes = model.read_bytes(tokens) + seqs * model.cache_bytes(context)
    operations = tokens * model.operations(context)
    bandwidth = machine.bandwidth * efficiency.bandwidth
    rate = (machine.int8 if model.int8 else machine.bf16) * efficiency.arithmetic
    roof_seconds = 1 / roof(bytes_per_pass=read_bytes, flops_per_pass=operations, bandwidth=bandwidth, gemm=rate)
    read_seconds = 1 / decode_limit(read_bytes, bandwidth)
    arithmetic_seconds = operations / rate
    overhead = efficiency.layer_seconds + (efficiency.allreduce_seconds if machine.devices > 1 else 0.0)
    exposed_seconds = efficiency.exposed * min(read_seconds, arithmetic_seconds)
    return Pass(
        seconds=roof_seconds + exposed_seconds + model.layers * overhead,
        bound=Bound.BANDWIDTH if read_seconds >= arithmetic_seconds else Bound.ARITHMETIC,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """The cost of a proposer."""

    model: Model | None = None  # the draft model; None: drafting takes host time only
    parallel: bool = False  # one pass drafts all tokens of a round; False: one pass per draft token
    host_seconds: float = 0.0  # host time per sequence and round


def head(target: Model, share: float) -> Model:
    """Return a draft head with a share of the target's active weights and the KV cache of one layer.

    Raises:
        OutriderError: the share is not above 0 and up to 1.
    """
    if not 0 < share <= 1:
        raise OutriderError(f"a head's share of the target is {share}; use a share above 0 and up to 1, such as 0.04")
    attention = tuple(
        replace(layers, numbers=layers.numbers / target.layers, products=layers.products / target.layers)
        for layers in target.attention
    )
    return replace(
        target, name="head", layers=1, weights=share * target.active(), table=0.0, experts=None, attention=attention
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The acceptance rates of a proposer."""

    rates: tuple[float, ...]  # by position, among draft tokens whose ancestors are accepted
    repeat_last: bool = False  # the last rate holds for all further positions
    nodes: float = 1.0  # draft tokens per position: below 1 if some passes have no draft, above 1 for trees

    def __post_init__(self) -> None:
        expected_tau(self.rates)  # raises OutriderError for rates outside of [0, 1]
        if not self.rates:
            raise OutriderError("no acceptance rate is given; give at least one, such as 0.8")
        if not 0 < self.nodes <= _MAX_NODES:
            raise OutriderError(f"nodes is {self.nodes}; use a number above 0 and up to {_MAX_NODES}, and 1 for chains")

    @property
    def depth(self) -> int | None:
        """The number of positions with a known rate; None: all."""
        return None if self.repeat_last else len(self.rates)

    def tau(self, k: int) -> float:
        """Return the expected tokens of a pass with draft tokens at k positions."""
        return expected_tau((*self.rates, *[self.rates[-1]] * (k - len(self.rates)))[:k])


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The estimate for one batch size, context and draft length."""

    seqs: int
    context: int
    k: int
    tau: float
    speedup: float
    tokens_per_s: float  # of all sequences
    plain_tokens_per_s: float  # of all sequences
    draft_seconds: float  # per round
    verify_seconds: float  # per round
    bound: Bound  # of the target's pass
    ahead: float  # largest further gain from drafting in parallel with verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target with a proposer, on a machine."""

    target: Model
    drafting: Drafting
    acceptance: Acceptance
    machine: Machine
    efficiency: Efficiency

    def point(self, seqs: int, context: int, k: int) -> Point:
        """Return the estimate of a round with draft tokens at k positions for each sequence; 0 is plain decoding."""
        host = self.efficiency.round_seconds
        plain = self._verify(seqs, context, 0.0).seconds + host
        verify = self._verify(seqs, context, k * self.acceptance.nodes)
        draft = self._draft(seqs, context, k)
        tau = self.acceptance.tau(k)
        # `draft` is the time of all draft tokens of a round, so k is 1 here.
        gain = speedup(tau, k=1, draft=draft / plain, verify=verify.seconds / plain, host=host / plain)
        return Point(
            seqs=seqs,
            context=context,
            k=k,
            tau=tau,
            speedup=gain,
            tokens_per_s=gain * seqs / plain,
            plain_tokens_per_s=seqs / plain,
            draft_seconds=draft,
            verify_seconds=verify.seconds,
            bound=verify.bound,
            ahead=ahead_bound(draft=draft, verify=verify.seconds + host),
        )

    def best(self, seqs: int, context: int, ks: Sequence[int]) -> Point:
        """Return the fastest of these k and plain decoding. Among equals, return the smallest k."""
        return max((self.point(seqs, context, k) for k in sorted({0, *ks})), key=lambda point: point.speedup)

    def stops_paying(self, context: int, ks: Sequence[int]) -> int | None:
        """Return the batch size from which no k gains; None: speculation still pays at 65536 sequences.

        With experts, a medium batch may pay although a small one does not. The result follows the last batch size that
        pays. The search tries powers of two, then the sizes between two of them.
        """

        def pays(seqs: int) -> bool:
            return self.best(seqs, context, ks).k > 0

        powers = (1 << i for i in range(_MAX_BATCH.bit_length()))
        paying = [seqs for seqs in powers if pays(seqs)]
        if not paying:
            return 1
        if paying[-1] == _MAX_BATCH:
            return None
        candidates = range(paying[-1], 2 * paying[-1])
        return candidates[0] + bisect_left(candidates, True, key=lambda seqs: not pays(seqs))

    def _verify(self, seqs: int, context: int, draft_tokens: float) -> Pass:
        """Return the target's pass, with this many draft tokens per sequence."""
        tokens = seqs * (1 + draft_tokens)
        return one_pass(self.target, self.machine, self.efficiency, tokens=tokens, seqs=seqs, context=context)

    def _draft(self, seqs: int, context: int, k: int) -> float:
        """Return the seconds of drafting in a round."""
        model = self.drafting.model
        host = seqs * self.drafting.host_seconds if k else 0.0
        if model is None or not k:
            return host
        passes = 1 if self.drafting.parallel else k
        tokens = seqs * k if self.drafting.parallel else seqs
        draft_pass = one_pass(model, self.machine, self.efficiency, tokens=tokens, seqs=seqs, context=context)
        return host + draft_pass.seconds * passes
