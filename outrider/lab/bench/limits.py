"""The speed limit that memory bandwidth and arithmetic set, and the share of it that each measurement reached."""

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.drafting.plan.speedup import roof
from outrider.lab.bench.figures import Comparison, Decoding

DEFINITIONS: Mapping[str, str] = {
    "read_bytes_per_s": "the median bandwidth of summing a buffer larger than the caches, before and after the"
    " benchmark, in normal and in huge pages; the highest of these medians is used for the limit",
    "gemm_flops_per_s": "the median rate of the product of two large square matrices in the model's precision or in"
    " float32, whichever is faster, before and after the benchmark; the higher one is used for the limit, unless"
    " weights are integers, whose products may be faster",
    "limit_passes_per_s": "min(bandwidth / bytes, gemm / flops) of a pass: it reads the weights once, of routed"
    " experts those that its tokens used, and the cached keys and values of each sequence, and each of its tokens costs"
    " two operations per weight that a token uses",
    "limit_tokens_per_s": "sequences x tau x limit_passes_per_s, where a speculative pass also has a token for each"
    " draft token: the speed at this acceptance if drafting cost nothing",
    "share_of_limit": "tokens_per_s over limit_tokens_per_s",
    "draft_in_sequences": "(W_d + K_d) / K_t: the number of sequences that the target's cache could hold in place of"
    " the draft's weights W_d and cache K_d; K_t is the target's cache of one sequence with a full context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The needs of a pass, and the rates of the machine."""

    weight_bytes_per_pass: float  # without routed experts
    cache_bytes_per_token: float  # per cached token of a sequence
    flops_per_token: float
    read_bytes_per_s: float
    gemm_flops_per_s: float
    expert_bytes: float = 0.0  # of one routed expert of each layer

    def weight_bytes(self, experts: float) -> float:
        """Return W + experts x E, the weights that a pass reads if it uses so many distinct experts of a layer."""
        return self.weight_bytes_per_pass + experts * self.expert_bytes

    def bytes_per_pass(self, *, seqs: int, cached: float, experts: float = 0.0) -> float:
        """Return the weights, and the cache seqs x cached x C of `seqs` sequences of `cached` tokens each."""
        return self.weight_bytes(experts) + seqs * cached * self.cache_bytes_per_token

    def passes_per_s(self, *, seqs: int, cached: float, tokens: float, experts: float = 0.0) -> float:
        """Return the highest possible rate of passes with `tokens` tokens per sequence.

        See `outrider.drafting.plan.speedup.roof`.
        """
        return roof(
            bytes_per_pass=self.bytes_per_pass(seqs=seqs, cached=cached, experts=experts),
            flops_per_pass=self.flops_per_token * seqs * tokens,
            bandwidth=self.read_bytes_per_s,
            gemm=self.gemm_flops_per_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limit of one way to decode."""

    limit_passes_per_s: float
    limit_tokens_per_s: float
    share_of_limit: float | None  # that was reached; None: no speed was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of plain and speculative decoding."""

    cached_tokens: float  # of a sequence, in the mean
    weight_bytes_per_pass: float
    bytes_per_pass: float
    bytes_per_token: float  # of plain decoding
    plain: Limit
    speculative: Limit


def limits(roofline: Roofline, figures: Comparison, *, seqs: int, cached: float) -> Limits:
    """Return the limits of plain and speculative decoding, and the shares of them that `figures` reach.

    Args:
        roofline: the rates of the machine and the cost of a pass.
        figures: the figures of plain and speculative decoding.
        seqs: sequences at once.
        cached: mean cached tokens of a sequence.
    """
    experts = figures.plain.experts
    size = roofline.bytes_per_pass(seqs=seqs, cached=cached, experts=experts)
    return Limits(
        cached_tokens=cached,
        weight_bytes_per_pass=roofline.weight_bytes(experts),
        bytes_per_pass=size,
        bytes_per_token=size / seqs,
        plain=_limit(roofline, figures.plain, seqs=seqs, cached=cached),
        speculative=_limit(roofline, figures.speculative, seqs=seqs, cached=cached),
    )


def _limit(roofline: Roofline, decoding: Decoding, *, seqs: int, cached: float) -> Limit:
    stats = decoding.stats
    tokens = 1 + stats.draft_tokens / stats.passes
    passes = roofline.passes_per_s(seqs=seqs, cached=cached, tokens=tokens, experts=decoding.experts)
    limit = seqs * stats.tau * passes
    speed = decoding.tokens_per_s
    return Limit(
        limit_passes_per_s=passes,
        limit_tokens_per_s=limit,
        share_of_limit=speed.median / limit if speed else None,
    )
