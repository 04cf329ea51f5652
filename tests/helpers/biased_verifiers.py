"""Verification rules with a bias that is easy to overlook. Each test of exactness must reject the biased ones."""

from collections.abc import Callable
from dataclasses import replace

import torch

from outrider.core.noise import Noise
from outrider.core.types import Draft, DraftKind, Packed, Verdict
from outrider.verify.rules import VerifyFunction
from outrider.verify.verdict import accept_prefix, continue_prob, draft_probs, masked_prob, normalize, prob_of


def drops_unlikely(rule: VerifyFunction, bar: float = 0.35) -> VerifyFunction:
    """End the draft before the first sampled token with small q. The token then decides whether it is verified."""

    def biased(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
        likely = _own_q(draft) >= bar
        return rule(replace(draft, count=torch.minimum(draft.count, likely.long().cumprod(1).sum(1))), p, noise)

    return biased


def stops_after_unlikely(rule: VerifyFunction, bar: float = 0.35) -> VerifyFunction:
    """End the draft after that token instead of before it. This rule is exact."""

    def exact(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
        likely = _own_q(draft) >= bar
        return rule(replace(draft, count=torch.minimum(draft.count, likely.long().cumprod(1).sum(1) + 1)), p, noise)

    return exact


def looks_ahead(rule: VerifyFunction, bar: float = 0.35) -> VerifyFunction:
    """Verify the draft only if its last sampled token has large q. The budget of the first depends on the last."""

    def biased(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
        return rule(replace(draft, count=draft.count * (_own_q(draft)[:, -1] >= bar)), p, noise)

    return biased


def scores_softmax(rule: VerifyFunction, q: torch.Tensor) -> VerifyFunction:
    """Verify chosen draft tokens as if they had been sampled from q [V]."""

    def biased(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
        sampled = torch.full_like(draft.kind, int(DraftKind.SAMPLED))
        return rule(replace(draft, kind=sampled, q=Packed.of(q.expand(*draft.tokens.shape, -1))), p, noise)

    return biased


def recomputes_q(rule: VerifyFunction) -> VerifyFunction:
    """Verify with q in a lower precision than the one that the tokens were sampled in."""

    def biased(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
        assert draft.q is not None
        fine = draft.q.values
        coarse = normalize(fine.bfloat16().double(), fine)
        return rule(replace(draft, q=replace(draft.q, values=coarse)), p, noise)

    return biased


def accepts_at_zero(rule: VerifyFunction) -> VerifyFunction:
    """Accept if u <= ratio instead of u < ratio, with u = 0: a token with probability 0 is accepted."""

    class Weak:
        def __init__(self, noise: Noise) -> None:
            self.noise = noise
            self.sample, self.sample_race = noise.sample, noise.sample_race

        def bernoulli(self, prob: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.noise.bernoulli(prob, index) | (prob == 0)

    return lambda draft, p, noise: rule(draft, p, Weak(noise))


def block_with_token_residual(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """The thresholds of block verification, and norm((p - q)+) after them."""
    return _block(draft, p, noise, share_step=lambda share, ratio: (share * ratio).clamp(max=1), token_residual=True)


def block_uncapped(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
    """min(P, Q) / Q with P and Q the products along the whole prefix, without a cap at every step."""
    return _block(draft, p, noise, share_step=lambda share, ratio: share * ratio, token_residual=False)


def greedy_bonus(rule: VerifyFunction) -> VerifyFunction:
    """Take the most probable token as the bonus, instead of a sampled one."""

    def biased(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
        verdict = rule(draft, p, noise)
        each = torch.arange(len(p))
        deepest = verdict.path.gather(1, (verdict.accepted - 1).clamp(min=0)[:, None])[:, 0]
        at = torch.where(verdict.accepted > 0, deepest + 1, 0)
        return replace(verdict, bonus=p[each, at].argmax(-1))

    return biased


def _own_q(draft: Draft) -> torch.Tensor:
    assert draft.q is not None
    return draft.q.padded().gather(-1, draft.tokens[..., None])[..., 0]


def _block(
    draft: Draft,
    p: torch.Tensor,
    noise: Noise,
    *,
    share_step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    token_residual: bool,
) -> Verdict:
    q, size = draft_probs(draft, p), draft.size
    product = [torch.ones_like(p[:, 0, 0])]
    for i in range(size):
        product.append(share_step(product[-1], prob_of(p[:, i], draft.tokens[:, i]) / _own_q(draft)[:, i]))
    share = [each.clamp(max=1) for each in product]
    kept, stands = torch.zeros_like(draft.count), share[0]
    for i in range(1, size + 1):
        chance = share[i]
        if i < size:
            chance = continue_prob((share[i][:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(-1), share[i])
        keep = noise.bernoulli(masked_prob(chance, torch.ones_like(chance, dtype=torch.bool)), torch.full_like(kept, i))
        kept, stands = torch.where(keep, i, kept), torch.where(keep, share[i], stands)
    each = torch.arange(len(p))
    probs = p[each, kept]
    scale = torch.ones_like(stands) if token_residual else stands
    rest = normalize((scale[:, None] * probs - q[each, kept.clamp(max=size - 1)]).clamp(min=0), probs)
    return accept_prefix(draft, p, kept, torch.where((kept < size)[:, None], rest, probs), noise)
