"""Losses of training, computed from their definitions."""

import math
from itertools import product


def expected_loss(name, p, q):
    """A loss by its definition, for one pair of distributions as lists of floats."""
    alpha = sum(map(min, p, q))
    total = sum(p)
    p = [x / total for x in p]

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    def softened(a):
        roots = [math.sqrt(x) for x in a]
        return [root / sum(roots) for root in roots]

    middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    weight = math.exp(-3 * alpha)
    return {
        "ce": -sum(x * math.log(y) for x, y in zip(p, q, strict=True)),
        "kl": kl(p, q),
        "kl2": 4 * kl(softened(p), softened(q)),
        "rkl": kl(q, p),
        "jsd": (kl(p, middle) + kl(q, middle)) / 2,
        "tv": 1 - alpha,
        "nla": -math.log(alpha),
        "hybrid": weight * kl(p, q) + (1 - weight) * (1 - alpha),
    }[name]


def expected_rejections(alphas):
    """The expected number of rejected draft tokens, by enumeration of all outcomes of a chain."""
    total = 0.0
    for accepted in product((True, False), repeat=len(alphas)):
        probability = math.prod(a if ok else 1 - a for a, ok in zip(alphas, accepted, strict=True))
        first_rejected = next((i for i, ok in enumerate(accepted) if not ok), len(alphas))
        total += probability * (len(alphas) - first_rejected)
    return total
