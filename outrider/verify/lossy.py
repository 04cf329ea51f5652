"""Lossy verification rules. They change the output distribution and are used only when chosen by name."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch

from outrider.core.noise import Noise
from outrider.core.types import Draft, Draw, Verdict
from outrider.verify.rules import Verifier, VerifyFunction, rejection
from outrider.verify.verdict import accept_path, acceptable_nodes, prob_of


def typical(epsilon: float = 0.09, delta: float = 0.3) -> VerifyFunction:
    """Accept a draft token if p(x) > min(epsilon, delta exp(-H(p))) (Cai et al. 2024, Medusa, sec. 2.3.1).

    The rule accepts the longest path whose nodes all pass. The bonus token is sampled from p.
    """

    def rule(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
        entropy = -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)  # [B, 1 + N]
        threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
        seqs = torch.arange(len(p), device=p.device)
        acceptable = acceptable_nodes(draft, p)
        depth = torch.zeros_like(p[..., 0], dtype=torch.int64)  # [B, 1 + N] accepted depth; -1 where rejected
        for j in range(draft.size):
            parent = draft.parent[:, j] + 1
            accept = (
                acceptable[:, j]
                & (prob_of(p[seqs, parent], draft.tokens[:, j]) > threshold[seqs, parent])
                & (depth[seqs, parent] >= 0)
            )
            depth[:, j + 1] = torch.where(accept, depth[seqs, parent] + 1, -1)
        last = depth.argmax(1)
        return accept_path(draft, p, last - 1, p[seqs, last], noise)

    return rule


def lenient(lenience: float = 0.5) -> VerifyFunction:
    """Accept x with probability min(1, p(x) / (l q(x))), l in (0, 1) (Leviathan et al. 2023, appendix A.5)."""
    return partial(rejection, lenience=lenience)


LOSSY: Mapping[str, Verifier] = MappingProxyType(
    {
        "typical": Verifier(name="typical", rule=typical(), draw=Draw.ARGMAX, trees=True, exact=False),
        "lenient": Verifier(name="lenient", rule=lenient(), draw=Draw.SAMPLE, trees=False, exact=False),
    }
)
