"""Verification in one call says what the reference says, row by row and bit by bit."""

from __future__ import annotations

import pytest
import torch

from outrider.core.noise import PositionNoise
from outrider.core.types import Draft, DraftKind, Packed
from outrider.errors import UnsupportedModel
from outrider.native.library import load_library
from outrider.native.rules import fastest_verifier
from outrider.verify.rules import EXACT

try:
    load_library()
except UnsupportedModel as reason:
    pytest.skip(str(reason), allow_module_level=True)

ROWS, CPU = 64, torch.device("cpu")
SHAPES = {
    "nothing": (),
    "one": (-1,),
    "chain": (-1, 0, 1, 2),
    "bush": (-1, -1, -1),
    "tree": (-1, -1, 0, 0, 1, 2, -1),
}
LAWS = {
    "chosen": (DraftKind.ONE_HOT,),
    "sampled": (DraftKind.SAMPLED,),
    "without replacement": (DraftKind.WITHOUT_REPLACEMENT,),
    "mixed": (DraftKind.SAMPLED, DraftKind.WITHOUT_REPLACEMENT, DraftKind.ONE_HOT),
}


def normalised(mass):
    return mass / mass.sum(-1, keepdim=True)


def case(parent, laws, *, vocab, source, zeros=0.0, foreign=0.0, near=False):
    """Drafts drawn from q as their laws say, and p; float32."""
    size = len(parent)
    kinds = [laws[node % len(laws)] for node in range(size)]
    p = torch.rand(ROWS, 1 + size, vocab, generator=source).pow(4) + 1e-9
    p = p * (torch.rand(p.shape, generator=source) >= zeros) + 1e-30
    p = normalised(p)
    tokens = torch.zeros(ROWS, size, dtype=torch.int64)
    q = torch.zeros(ROWS, size, vocab)
    by_parent: dict[int, torch.Tensor] = {}
    for node, above in enumerate(parent):
        law = by_parent.setdefault(above, normalised(torch.rand(ROWS, vocab, generator=source).pow(4) + 1e-9))
        if near:
            law = by_parent[above] = normalised(p[:, above + 1] + 0.1 * law)
        left = law.clone()
        for other in range(node):
            if parent[other] == above and kinds[other] == kinds[node] == DraftKind.WITHOUT_REPLACEMENT:
                left.scatter_(1, tokens[:, other, None], 0.0)
        if kinds[node] == DraftKind.ONE_HOT:
            tokens[:, node] = torch.randint(vocab, (ROWS,), generator=source)
        else:
            tokens[:, node] = torch.multinomial(left + 1e-30, 1, generator=source)[:, 0]
            q[:, node] = law
    gone = torch.rand(tokens.shape, generator=source) < foreign
    tokens = torch.where(gone, vocab + 3, tokens)
    count = torch.randint(size + 1, (ROWS,), generator=source) if foreign else torch.full((ROWS,), size)
    draft = Draft(
        tokens=tokens,
        parent=torch.tensor(parent, dtype=torch.int64).expand(ROWS, size),
        count=count,
        kind=torch.tensor([int(kind) for kind in kinds], dtype=torch.int64).expand(ROWS, size),
        q=Packed.of(q) if any(kinds) else None,
        width=(size,) * ROWS,
        depth=(size,) * ROWS,
        chain=list(parent) == list(range(-1, size - 1)),
    )
    return draft, p


@pytest.mark.parametrize("flaw", [{}, {"zeros": 0.5}, {"foreign": 0.3}, {"near": True}], ids=str)
@pytest.mark.parametrize("laws", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["walk", "coupled", "block", "traversal"])
def test_equals_the_reference(name, shape, laws, flaw):
    if not (EXACT[name].trees or shape in ("nothing", "one", "chain")):
        return
    source = torch.Generator().manual_seed(1)
    for vocab in (5, 100):
        draft, p = case(SHAPES[shape], LAWS[laws], vocab=vocab, source=source, **flaw)
        seed = torch.randint(2**62, (ROWS,), generator=source)
        noise = PositionNoise(seed, torch.randint(9999, (ROWS,), generator=source))
        ours = fastest_verifier(EXACT[name], CPU).rule(draft, p, noise)
        theirs = EXACT[name].rule(draft, p, noise)
        assert ours.path.tolist() == theirs.path.tolist()
        assert ours.accepted.tolist() == theirs.accepted.tolist()
        assert ours.bonus.tolist() == theirs.bonus.tolist()
        torch.testing.assert_close(ours.logprob, theirs.logprob)
    assert fastest_verifier(EXACT[name], CPU).rule is not EXACT[name].rule


def test_other_rules_stay_what_they_are():
    assert fastest_verifier(EXACT["siblings"], CPU) is EXACT["siblings"]
    assert fastest_verifier(EXACT["walk"], torch.device("meta")) is EXACT["walk"]
