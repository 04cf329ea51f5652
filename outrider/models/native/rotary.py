"""The rotary embedding of a model on the native kernels, computed from its configuration.

The formulas follow the papers that they name, in the order of operations of transformers, so that
the frequencies are equal in all bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import UnsupportedModel

_NO_ROTARY = -1
_STILL_TOKENS = 16384  # in which a dimension that hardly turns makes less than one radian
Rope = Mapping[str, Any]  # `rope_parameters` of a configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The rotary embedding of queries and keys. Layers may have different tables."""

    frequency: torch.Tensor  # [tables, R / 2] float32; R leading dimensions of a head are rotated
    scale: torch.Tensor  # [tables] float32, factor of sine and cosine
    table: tuple[int, ...]  # [layers]; -1: no rotary embedding

    @classmethod
    def of(cls, config: Any, layer_types: tuple[str, ...], dim: int) -> Rotary:
        """Compute the rotary embedding of heads of `dim` dimensions from a text configuration.

        Raises:
            UnsupportedModel: the type of scaling is unknown.
        """
        ropes = config.rope_parameters
        kinds = sorted(set(layer_types) & ropes.keys())
        tables = [_frequencies(ropes[kind], config, dim) for kind in kinds] or [_frequencies(ropes, config, dim)]
        uses_rope = getattr(config, "no_rope_layers", None) or (1,) * len(layer_types)  # 0: the layer has none
        numbers = [kinds.index(kind) if kinds else 0 for kind in layer_types]
        return cls(
            frequency=torch.stack([frequency for frequency, _ in tables]),
            scale=torch.tensor([scale for _, scale in tables]).float(),
            table=tuple(number if uses else _NO_ROTARY for number, uses in zip(numbers, uses_rope, strict=True)),
        )

    def still_factors(self, layer: int, dim: int) -> torch.Tensor:
        """Return [dim] the factors of dimensions of a head that a layer hardly turns; 0 for the others."""
        factors = torch.ones(dim)
        if (table := self.table[layer]) != _NO_ROTARY:
            still = self.frequency[table] * _STILL_TOKENS < 1
            factors[: self.dim] = torch.cat([still, still]) * self.scale[table]
        return factors

    @property
    def dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return 2 * self.frequency.shape[1]


def _frequencies(rope: Rope, config: Any, dim: int) -> tuple[torch.Tensor, float]:
    """Return the frequencies [R / 2] in radians per position, and the factor of sine and cosine."""
    size = int(dim * rope.get("partial_rotary_factor", 1.0))
    powers = rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    kind = rope["rope_type"]
    if kind in ("default", "dynamic"):  # within the context length, both are the same
        frequency, scale = 1.0 / powers, 1.0
    elif kind == "linear":
        frequency, scale = 1.0 / powers / rope["factor"], 1.0
    elif kind == "llama3":
        frequency = llama3(
            1.0 / powers,
            rope["original_max_position_embeddings"],
            factor=rope["factor"],
            low=rope["low_freq_factor"],
            high=rope["high_freq_factor"],
        )
        scale = 1.0
    elif kind == "yarn":
        frequency, scale = _yarn(powers, rope, config)
    elif kind == "longrope":
        frequency, scale = _longrope(powers, rope, config)
    else:
        raise UnsupportedModel(f"{config.model_type}: the native kernels do not support rotary scaling of type {kind}")
    if (divisors := rope.get("divisors")) is not None:  # of a GGUF file
        frequency = frequency / torch.tensor(divisors)
    return frequency, scale


def llama3(frequency: torch.Tensor, original: float, *, factor: float, low: float, high: float) -> torch.Tensor:
    """Scale frequencies for contexts longer than the original one (Llama 3.1).

    Args:
        frequency: [R / 2].
        original: the original context, in tokens.
        factor: low frequencies are divided by it, and those between the bounds in part.
        low: turns in the original context of the highest of the low frequencies.
        high: turns in it of the lowest of those that are not changed.
    """
    length = 2 * math.pi / frequency
    scaled = torch.where(length > original / low, frequency / factor, frequency)
    share = (original / length - low) / (high - low)
    mixed = (1 - share) * scaled / factor + share * scaled
    between = (length >= original / high) & (length <= original / low)
    return torch.where(between, mixed, scaled)


def _yarn(powers: torch.Tensor, rope: Rope, config: Any) -> tuple[torch.Tensor, float]:
    """Scale low frequencies, with a ramp by index (YaRN, Peng et al. 2023, 3.2)."""
    theta = rope["rope_theta"]
    original = rope["original_max_position_embeddings"]
    factor = rope["factor"]
    if factor is None:
        factor = config.max_position_embeddings / original

    kept = yarn_share(
        len(powers),
        theta,
        original,
        fast=rope.get("beta_fast") or 32,
        slow=rope.get("beta_slow") or 1,
        rounded=rope.get("truncate", True),
    )
    frequency = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequency, _yarn_scale(factor, rope)


def yarn_share(count: int, theta: float, original: float, *, fast: float, slow: float, rounded: bool) -> torch.Tensor:
    """Return the weight [count] of the original frequencies, by their index (YaRN, Peng et al. 2023, 3.2).

    Args:
        count: number of frequencies.
        theta: their base.
        original: the original context, in tokens.
        fast: turns in it of frequencies that are not changed.
        slow: turns in it of frequencies that are scaled in full.
        rounded: whether the bounds are rounded to whole indices.
    """
    size = 2 * count

    def index_of(turns: float) -> float:
        """Return the fractional index of the frequency with this many turns in the original context."""
        return (size * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(theta))

    begin = index_of(fast)
    end = index_of(slow)
    if rounded:
        begin = math.floor(begin)
        end = math.ceil(end)
    begin = max(begin, 0)
    end = min(end, size - 1)
    end += 0.001 if begin == end else 0
    return 1 - ((torch.arange(count, dtype=torch.float32) - begin) / (end - begin)).clamp(0, 1)


def _yarn_scale(factor: float, rope: Rope) -> float:
    def scale_of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale_of(over) / scale_of(under) if over and under else scale_of(1)


def _longrope(powers: torch.Tensor, rope: Rope, config: Any) -> tuple[torch.Tensor, float]:
    """Divide each frequency by its own factor (LongRoPE, Ding et al. 2024), as for texts in the original context."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / original
    scale = rope.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (torch.tensor(rope["short_factor"], dtype=torch.float32) * powers), scale
