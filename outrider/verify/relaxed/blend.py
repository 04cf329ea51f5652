"""Verification against a blend of target and draft, whose log-probabilities are recorded.

The output then follows the draft in part. This is useful if the draft prefers wanted outputs, such as answers with a
high reward. The blend (1 - s) p + s q is known at each position, so importance weights correct an estimate from its
samples. Its total variation distance from p is s times that of q, so at most s.
"""

from functools import partial

import torch

from outrider.core import tree
from outrider.core.noise import Noise
from outrider.core.types import Draft, Verdict
from outrider.verify.rules import VerifyFunction, rejection
from outrider.verify.verdict import draft_probs


def blend(share: float) -> VerifyFunction:
    """Return the rule. It verifies chains, token by token, with the rule `rejection`.

    The emitted token at the position of a draft token has the distribution (1 - share) p + share q,
    given the tokens before it. A bonus token after an accepted draft has p. The log-probabilities
    of a verdict are those of these distributions.

    Args:
        share: s, the weight of the draft, between 0 and 1.
    """
    return partial(_verify, share=share)


def _verify(draft: Draft, p: torch.Tensor, noise: Noise, *, share: float) -> Verdict:
    if not draft.size:
        return rejection(draft, p, noise)
    q = draft_probs(draft, p)
    # The sum of q is below 1 if the draft has ids that the target does not have.
    blended = p[:, :-1] + share * (q - q.sum(-1, keepdim=True) * p[:, :-1])
    blended = torch.where(tree.valid_nodes(draft)[..., None], blended, p[:, :-1])
    return rejection(draft, torch.cat([blended, p[:, -1:]], 1), noise)
