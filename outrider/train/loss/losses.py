"""The losses, computed from the target distribution p and the draft distribution q at each position.

A draft token that is sampled from q is accepted with probability alpha = sum over x of min(p(x),
q(x)) = 1 - TV(p, q). Tokens that are not in the draft vocabulary are always missed. p is not
renormalized without them, so alpha is the acceptance that the engine will have.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from outrider.errors import OutriderError, either

_LN2 = math.log(2)
_TINY = 1e-20
_SOFT_TEMPERATURE = 2.0


@dataclass(frozen=True, eq=False)
class Distributions:
    """Target and draft distributions over the draft vocabulary."""

    p: torch.Tensor  # [*, Vd] the target's probabilities, which may sum to less than 1
    log_q: torch.Tensor  # [*, Vd] the draft's log-probabilities

    @cached_property
    def alpha(self) -> torch.Tensor:
        """[*] acceptance probability of a sampled token: Leviathan et al. 2023, theorem 3.5."""
        return torch.minimum(self.p, self.log_q.exp()).sum(-1)

    @property
    def log_p(self) -> torch.Tensor:
        """[*, Vd] the target's log-probabilities, renormalized over the draft vocabulary."""
        return self.p.clamp(min=_TINY).log() - self.p.sum(-1, keepdim=True).clamp(min=_TINY).log()


def cross_entropy(dist: Distributions) -> torch.Tensor:
    """Return -sum p log q, with p renormalized. It has the gradient of the forward KL divergence."""
    return -(dist.p * dist.log_q).sum(-1) / dist.p.sum(-1).clamp(min=_TINY)


def forward_kl(dist: Distributions) -> torch.Tensor:
    """Return sum p log(p / q)."""
    log_p = dist.log_p
    return (log_p.exp() * (log_p - dist.log_q)).sum(-1)


def softened_kl(dist: Distributions) -> torch.Tensor:
    """Return T² KL(p_T, q_T) at temperature T = 2 (Hinton et al. 2015; used for MTP modules by Nemotron 3 Ultra).

    Unlikely tokens weigh more than in `forward_kl`.
    """
    log_p = (dist.log_p / _SOFT_TEMPERATURE).log_softmax(-1)
    log_q = (dist.log_q / _SOFT_TEMPERATURE).log_softmax(-1)
    return _SOFT_TEMPERATURE**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(dist: Distributions) -> torch.Tensor:
    """Return sum q log(q / p)."""
    return (dist.log_q.exp() * (dist.log_q - dist.log_p)).sum(-1)


def jensen_shannon(dist: Distributions) -> torch.Tensor:
    """Return (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2."""
    log_p = dist.log_p
    log_q = dist.log_q
    log_m = torch.logaddexp(log_p, log_q) - _LN2
    return ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)) / 2


def total_variation(dist: Distributions) -> torch.Tensor:
    """Return 1 - alpha."""
    return 1 - dist.alpha


def negative_log_alpha(dist: Distributions) -> torch.Tensor:
    """Return -log alpha (LK losses, 2602.23881)."""
    return -dist.alpha.clamp(min=1e-6).log()


def hybrid(dist: Distributions) -> torch.Tensor:
    """Return w KL + (1 - w)(1 - alpha) with w = exp(-3 alpha) (LK losses, 2602.23881).

    While alpha is small, the loss fits the whole distribution. When alpha is large, it maximizes the acceptance.
    """
    alpha = dist.alpha
    weight = (-3 * alpha.detach()).exp()
    return weight * forward_kl(dist) + (1 - weight) * (1 - alpha)


LOSSES: Mapping[str, Callable[[Distributions], torch.Tensor]] = MappingProxyType(
    {
        "ce": cross_entropy,
        "kl": forward_kl,
        "kl2": softened_kl,
        "rkl": reverse_kl,
        "jsd": jensen_shannon,
        "tv": total_variation,
        "nla": negative_log_alpha,
        "hybrid": hybrid,
    }
)
LENGTH = "length"  # the loss of all draft tokens of a chain together: `length_loss`


def length_loss(alphas: torch.Tensor, exists: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return the expected number of rejected draft tokens of each chain [*] (Bebop, 2606.12370).

    For a chain of S draft tokens this is S - sum_j prod_(i <= j) alpha_i. A draft token after a
    rejected one counts as rejected.

    Args:
        alphas: [S, *] acceptance probabilities of the draft tokens of each chain.
        exists: [S, *] whether this draft token and all before it exist.
        weights: [S] weight of a draft token by position. It is above 1 if some columns stand for
            others, whose chains are shorter.
    """
    accepted = torch.where(exists, alphas, 1.0).cumprod(0) * exists
    rejected = exists.float() - accepted
    # Not a matrix product, which autocast would compute in bfloat16.
    return torch.stack([weight * row for weight, row in zip(weights, rejected, strict=True)]).sum(0)


def parse(text: str) -> dict[str, float]:
    """Return the weight of each loss from a text such as `ce` or `ce:0.1,tv:0.9`.

    Raises:
        OutriderError: a name is unknown or occurs twice, or a weight is not a number above 0.
    """
    losses: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        if name in losses:
            raise OutriderError(f"loss {name} occurs twice in {text!r}; give it one weight, as in ce:0.1,tv:0.9")
        if name not in LOSSES and name != LENGTH:
            raise OutriderError(
                f"loss {name!r} is unknown; use {either([*LOSSES, LENGTH])}, or a sum such as ce:0.1,tv:0.9"
            )
        try:
            losses[name] = float(weight or 1)
        except ValueError:
            raise OutriderError(f"the weight {weight!r} of loss {name} is not a number; write {name}:0.5") from None
        if not losses[name] > 0 or math.isinf(losses[name]):
            raise OutriderError(
                f"the weight {weight} of loss {name} is not a finite number above 0; leave the loss out instead"
            )
    return losses
