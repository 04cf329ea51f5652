"""Measure how far the tokens of a lossy verification rule are from the target's distribution, by enumeration.

The distances are between a distribution of emitted tokens and p, both [N, V]. Each is a lower bound on what any rule
with this distribution can promise, so a rule that keeps its bound has a distance below it on every instance.
"""

from collections.abc import Callable
from itertools import product

import torch

from outrider.core.types import DraftKind
from outrider.testing.drive import expect
from outrider.testing.enumeration import CASES, Case, Instance, round_distributions
from outrider.verify.relaxed.groups import Groups
from outrider.verify.rules import VerifyFunction

Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (emitted [N, V], p [N, V]) -> [N]

_CASES = (*CASES, Case(zeros=0.3, ending=0.5, foreign=0.2))


def total_variation(emitted: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return [N], half the sum of the differences."""
    return (emitted - p).abs().sum(-1) / 2


def bin_distance(emitted: torch.Tensor, p: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return [N], the smallest r such that tokens of both distributions can be paired at most r bins apart.

    It is the Wasserstein distance of infinite order between the bins. It is infinite if tokens that
    are no bins, which have -1 in `order` [V], differ in probability.
    """
    tolerance = 1e-12
    is_bin = order >= 0
    sequence = order.masked_fill(~is_bin, len(order)).argsort()[: int(is_bin.sum())]
    one, two = emitted[:, sequence].cumsum(-1), p[:, sequence].cumsum(-1)
    result = torch.full_like(emitted[:, 0], torch.inf)
    for r in reversed(range(one.shape[1])):
        width = one.shape[1] - r
        fits = (one[:, :width] <= two[:, r:] + tolerance) & (two[:, :width] <= one[:, r:] + tolerance)
        result = torch.where(fits.all(-1), float(r), result)
    others_equal = ((emitted - p).abs() <= tolerance)[:, ~is_bin].all(-1)
    return torch.where(others_equal, result, torch.inf)


def group_distance(emitted: torch.Tensor, p: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return [N], the smallest total variation distance from p of the groups that emitted tokens can stand for.

    An emitted token stands for one of its groups. The distance is 0 if the groups can be chosen so that they have the
    target's distribution. By Strassen's theorem it is the largest excess, over sets of tokens, of their probability
    over that of all groups with one of them. There are 2**V sets, so the vocabulary must be small.
    """
    vocab = emitted.shape[-1]
    mass = groups.mass(p)
    excess = torch.zeros_like(emitted[:, 0])
    for chosen in product((0.0, 1.0), repeat=vocab):
        tokens = emitted.new_tensor(chosen).expand_as(emitted)
        touched = groups.mass(tokens) > 0
        excess = torch.maximum(excess, (emitted * tokens).sum(-1) - (mass * touched).sum(-1))
    return excess


def measure(rule: VerifyFunction, instance: Instance, distance: Distance) -> float:
    """Return the largest distance, over all prefixes, of the tokens that a rule emits in a round of an instance."""
    largest = 0.0
    for emitted, p in zip(round_distributions(rule, instance), instance.target, strict=True):
        is_emitted = emitted.sum(-1) > 0
        if bool(is_emitted.any()):
            largest = max(largest, float(distance(emitted[is_emitted], p[is_emitted]).max()))
    return largest


def check_bound(
    rule: VerifyFunction,
    distance: Distance,
    limit: float,
    *,
    vocab: int = 4,
    trees: bool = False,
    trials: int = 3,
    seed: int = 0,
    tolerance: float = 1e-9,
) -> None:
    """Check that a lossy verification rule keeps the bound that it declares, by enumeration in float64.

    The instances are those of `check_verifier`: chains of up to two draft tokens and, with `trees`, trees.

    Args:
        rule: the rule, for a vocabulary of `vocab` tokens.
        distance: how far a distribution of emitted tokens is from the target's.
        limit: the declared bound.
        trees: whether the rule verifies trees.
        trials: number of random instances of each case.

    Raises:
        ConformanceError: the emitted tokens are further from the target's distribution than `limit`.
    """
    generator = torch.Generator().manual_seed(seed)
    one_hot, sampled = DraftKind.ONE_HOT, DraftKind.SAMPLED
    shapes: list[tuple[tuple[int, ...], tuple[DraftKind, ...]]] = [
        ((), ()),
        ((-1,), (sampled,)),
        ((-1, 0), (sampled, sampled)),
        ((-1, 0), (one_hot, sampled)),
    ]
    if trees:
        shapes += [((-1, -1), (one_hot, sampled)), ((-1, -1), (one_hot, one_hot))]
    for parent, kinds in shapes:
        for case in _CASES:
            for _ in range(trials):
                instance = Instance.random(vocab, parent, kinds, generator=generator, case=case)
                found = measure(rule, instance, distance)
                message = (
                    f"the distance is {found:.4g}, above {limit:g}, with parents {parent}, kinds {kinds}, case {case}"
                )
                expect(found <= limit + tolerance, message)
