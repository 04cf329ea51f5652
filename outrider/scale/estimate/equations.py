"""Estimate the speedup of speculation on any machine, with rooflines of its passes (Williams et al. 2009)."""

from dataclasses import dataclass
from enum import StrEnum

from outrider.drafting.plan.speedup import decode_limit, roof


class Bound(StrEnum):
    """The limit of a pass's speed."""

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
    layers: float  # a part of a model may have a fraction of a layer
    weights: float  # weights that every token is multiplied with, without experts and the embedding table
    table: float = 0.0  # weights of an embedding table that is not the output layer as well
    experts: Experts | None = None
    attention: tuple[Attention, ...] = ()
    bits: float = 16.0  # bits of a weight
    cache_bits: float = 16.0  # bits of a cached number
    int8: bool = False  # multiply in 8 bits
    hidden: float = 0.0  # numbers of a hidden state; 0: unknown
    output: float = 0.0  # weights of the output layer, which are a part of `weights`; 0: unknown

    def held_bytes(self) -> float:
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
    draft_pass_seconds: float = 0.0  # overhead of a draft's pass or a lookup: its call, the choice of tokens


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
        machine: the machine that it runs on.
        tokens: tokens of the pass, of all sequences together.
        seqs: sequences whose KV caches the pass reads.
        context: cached tokens of each sequence.
    """
    return roofline_pass(
        machine,
        efficiency,
        read_bytes=model.read_bytes(tokens) + seqs * model.cache_bytes(context),
        operations=tokens * model.operations(context),
        layers=model.layers,
        int8=model.int8,
    )


def roofline_pass(
    machine: Machine, efficiency: Efficiency, *, read_bytes: float, operations: float, layers: float, int8: bool
) -> Pass:
    """Return the time of a pass that reads so many bytes and computes so many operations. See `one_pass`."""
    bandwidth = machine.bandwidth * efficiency.bandwidth
    rate = (machine.int8 if int8 else machine.bf16) * efficiency.arithmetic
    roof_seconds = 1 / roof(bytes_per_pass=read_bytes, flops_per_pass=operations, bandwidth=bandwidth, gemm=rate)
    read_seconds = 1 / decode_limit(read_bytes, bandwidth)
    arithmetic_seconds = operations / rate
    overhead = efficiency.layer_seconds + (efficiency.allreduce_seconds if machine.devices > 1 else 0.0)
    exposed_seconds = efficiency.exposed * min(read_seconds, arithmetic_seconds)
    return Pass(
        seconds=roof_seconds + exposed_seconds + layers * overhead,
        bound=Bound.BANDWIDTH if read_seconds >= arithmetic_seconds else Bound.ARITHMETIC,
    )
