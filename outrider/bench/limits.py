"""The limit that memory and arithmetic set, at each place where speed was measured, and how much of it was reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.bench.report import PLAIN, SPECULATIVE
from outrider.plan.speedup import roof

DEFINITIONS: Mapping[str, str] = {
    "read_bytes_per_s": "summing up a buffer larger than the caches, the median of several times: before and after the"
    " benchmark, in normal and in huge pages; the highest of these medians is the limit",
    "gemm_flops_per_s": "the product of two large square matrices in the model's precision, the median of several"
    " times, before and after; the higher of the two is the limit",
    "limit_passes_per_s": "min(bandwidth / bytes, gemm / flops) of a pass: it reads the weights once and each row's"
    " cached keys and values, and each of its columns costs two operations a weight",
    "limit_tokens_per_s": "rows x tau x limit_passes_per_s, where a speculative pass has a column for each guess as"
    " well: what a draft that costs nothing could reach at this acceptance",
    "share_of_limit": "tokens_per_s over limit_tokens_per_s",
    "draft_in_sequences": "(W_d + K_d) / K_t: sequences that the target's cache could hold in place of the"
    " draft's weights W_d and cache K_d; K_t is the target's cache of one sequence with its whole context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a pass needs, and what the machine delivers."""

    weight_bytes_per_pass: int
    cache_bytes_per_token: float  # that a row has cached
    flops_per_token: float
    read_bytes_per_s: float
    gemm_flops_per_s: float

    def bytes_per_pass(self, *, rows: int, cached: float) -> float:
        """W + rows x cached x C: the weights, and the cache of `rows` with `cached` tokens each."""
        return self.weight_bytes_per_pass + rows * cached * self.cache_bytes_per_token

    def passes_per_s(self, *, rows: int, cached: float, columns: float) -> float:
        """At most, where each row of a pass has so many columns (see `outrider.plan.speedup.roof`)."""
        return roof(
            bytes_per_pass=self.bytes_per_pass(rows=rows, cached=cached),
            flops_per_pass=self.flops_per_token * rows * columns,
            bandwidth=self.read_bytes_per_s,
            gemm=self.gemm_flops_per_s,
        )


def limits(roofline: Roofline, figures: Mapping[str, Any], *, rows: int, cached: float) -> dict[str, Any]:
    """The limits of plain and speculative decoding where `figures` were measured, and the shares reached."""
    size = roofline.bytes_per_pass(rows=rows, cached=cached)
    found: dict[str, Any] = {"cached_tokens": cached, "bytes_per_pass": size, "bytes_per_token": size / rows}
    for name in (PLAIN, SPECULATIVE):
        ours = figures[name]
        passes = roofline.passes_per_s(rows=rows, cached=cached, columns=1 + ours["draft_tokens"] / ours["passes"])
        limit, speed = rows * ours["tau"] * passes, ours["tokens_per_s"]
        found[name] = {
            "limit_passes_per_s": passes,
            "limit_tokens_per_s": limit,
            "share_of_limit": speed["median"] / limit if speed else None,
        }
    return found
