"""Native verification gives the verdicts of the torch rules, for every sequence."""

from __future__ import annotations

import pytest
import torch

from outrider.core.noise import PositionNoise
from outrider.core.types import Draft, DraftKind, Packed
from outrider.errors import UnsupportedModel
from outrider.models.native.library import load_library
from outrider.models.native.rules import fastest_verifier
from outrider.verify.rules import EXACT

try:
    load_library()
except UnsupportedModel as reason:
    pytest.skip(str(reason), allow_module_level=True)

BATCH_SIZE = 64
CPU = torch.device("cpu")
SHAPES = {
    "empty": (),
    "one": (-1,),
    "chain": (-1, 0, 1, 2),
    "star": (-1, -1, -1),
    "tree": (-1, -1, 0, 0, 1, 2, -1),
}
KINDS = {
    "one-hot": (DraftKind.ONE_HOT,),
    "sampled": (DraftKind.SAMPLED,),
    "without replacement": (DraftKind.WITHOUT_REPLACEMENT,),
    "mixed": (DraftKind.SAMPLED, DraftKind.WITHOUT_REPLACEMENT, DraftKind.ONE_HOT),
}
RULES_AND_SHAPES = [
    *((name, shape) for name in ("walk", "coupled", "traversal") for shape in SHAPES),
    *(("block", shape) for shape in ("empty", "one", "chain")),
]


def normalize(mass):
    return mass / mass.sum(-1, keepdim=True)


def make_case(parent, kinds, *, vocab, generator, zeros=0.0, invalid=0.0, near=False):
    """Return a draft and its target distribution p.

    Draft tokens are sampled from q as their kinds require. `zeros` is the share of tokens without probability in p.
    `invalid` is the share of draft tokens that are not in the vocabulary. With `near`, q is close to p.
    """
    size = len(parent)
    kinds = [kinds[node % len(kinds)] for node in range(size)]
    p = torch.rand(BATCH_SIZE, 1 + size, vocab, generator=generator).pow(4) + 1e-9
    p = p * (torch.rand(p.shape, generator=generator) >= zeros) + 1e-30
    p = normalize(p)
    tokens = torch.zeros(BATCH_SIZE, size, dtype=torch.int64)
    q = torch.zeros(BATCH_SIZE, size, vocab)
    by_parent: dict[int, torch.Tensor] = {}
    for node, above in enumerate(parent):
        probs = normalize(torch.rand(BATCH_SIZE, vocab, generator=generator).pow(4) + 1e-9)
        probs = by_parent.setdefault(above, probs)
        if near:
            probs = by_parent[above] = normalize(p[:, above + 1] + 0.1 * probs)
        remaining = probs.clone()
        for other in range(node):
            if parent[other] == above and kinds[other] == kinds[node] == DraftKind.WITHOUT_REPLACEMENT:
                remaining.scatter_(1, tokens[:, other, None], 0.0)
        if kinds[node] == DraftKind.ONE_HOT:
            tokens[:, node] = torch.randint(vocab, (BATCH_SIZE,), generator=generator)
        else:
            tokens[:, node] = torch.multinomial(remaining + 1e-30, 1, generator=generator)[:, 0]
            q[:, node] = probs
    is_invalid = torch.rand(tokens.shape, generator=generator) < invalid
    tokens = torch.where(is_invalid, vocab + 3, tokens)
    count = torch.full((BATCH_SIZE,), size)
    if invalid:
        count = torch.randint(size + 1, (BATCH_SIZE,), generator=generator)
    draft = Draft(
        tokens=tokens,
        parent=torch.tensor(parent, dtype=torch.int64).expand(BATCH_SIZE, size),
        count=count,
        kind=torch.tensor([int(kind) for kind in kinds], dtype=torch.int64).expand(BATCH_SIZE, size),
        q=Packed.of(q) if any(kinds) else None,
        width=(size,) * BATCH_SIZE,
        depth=(size,) * BATCH_SIZE,
        chain=list(parent) == list(range(-1, size - 1)),
    )
    return draft, p


@pytest.mark.fast_cases(
    "walk-empty-one-hot-{}",
    "walk-one-sampled-{'zeros': 0.5}",
    "walk-chain-without replacement-{'invalid': 0.3}",
    "walk-star-mixed-{'near': True}",
    "walk-tree-one-hot-{}",
    "coupled-empty-sampled-{'invalid': 0.3}",
    "coupled-one-one-hot-{'near': True}",
    "coupled-chain-mixed-{}",
    "coupled-star-without replacement-{'zeros': 0.5}",
    "coupled-tree-sampled-{'zeros': 0.5}",
    "block-empty-without replacement-{'near': True}",
    "block-one-mixed-{'invalid': 0.3}",
    "block-chain-one-hot-{'zeros': 0.5}",
    "traversal-empty-mixed-{'zeros': 0.5}",
    "traversal-one-without replacement-{}",
    "traversal-chain-sampled-{'near': True}",
    "traversal-star-one-hot-{'invalid': 0.3}",
    "traversal-tree-mixed-{'near': True}",
)
@pytest.mark.parametrize("options", [{}, {"zeros": 0.5}, {"invalid": 0.3}, {"near": True}], ids=str)
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("name", "shape"), RULES_AND_SHAPES)
def test_verdict_equals_torch_rule(name, shape, kinds, options):
    generator = torch.Generator().manual_seed(1)
    for vocab in (5, 100):
        draft, p = make_case(SHAPES[shape], KINDS[kinds], vocab=vocab, generator=generator, **options)
        seed = torch.randint(2**62, (BATCH_SIZE,), generator=generator)
        noise = PositionNoise(seed, torch.randint(9999, (BATCH_SIZE,), generator=generator))
        verdict = fastest_verifier(EXACT[name], CPU).rule(draft, p, noise)
        expected = EXACT[name].rule(draft, p, noise)
        assert verdict.path.tolist() == expected.path.tolist()
        assert verdict.accepted.tolist() == expected.accepted.tolist()
        assert verdict.bonus.tolist() == expected.bonus.tolist()
        torch.testing.assert_close(verdict.logprob, expected.logprob)
    assert fastest_verifier(EXACT[name], CPU).rule is not EXACT[name].rule


def test_unsupported_rules_and_devices_keep_the_torch_rule():
    assert fastest_verifier(EXACT["siblings"], CPU) is EXACT["siblings"]
    assert fastest_verifier(EXACT["walk"], torch.device("meta")) is EXACT["walk"]
