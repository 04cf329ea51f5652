"""Native verification gives the verdicts of the torch rules, for every sequence."""

import pytest
import torch

from outrider.core.noise import PositionNoise
from outrider.errors import UnsupportedModel
from outrider.models.native.library import load_library
from outrider.models.native.rules import fastest_verifier
from outrider.verify.rules import EXACT
from tests.helpers.verification import KINDS, SHAPES, make_case

try:
    load_library()
except UnsupportedModel as reason:
    pytest.skip(str(reason), allow_module_level=True)

BATCH_SIZE = 64
CPU = torch.device("cpu")
RULES_AND_SHAPES = [
    *((name, shape) for name in ("walk", "coupled", "traversal") for shape in SHAPES),
    *(("block", shape) for shape in ("empty", "one", "chain")),
]


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
        draft, p = make_case(
            SHAPES[shape], KINDS[kinds], batch_size=BATCH_SIZE, vocab=vocab, generator=generator, **options
        )
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
