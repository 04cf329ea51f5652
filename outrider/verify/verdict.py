"""Between drafts and verdicts: what a guess was drawn from, which may be kept, and the verdict that a path makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.core import tree
from outrider.core.noise import Noise
from outrider.core.types import Draft, DraftKind, Verdict


def accept_prefix(draft: Draft, p: torch.Tensor, accepted: torch.Tensor, law: torch.Tensor, noise: Noise) -> Verdict:
    """Verdict that accepts the first `accepted` [B] guesses and draws the bonus from `law` [B, V]."""
    return verdict_of(draft, p, prefix_of(draft, accepted), accepted, noise.sample(law, accepted))


def accept_path(draft: Draft, p: torch.Tensor, at: torch.Tensor, law: torch.Tensor, noise: Noise) -> Verdict:
    """Verdict that accepts the path to node `at` [B], -1 for none, and draws the bonus from `law` [B, V]."""
    path, accepted = path_to(draft, at)
    return verdict_of(draft, p, path, accepted, noise.sample(law, accepted))


def verdict_of(
    draft: Draft, p: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor
) -> Verdict:
    """Verdict of the first `accepted` [B] nodes of `path` [B, N], and of the token `bonus` [B] behind them.

    It holds the log-probability that p [B, 1 + N, V] gives each token emitted.
    """
    rows, size = path.shape
    at = torch.cat([torch.zeros_like(bonus)[:, None], path + 1], 1)  # the node that each emitted token follows
    tokens = torch.cat([draft.tokens.gather(1, path.clamp(min=0)), bonus[:, None]], 1)
    tokens = tokens.scatter(1, accepted[:, None], bonus[:, None])
    each = torch.arange(rows, device=p.device)[:, None]
    emitted = torch.arange(size + 1, device=p.device) <= accepted[:, None]
    chance = p[each, at, tokens.clamp(0, p.shape[-1] - 1)]
    return Verdict(path=path, accepted=accepted, bonus=bonus, logprob=torch.where(emitted, chance.log(), 0.0))


def rowwise(verdicts: Mapping[str, Verdict], names: Sequence[str]) -> Verdict:
    """For each row b the verdict of rule `names[b]`, where every rule has judged all rows."""
    if len(verdicts) == 1:
        return next(iter(verdicts.values()))
    out = None
    for name, verdict in verdicts.items():
        if out is None:
            out = verdict
            continue
        own = torch.tensor([each == name for each in names], device=verdict.bonus.device)
        out = Verdict(
            path=torch.where(own[:, None], verdict.path, out.path),
            accepted=torch.where(own, verdict.accepted, out.accepted),
            bonus=torch.where(own, verdict.bonus, out.bonus),
            logprob=torch.where(own[:, None], verdict.logprob, out.logprob),
        )
    assert out is not None
    return out


def prefix_of(draft: Draft, accepted: torch.Tensor) -> torch.Tensor:
    """Nodes [B, N] of the first `accepted` [B] guesses of chains, padded with -1."""
    order = torch.arange(draft.size, device=accepted.device)
    return torch.where(order < accepted[:, None], order, -1)


def path_to(draft: Draft, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes from the root to `at` [B] (-1 is the root itself), padded with -1, and how many they are."""
    if not draft.size:
        return draft.tokens, draft.count
    above = tree.ancestors(draft.parent)[torch.arange(len(at), device=at.device), at.clamp(min=0)]
    above = above & (at >= 0)[:, None]
    order = torch.where(above, torch.arange(draft.size, device=at.device), draft.size).sort(1).values
    return torch.where(order < draft.size, order, -1), above.sum(1)


def ahead(draft: Draft) -> torch.Tensor:
    """[B, 1 + N]: how many tokens of this round precede the one sampled at each node."""
    return torch.cat([torch.zeros_like(draft.count)[:, None], tree.depths(draft)], 1)


def alive_nodes(draft: Draft, p: torch.Tensor) -> torch.Tensor:
    """[B, N]: guesses that may be accepted at all; an id that the target does not have may not."""
    return tree.live(draft) & (draft.tokens >= 0) & (draft.tokens < p.shape[-1])


def proposals(draft: Draft, p: torch.Tensor) -> torch.Tensor:
    """[B, N, V]: the law that each node was drawn from; one-hot where it was chosen."""
    q = torch.zeros_like(p[:, 1:]) if draft.q is None else draft.q.padded().to(p.dtype)
    chosen = (draft.kind == DraftKind.ONE_HOT)[..., None].to(q.dtype)
    return q.scatter_add_(-1, draft.tokens.clamp(0, p.shape[-1] - 1)[..., None], chosen)


def without(q: torch.Tensor, gone: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
    """q [B, V] as the node was drawn from it: without the siblings that are `gone` where the node's law says so."""
    left = q.masked_fill(gone, 0.0)
    return torch.where((law == DraftKind.WITHOUT_REPLACEMENT)[:, None], normalised(left, q), q)


def taken(draft: Draft, node: int, lost: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """[B, V] bool: the token of a rejected node that was drawn without replacement."""
    out = torch.zeros_like(p[:, 0], dtype=torch.bool)
    drawn = lost & (draft.kind[:, node] == DraftKind.WITHOUT_REPLACEMENT)
    return out.scatter_(-1, draft.tokens[:, node].clamp(0, p.shape[-1] - 1)[:, None], drawn[:, None])


def at_token(law: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """[B]: what `law` [B, V] gives each row's token [B]; an id it does not have is read as the nearest one it has."""
    return law.gather(-1, token.clamp(0, law.shape[-1] - 1)[:, None])[:, 0]


def gate(chance: torch.Tensor, met: torch.Tensor) -> torch.Tensor:
    """A probability where `met`, 0 elsewhere; 0 / 0, a guess of no mass on either side, is 0."""
    return torch.where(met, chance.nan_to_num(nan=0.0, posinf=1.0).clamp(0.0, 1.0), 0.0)


def normalised(mass: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """mass / its sum along V; `fallback` where rounding left nothing."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, fallback)


def share_of(excess: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """S / (S + 1 - a); 1 where nothing was lost."""
    whole = excess + 1 - share
    return torch.where(whole > 0, excess / whole, 1.0)
