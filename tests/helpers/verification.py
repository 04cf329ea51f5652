"""Random drafts and target distributions, on which implementations of a verification rule are compared."""

import torch

from outrider.core.types import Draft, DraftKind, Packed

SHAPES = {"empty": (), "one": (-1,), "chain": (-1, 0, 1, 2), "star": (-1, -1, -1), "tree": (-1, -1, 0, 0, 1, 2, -1)}
KINDS = {
    "one-hot": (DraftKind.ONE_HOT,),
    "sampled": (DraftKind.SAMPLED,),
    "without replacement": (DraftKind.WITHOUT_REPLACEMENT,),
    "mixed": (DraftKind.SAMPLED, DraftKind.WITHOUT_REPLACEMENT, DraftKind.ONE_HOT),
}


def normalize(mass):
    return mass / mass.sum(-1, keepdim=True)


def make_case(parent, kinds, *, batch_size, vocab, generator, zeros=0.0, invalid=0.0, near=False):
    """Return a draft and its target distribution p.

    Draft tokens are sampled from q as their kinds require. `zeros` is the share of tokens without probability in p.
    `invalid` is the share of draft tokens that are not in the vocabulary. With `near`, q is close to p.
    """
    size = len(parent)
    kinds = [kinds[node % len(kinds)] for node in range(size)]
    p = torch.rand(batch_size, 1 + size, vocab, generator=generator).pow(4) + 1e-9
    p = p * (torch.rand(p.shape, generator=generator) >= zeros) + 1e-30
    p = normalize(p)
    tokens = torch.zeros(batch_size, size, dtype=torch.int64)
    q = torch.zeros(batch_size, size, vocab)
    by_parent: dict[int, torch.Tensor] = {}
    for node, above in enumerate(parent):
        probs = normalize(torch.rand(batch_size, vocab, generator=generator).pow(4) + 1e-9)
        probs = by_parent.setdefault(above, probs)
        if near:
            probs = by_parent[above] = normalize(p[:, above + 1] + 0.1 * probs)
        remaining = probs.clone()
        for other in range(node):
            if parent[other] == above and kinds[other] == kinds[node] == DraftKind.WITHOUT_REPLACEMENT:
                remaining.scatter_(1, tokens[:, other, None], 0.0)
        if kinds[node] == DraftKind.ONE_HOT:
            tokens[:, node] = torch.randint(vocab, (batch_size,), generator=generator)
        else:
            tokens[:, node] = torch.multinomial(remaining + 1e-30, 1, generator=generator)[:, 0]
            q[:, node] = probs
    is_invalid = torch.rand(tokens.shape, generator=generator) < invalid
    tokens = torch.where(is_invalid, vocab + 3, tokens)
    count = torch.full((batch_size,), size)
    if invalid:
        count = torch.randint(size + 1, (batch_size,), generator=generator)
    draft = Draft(
        tokens=tokens,
        parent=torch.tensor(parent, dtype=torch.int64).expand(batch_size, size),
        count=count,
        kind=torch.tensor([int(kind) for kind in kinds], dtype=torch.int64).expand(batch_size, size),
        q=Packed.of(q) if any(kinds) else None,
        width=(size,) * batch_size,
        depth=(size,) * batch_size,
        chain=list(parent) == list(range(-1, size - 1)),
    )
    return draft, p
