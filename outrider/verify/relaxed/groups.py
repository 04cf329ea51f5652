"""Groups of tokens, and the rule that is exact for them: rejection sampling of the group of a draft token.

A token of n groups counts for each of them with a share of 1 / n. So a distribution over tokens
gives a distribution over groups, and tokens of one group may replace each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from outrider.core.noise import Noise
from outrider.core.types import Draft, Verdict
from outrider.verify.verdict import accept_chain, draft_probs, normalize, prob_of

if TYPE_CHECKING:
    from outrider.verify.rules import VerifyFunction


class Groups(Protocol):
    """The groups of the tokens of a vocabulary V. Each token belongs to at least one of the G groups."""

    def mass(self, probs: torch.Tensor) -> torch.Tensor:
        """Return [B, G], the sum over the tokens of each group of probability [B, V] times share."""

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return [B, V], the mean of `values` [B, G] over the groups of each token."""


GroupsOf = Callable[[torch.Tensor], Groups]  # the groups at a node, from p [B, V]


@dataclass(frozen=True, slots=True)
class Partition:
    """Groups that do not overlap."""

    labels: torch.Tensor  # [B, V] or [1, V] int64: the group of each token
    count: int  # G

    def mass(self, probs: torch.Tensor) -> torch.Tensor:
        return probs.new_zeros(len(probs), self.count).scatter_add_(1, self.labels.expand_as(probs), probs)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return values.gather(1, self.labels.expand(len(values), -1))


@dataclass(frozen=True, slots=True)
class OverlappingGroups:
    """Groups that may overlap, as M pairs of a token and a group."""

    token: torch.Tensor  # [M] int64
    group: torch.Tensor  # [M] int64
    number: torch.Tensor  # [V] int64: how many groups a token has
    count: int  # G

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], vocab: int, device: torch.device) -> OverlappingGroups:
        """Make groups from lists of distinct tokens. Any other token gets one of its own."""
        grouped = {token for group in groups for token in group}
        every = [*groups, *([token] for token in range(vocab) if token not in grouped)]
        token = torch.tensor([token for group in every for token in group], device=device)
        group = torch.tensor([i for i, group in enumerate(every) for _ in group], device=device)
        return cls(token=token, group=group, number=token.bincount(minlength=vocab), count=len(every))

    def mass(self, probs: torch.Tensor) -> torch.Tensor:
        parts = (probs / self.number)[:, self.token]
        return probs.new_zeros(len(probs), self.count).index_add_(1, self.group, parts)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        sums = values.new_zeros(len(values), len(self.number))
        return sums.index_add_(1, self.token, values[:, self.group]) / self.number


def group_rejection(groups_of: GroupsOf) -> VerifyFunction:
    """Return the rule that accepts the group of a draft token with probability min(1, p(g) / q(g)). Chains only.

    The group g of a draft token x is drawn uniformly from the groups of x; the rule accepts with the mean probability.
    At a rejection, a group has the distribution norm((p(g) - q(g))+), and the bonus token is sampled from p within the
    group. So the group has the probability p(g), whatever q is (Yanuka et al. 2025, arXiv 2511.13732). Tokens without
    probability under p are never accepted, and q(g) does not count them.

    Args:
        groups_of: the groups at a node. They may depend on p, but not on the draft token.
    """

    def rule(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
        q = draft_probs(draft, p)

        def step(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            groups = groups_of(p[:, i])
            p_group = groups.mass(p[:, i])
            q_group = groups.mass(torch.where(p[:, i] > 0, q[:, i], 0.0))
            ratio = (p_group / q_group).nan_to_num(nan=0.0, posinf=1.0).clamp(max=1)
            possible = prob_of(p[:, i], draft.tokens[:, i]) > 0
            chance = torch.where(possible, prob_of(groups.mean(ratio), draft.tokens[:, i]), 0.0)
            rest = ((p_group - q_group).clamp(min=0) / p_group).nan_to_num(nan=0.0)
            return chance, normalize(p[:, i] * groups.mean(rest), p[:, i])

        return accept_chain(draft, p, noise, step)

    return rule


def pcg(groups: Groups) -> VerifyFunction:
    """Return the rule of PCG: it accepts a draft token for its group, and verifies chains (arXiv 2511.13732).

    Given the tokens before it, the group of an emitted token has the target's distribution. An accepted draft token is
    kept, so within a group the draft decides. If the target's next group depends on the text through its groups only,
    the sequence of groups has the target's distribution as well.
    """
    return group_rejection(lambda _: groups)
