"""What a draft is trained to make small, from the target's law p and its own law q at each position.

The share of guesses drawn from q that are kept is alpha = sum over x of min(p(x), q(x)) = 1 - TV(p, q). What a draft
cannot guess is lost to it: p is not rescaled there, so alpha is what the engine will see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from outrider.errors import OutriderError

_LN2, _TINY = math.log(2), 1e-20


@dataclass(frozen=True, eq=False)
class Distributions:
    """Over what the draft can guess."""

    p: torch.Tensor  # [*, Vd] the target's probabilities, which may sum to less than 1
    log_q: torch.Tensor  # [*, Vd] the draft's log-probabilities

    @cached_property
    def alpha(self) -> torch.Tensor:
        """[*] the share of drawn guesses that are kept: Leviathan et al. 2023, theorem 3.5."""
        return torch.minimum(self.p, self.log_q.exp()).sum(-1)

    @property
    def log_p(self) -> torch.Tensor:
        """[*, Vd] log-probabilities of the target, given that it can be guessed what it says."""
        return self.p.clamp(min=_TINY).log() - self.p.sum(-1, keepdim=True).clamp(min=_TINY).log()


def cross_entropy(laws: Distributions) -> torch.Tensor:
    """-sum p log q, with p given that it can be guessed; its slope is that of the forward divergence."""
    return -(laws.p * laws.log_q).sum(-1) / laws.p.sum(-1).clamp(min=_TINY)


def forward_kl(laws: Distributions) -> torch.Tensor:
    """sum p log(p / q)."""
    log_p = laws.log_p
    return (log_p.exp() * (log_p - laws.log_q)).sum(-1)


def reverse_kl(laws: Distributions) -> torch.Tensor:
    """sum q log(q / p)."""
    return (laws.log_q.exp() * (laws.log_q - laws.log_p)).sum(-1)


def jensen_shannon(laws: Distributions) -> torch.Tensor:
    """(KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2."""
    p, q = laws.log_p, laws.log_q
    middle = torch.logaddexp(p, q) - _LN2
    return ((p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)) / 2


def total_variation(laws: Distributions) -> torch.Tensor:
    """1 - alpha."""
    return 1 - laws.alpha


def negative_log_alpha(laws: Distributions) -> torch.Tensor:
    """-log alpha (LK losses, 2602.23881)."""
    return -laws.alpha.clamp(min=1e-6).log()


def hybrid(laws: Distributions) -> torch.Tensor:
    """w KL + (1 - w)(1 - alpha) with w = exp(-3 alpha): first the shape, then what is kept (LK losses, 2602.23881)."""
    alpha = laws.alpha
    weight = (-3 * alpha.detach()).exp()
    return weight * forward_kl(laws) + (1 - weight) * (1 - alpha)


LOSSES: Mapping[str, Callable[[Distributions], torch.Tensor]] = MappingProxyType(
    {
        "ce": cross_entropy,
        "kl": forward_kl,
        "rkl": reverse_kl,
        "jsd": jensen_shannon,
        "tv": total_variation,
        "nla": negative_log_alpha,
        "hybrid": hybrid,
    }
)
LENGTH = "length"  # of all steps together


def shortfall(alphas: torch.Tensor, here: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """[*] guesses of each chain that are expected to be lost: S - sum_j prod_(i <= j) alpha_i (Bebop, 2606.12370).

    Args:
        alphas: [S, *] of the chain's guesses behind each column.
        here: [S, *] where there is such a guess, and all before it.
        weights: [S] of such a guess, which may stand for those of columns that do not go on so far.
    """
    chance = torch.where(here, alphas, 1.0).cumprod(0) * here
    lost = here.float() - chance  # and no product of matrices, which would be in bfloat16
    return torch.stack([weight * each for weight, each in zip(weights, lost, strict=True)]).sum(0)


def parse(text: str) -> dict[str, float]:
    """Weights by name from `ce`, or from `ce:0.1,tv:0.9`.

    Raises:
        OutriderError: a name or a weight is none, or a name stands there twice.
    """
    out: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        if name in out:
            raise OutriderError(f"loss {name} stands in {text!r} twice; give it one weight, as in ce:0.1,tv:0.9")
        if name not in LOSSES and name != LENGTH:
            raise OutriderError(f"loss {name!r} is unknown; use {', '.join([*LOSSES, LENGTH])}, or ce:0.1,tv:0.9")
        try:
            out[name] = float(weight or 1)
        except ValueError:
            raise OutriderError(f"the weight {weight!r} of loss {name} is not a number; write {name}:0.5") from None
        if not out[name] > 0 or math.isinf(out[name]):
            raise OutriderError(f"the weight {weight} of loss {name} is not above 0; leave the loss out instead")
    return out
