"""Exactness for groups of similar tokens that may overlap (PCG, Yanuka et al. 2025, arXiv 2511.13732)."""

from outrider.verify.relaxed.groups import Groups, group_rejection
from outrider.verify.rules import VerifyFunction


def pcg(groups: Groups) -> VerifyFunction:
    """Return the rule that accepts a draft token for its group. It verifies chains.

    Given the tokens before it, the group of an emitted token has the target's distribution. An accepted draft token is
    kept, so within a group the draft decides. If the target's next group depends on the text through its groups only,
    the sequence of groups has the target's distribution as well.
    """
    return group_rejection(lambda _: groups)
