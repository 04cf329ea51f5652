"""The Triton kernels of the verification rules are exact, equal the torch rules, and take few launches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.core.noise import PositionNoise
from outrider.core.types import Packed
from outrider.models.native.rules import fastest_verifier as native_verifier
from outrider.testing.enumeration import prove
from outrider.verify.rules import EXACT
from tests.helpers import triton as helper
from tests.helpers.verification import KINDS, SHAPES, make_case
from tests.verify.test_verify import H, S, W, assert_exact, chain, make_instance

from outrider.models.triton import barrier, masses, residuals, rules  # isort: skip  # after the check for Triton
from outrider.models.triton.fastest import fastest_sampling, fastest_verifier  # isort: skip
from tests.helpers.replayed_kernels import MODULES, ReplayedRule  # isort: skip

KERNELS = {
    masses: ("sum_masses", "follow_samples", "decide_chain"),
    residuals: ("descend", "traverse", "sample_rows"),
}
LAUNCHES = {"walk": 2, "coupled": 2, "rejection": 2, "block": 2, "siblings": 1, "traversal": 1}


@pytest.fixture
def interpreted():
    with helper.interpreted(*MODULES, barrier), np.errstate(all="ignore"):  # as on a GPU
        yield


# Exactness, by enumeration.

CHAINS = {"sampled": (2, chain(2), (S, S)), "one": (3, chain(1), (W,))}
TREES = {"without replacement": (3, (-1, -1), (W, W)), "tree": (2, (-1, -1, 0), (S, H, W))}


@pytest.mark.fast_cases(
    "walk-one",
    "coupled-sampled",
    "rejection-one",
    "block-sampled",
    "siblings-without replacement",
    "traversal-without replacement",
)
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in EXACT for shape in (*CHAINS, *TREES) if EXACT[name].trees or shape in CHAINS],
)
def test_kernels_are_exact(name, shape, interpreted, monkeypatch):
    instance = make_instance(*(CHAINS | TREES)[shape], zeros=0.2)
    assert_exact(prove(ReplayedRule(name, monkeypatch), instance))


@pytest.mark.fast_cases("rejection", "traversal")
@pytest.mark.parametrize("name", ["rejection", "block", "siblings", "traversal"])
def test_the_enumeration_detects_a_biased_kernel(name, interpreted, monkeypatch):
    for module in (masses, residuals):
        monkeypatch.setattr(module, "residual_mass", lambda share, mass, draft: mass)
    assert prove(ReplayedRule(name, monkeypatch), make_instance(2, chain(1), (S,))).error > 1e-3


# Equality with the torch rules for the same noise. A decision could differ only if its probability and its random
# number were equal up to rounding.


def random_noise(batch_size, generator):
    seed = torch.randint(2**62, (batch_size,), generator=generator)
    return PositionNoise(seed, torch.randint(9999, (batch_size,), generator=generator))


def assert_equals_torch(name, draft, p, noise):
    verdict = rules.on_device(EXACT[name]).verify(draft, p, noise)
    expected = EXACT[name].verify(draft, p, noise)
    assert verdict.path.tolist() == expected.path.tolist()
    assert verdict.accepted.tolist() == expected.accepted.tolist()
    assert verdict.bonus.tolist() == expected.bonus.tolist()
    torch.testing.assert_close(verdict.logprob, expected.logprob)


CASES = [  # the first of each rule is fast
    ("walk", "tree", "one-hot", {"zeros": 0.5}),
    ("walk", "chain", "sampled", {"near": True}),
    ("coupled", "star", "mixed", {"near": True}),
    ("coupled", "chain", "sampled", {"zeros": 0.5}),
    ("rejection", "chain", "mixed", {"near": True}),
    ("rejection", "chain", "sampled", {"invalid": 0.2}),
    ("block", "chain", "mixed", {"near": True}),
    ("block", "chain", "sampled", {"invalid": 0.2}),
    ("siblings", "tree", "without replacement", {"zeros": 0.5}),
    ("siblings", "star", "mixed", {"near": True}),
    ("traversal", "tree", "without replacement", {"near": True}),
    ("traversal", "star", "mixed", {"invalid": 0.3}),
]


@pytest.mark.fast_cases(*(case[0] for case in CASES[::2]))
@pytest.mark.parametrize(
    ("name", "shape", "kinds", "options"),
    CASES,
    ids=[name if not i % 2 else f"{name} 2" for i, (name, *_) in enumerate(CASES)],
)
def test_verdict_equals_torch_rule(name, shape, kinds, options, interpreted, monkeypatch):
    """The vocabulary takes two blocks, the second of them in part."""
    monkeypatch.setattr(rules, "IDS_AT_ONCE", 32)
    generator = torch.Generator().manual_seed(2)
    draft, p = make_case(SHAPES[shape], KINDS[kinds], batch_size=4, vocab=41, generator=generator, **options)
    assert_equals_torch(name, draft, Packed.of(p), random_noise(4, generator))


@pytest.mark.parametrize("name", EXACT)
def test_empty_drafts_packed_rows_and_one_hot_targets(name, interpreted):
    """One sequence has no draft, one a greedy target. Rows of p and q stand in any order, with a gap."""
    generator = torch.Generator().manual_seed(3)
    draft, p = make_case((-1, 0), KINDS["sampled"], batch_size=3, vocab=9, generator=generator)
    p[1] = torch.nn.functional.one_hot(p[1].argmax(-1), 9).float()
    order = torch.randperm(9, generator=generator)
    packed = Packed(values=p.flatten(0, 1)[order], at=order.argsort().view(3, 3))
    q_order = torch.randperm(6, generator=generator)
    at = q_order.argsort().view(3, 2)
    at[0] = -1
    q = Packed(values=draft.q.values[q_order], at=at)
    draft = replace(draft, q=q, count=torch.tensor([0, 2, 2]), width=(0, 2, 2))
    assert_equals_torch(name, draft, packed, random_noise(3, generator))
    alone, p = make_case((), KINDS["one-hot"], batch_size=2, vocab=9, generator=generator)
    assert_equals_torch(name, alone, Packed.of(p), random_noise(2, generator))


# Cost.


class _Operations(TorchDispatchMode):
    """Counts operations of torch."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class _Launches:
    """A kernel that only counts its launches."""

    def __init__(self, kernel, launched):
        self.arg_names = kernel.arg_names
        self._launched = launched

    def __getitem__(self, grid):
        return lambda **arguments: self._launched.append(grid)


@pytest.mark.parametrize("name", EXACT)
def test_verification_takes_few_operations(name, monkeypatch):
    """On torch, `traversal` takes 4,782 operations for 16 nodes."""
    launched: list[tuple[int, ...]] = []
    for module, names in KERNELS.items():
        for kernel in names:
            monkeypatch.setattr(module, kernel, _Launches(getattr(module, kernel), launched))
    parent = (-1, -1, -1, -1, *(node // 4 for node in range(12))) if EXACT[name].trees else chain(16)
    generator = torch.Generator().manual_seed(0)
    draft, p = make_case(parent, KINDS["sampled"], batch_size=2, vocab=100, generator=generator)
    packed = Packed.of(p)
    noise = random_noise(2, generator)
    with _Operations() as operations:
        rules.on_device(EXACT[name]).verify(draft, packed, noise)
    assert len(launched) == LAUNCHES[name]
    assert operations.count + len(launched) <= 12


# Builds for GPUs.

LONGS = ("tokens", "parent", "kind", "count", "p_at", "q_at", "seed", "first", "out_path", "out_accepted", "out_bonus")
TYPES = dict.fromkeys(LONGS, "*i64") | dict.fromkeys(("p", "q", "residuals", "out_logprob"), "*fp32")
TYPES |= {
    "sums": "*fp64",
    "winners": "*i32",
    "arrived": "*i32",
    "uniform": "*fp64",
    "size": "i32",
    "vocab": "i32",
    "levels": "i32",
}
SIZES = {"HAS_Q": True, "NODES": 32, "BLOCK": 4096, "BLOCKS": 32}
BUILDS = [
    ("sum_masses", {"RULE": masses.COUPLED.value}, 80),
    ("sample_rows", {"SPLIT": 8, "STEPS": 4}, 90),
    ("sum_masses", {"RULE": masses.BLOCK_RULE.value}, 90),
    ("follow_samples", {"RULE": masses.WALK.value}, 100),
    ("decide_chain", {"RULE": masses.BLOCK_RULE.value}, 80),
    ("descend", {"SPLIT": 1, "STEPS": 32}, 90),
    ("descend", {"SPLIT": 8, "STEPS": 4}, 80),
    ("traverse", {"SPLIT": 1, "STEPS": 32}, 100),
    ("traverse", {"SPLIT": 8, "STEPS": 4}, 90),
]


@pytest.mark.fast_cases("sum_masses-80", "traverse-90", "decide_chain-80")
@pytest.mark.parametrize(
    ("name", "constants", "capability"), BUILDS, ids=[f"{name}-{capability}" for name, _, capability in BUILDS]
)
def test_kernels_build_without_spills(name, constants, capability, tmp_path):
    kernel = next(getattr(module, name) for module, names in KERNELS.items() if name in names)
    types = {key: TYPES[key] for key in kernel.arg_names if key in TYPES}
    values = {key: value for key, value in (SIZES | constants).items() if key in kernel.arg_names}
    built = helper.build(kernel, types, values, capability=capability, cache=tmp_path, num_warps=8)
    assert built.stack == 0
    assert built.shared <= 4096


# Selection.


def test_gpus_from_ampere_on_use_triton(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert all(fastest_verifier(verifier, device).packed is not verifier.packed for verifier in EXACT.values())
    assert fastest_sampling(device).probs.__module__ == "outrider.models.triton.sampling"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert all(fastest_verifier(verifier, device) is verifier for verifier in EXACT.values())


def test_cpus_use_the_native_kernels():
    cpu = torch.device("cpu")
    assert all(
        fastest_verifier(verifier, cpu).packed is None or native_verifier(verifier, cpu).packed is not None
        for verifier in EXACT.values()
    )
