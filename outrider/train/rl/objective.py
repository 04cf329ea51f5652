"""The terms of the loss of GRPO (Shao et al. 2024, DeepSeekMath)."""

import torch


def group_advantages(rewards: torch.Tensor, *, scale: bool = True) -> torch.Tensor:
    """Return the advantages of rewards [groups, samples]. A NaN is a sample without a reward; its advantage is 0."""
    given = ~rewards.isnan()
    count = given.sum(1, keepdim=True).clamp(min=1)
    centered = torch.where(given, rewards - rewards.nansum(1, keepdim=True) / count, 0.0)
    if not scale:
        return centered
    deviation = (centered.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centered / (deviation + 1e-4)


def down_sample(rewards: torch.Tensor, count: int) -> torch.Tensor:
    """Keep `count` rewards of each group [groups, samples] and replace the others by NaN.

    Of all choices, the kept ones have the largest variance (Xu et al. 2025, "Not All Rollouts are
    Useful"). Sampling is cheap with speculation, and most of a group often teaches nothing new.
    """
    kept = torch.full_like(rewards, torch.nan)
    for group, out in zip(rewards, kept, strict=True):
        order = group.argsort(stable=True)[: int((~group.isnan()).sum())]  # NaN comes last
        if len(order) > count:
            # The largest variance needs the lowest i and the highest count - i rewards, for some i.
            choices = [torch.cat([order[:i], order[len(order) - (count - i) :]]) for i in range(count + 1)]
            order = max(choices, key=lambda choice: float(group[choice].var(correction=0)))
        out[order] = group[order]
    return kept


def clipped_objective(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the loss of PPO by token (Schulman et al. 2017, eq. 7)."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def importance_weights(policy: torch.Tensor, rollout: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the ratios of the probabilities of tokens under policy and rollout, at most `cap`.

    Both arguments are log-probabilities. This is truncated importance sampling (Ionides 2008).
    """
    return (policy - rollout).exp().clamp(max=cap)


def kl_estimate(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return an estimate of KL(new || reference) by token, which is never negative (Schulman 2020, k3)."""
    difference = reference - new
    return difference.exp() - difference - 1
