"""Tests of noise: uniform, independent, equal in every batch, and not reused after a rejection."""

import pytest
import torch

from outrider.core import tree
from outrider.core.noise import NoiseStream, PositionNoise, derive_seed, inverse_cdf, mix, to_uniform
from outrider.core.types import DraftKind, Packed
from outrider.testing.enumeration import race_joint
from outrider.verify.rules import block

NUM_SEQS = 40_000


def noise(first=0, rows=NUM_SEQS, kind=PositionNoise, seed=0):
    return kind(torch.arange(rows) + seed, torch.full((rows,), first))


def draft_token(source, probs, index):
    """Return draft token number `index` [B] of a proposer."""
    return inverse_cdf(probs, source.uniforms(int(index.max()) + 1).gather(1, index[:, None])[:, 0])


def zeros(rows=NUM_SEQS):
    return torch.zeros(rows, dtype=torch.int64)


def probs(*mass, rows=NUM_SEQS):
    return torch.tensor(mass, dtype=torch.float64).expand(rows, -1)


def chi_square(outcome, expected):
    """Return chi-square per degree of freedom. It is about 1 if `outcome` is sampled from `expected`."""
    expected = expected.flatten() * len(outcome)
    assert (outcome.bincount(minlength=len(expected))[expected == 0] == 0).all()
    counts, expected = outcome.bincount(minlength=len(expected))[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum() / (len(expected) - 1))


def test_mix_equals_the_finalizer_of_splitmix64():
    def reference(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return x ^ (x >> 31)

    for value in (0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321):
        assert int(mix(torch.tensor(value))) % 2**64 == reference(value % 2**64)


def test_uniform_is_below_one():
    ends = to_uniform(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert ends.min() == 0
    assert ends.max() < 1


@pytest.mark.parametrize("first", [0, 1, 4096])
def test_samples_have_their_distribution(first):
    mass = (0.4, 0.0, 0.3, 0.2, 0.1)
    expected, source = torch.tensor(mass), noise(first)
    assert chi_square(source.sample(probs(*mass), zeros()), expected) < 3
    assert chi_square(source.sample_race(probs(*mass), zeros()), expected) < 3
    assert chi_square(draft_token(source, probs(*mass), zeros()), expected) < 3
    for prob in (0.0, 0.01, 0.5, 1.0):
        outcomes = source.bernoulli(torch.full((NUM_SEQS,), prob), zeros())
        assert abs(float(outcomes.double().mean()) - prob) < 4 * (prob * (1 - prob) / NUM_SEQS) ** 0.5 + 1e-12


def test_samples_of_one_seed_at_all_positions_have_their_distribution():
    source = PositionNoise(torch.full((1,), 7), zeros(1))
    mass = torch.tensor([0.5, 0.3, 0.2])
    for sample in (source.sample, source.sample_race):
        tokens = sample(mass.expand(1, NUM_SEQS, -1), torch.arange(NUM_SEQS)[None])[0]
        assert chi_square(tokens, mass) < 3


def test_noise_is_independent():
    """Test adjacent seeds, adjacent positions, different streams, and acceptance decisions of a round."""
    even = probs(*[1 / 8] * 8)
    source, again, later = noise(5), noise(5, seed=1), noise(6)
    ones = zeros() + 1
    pairs = [
        (source.sample(even, zeros()), again.sample(even, zeros())),
        (source.sample(even, zeros()), source.sample(even, ones)),
        (source.sample(even, zeros()), source.sample_race(even, zeros())),
        (source.sample(even, zeros()), draft_token(source, even, zeros())),
        (source.sample_race(even, zeros()), source.sample_race(even, ones)),
        (draft_token(source, even, zeros()), draft_token(source, even, ones)),
        (draft_token(source, even, zeros()), draft_token(later, even, zeros())),
        (draft_token(source, even, zeros()), source.bernoulli(even[:, 0] * 4, zeros()).long() * 4),
        (source.bernoulli(even[:, 0] * 4, zeros()).long() * 4, source.bernoulli(even[:, 0] * 4, ones).long() * 4),
    ]
    for left, right in pairs:
        expected = torch.outer(left.bincount(minlength=8), right.bincount(minlength=8)) / NUM_SEQS**2
        assert chi_square(left * 8 + right, expected) < 1.7


def test_noise_of_a_sequence_is_equal_in_every_batch():
    seeds, first = torch.tensor([3, 2**63 - 1, 3, 0]), torch.tensor([10, 0, 11, 2**31])
    generator = torch.Generator().manual_seed(0)
    p, ahead = torch.rand(4, 3, 50, generator=generator), torch.tensor([[0, 1, 2]]).expand(4, 3)
    together = PositionNoise(seeds, first)
    for b in range(4):
        alone = PositionNoise(seeds[b : b + 1], first[b : b + 1])
        for name in ("sample", "sample_race"):
            whole = getattr(together, name)(p, ahead)[b]
            assert torch.equal(getattr(alone, name)(p[b : b + 1], ahead[b : b + 1])[0], whole)
            one = getattr(alone, name)(p[b : b + 1, 2], ahead[b : b + 1, 2])
            assert one[0] == whole[2]
        index = torch.full((4,), 2)
        assert draft_token(alone, p[b : b + 1, 0], index[:1])[0] == draft_token(together, p[:, 0], index)[b]
        assert alone.bernoulli(p[b : b + 1, 0, 0], index[:1])[0] == together.bernoulli(p[:, 0, 0], index)[b]


def test_target_and_race_noise_depend_on_the_position():
    even = probs(*[1 / 50] * 50)
    early, late = noise(8), noise(10)
    for name in ("sample", "sample_race"):
        assert torch.equal(getattr(early, name)(even, zeros() + 2), getattr(late, name)(even, zeros()))


def test_accept_and_draft_noise_depend_on_the_round():
    """The noise of the third position of a round differs from that of the round that starts at this position."""
    even = probs(*[1 / 50] * 50)
    early, late = noise(8), noise(10)
    assert (draft_token(early, even, zeros() + 2) == draft_token(late, even, zeros())).double().mean() < 0.03
    half = torch.full((NUM_SEQS,), 0.5)
    assert (
        abs(float((early.bernoulli(half, zeros() + 2) == late.bernoulli(half, zeros())).double().mean()) - 0.5) < 0.01
    )


class KeyedByPosition(PositionNoise):
    """Wrong noise: the next round reuses the noise of a rejected draft token and of its rejection."""

    def uniforms(self, count):
        return self._uniform(NoiseStream.DRAFT, torch.arange(count).expand(len(self.first), count))

    def _per_round(self, stream, index):
        return self._uniform(stream, index)


def test_uniforms_on_the_cpu_equal_those_of_other_devices():
    source, count = noise(5), 6
    index = torch.arange(count).expand(NUM_SEQS, count)
    assert torch.equal(source.uniforms(count), source._per_round(NoiseStream.DRAFT, index))
    assert source.uniforms(0).shape == (NUM_SEQS, 0)


def several_rounds(kind, p, q, length):
    """Return `length` tokens that `block` emits in rounds of two draft tokens, as numbers [NUM_SEQS] in base V."""
    out = torch.zeros(NUM_SEQS, length + 3, dtype=torch.int64)
    rows = torch.arange(NUM_SEQS)
    done = zeros()
    while (done < length).any():
        source = kind(rows, done)
        tokens = torch.stack([draft_token(source, q.expand(NUM_SEQS, -1), zeros() + i) for i in range(2)], 1)
        draft = tree.chain(
            tokens,
            (2,) * NUM_SEQS,
            kind=torch.full_like(tokens, DraftKind.SAMPLED),
            q=Packed.of(q.expand(NUM_SEQS, 2, -1)),
        )
        verdict = block(draft, p.expand(NUM_SEQS, 3, -1), source)
        emitted = torch.cat([tokens, tokens[:, :1]], 1).scatter(1, verdict.accepted[:, None], verdict.bonus[:, None])
        for i in range(3):
            write = (done < length) & (i <= verdict.accepted)
            out[rows[write], (done + i)[write]] = emitted[write, i]
        done = torch.where(done < length, done + verdict.accepted + 1, done)
    return (out[:, :length] * len(p) ** torch.arange(length)).sum(1)


def test_rounds_are_exact_only_if_noise_is_not_reused():
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.2, 0.05, 0.75])
    expected = torch.einsum("a,b,c,d->dcba", p, p, p, p)
    assert chi_square(several_rounds(PositionNoise, p, q, 4), expected) < 1.5
    assert chi_square(several_rounds(KeyedByPosition, p, q, 4), expected) > 5


def test_race_has_the_joint_distribution_of_race_joint():
    p, q = torch.tensor([0.5, 0.2, 0.3, 0.0]), torch.tensor([0.1, 0.5, 0.0, 0.4])
    source = noise()
    x, y = source.sample_race(q.expand(NUM_SEQS, -1), zeros()), source.sample_race(p.expand(NUM_SEQS, -1), zeros())
    joint = race_joint(p.double(), q.double())
    assert torch.allclose(joint.sum(0), p.double())
    assert chi_square(x * 4 + y, joint) < 2


def test_inverse_cdf_never_returns_a_token_of_probability_zero():
    ends = torch.tensor([0.0, 2.0**-48, 0.5, 1 - 2.0**-48], dtype=torch.float64)
    for mass in ([0, 1, 0], [0, 0, 1e-30], [1, 0, 0], [0, 1e-30, 0, 1, 0], [0, 3, 0, 4, 0]):
        p = torch.tensor(mass, dtype=torch.float32)
        assert (p[inverse_cdf(p.expand(4, -1), ends)] > 0).all()
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(200, 500, generator=generator) ** 20 * (torch.rand(200, 500, generator=generator) < 0.1)
    p[:, 250] += 1e-20
    for uniform in (*ends, *torch.rand(50, generator=generator, dtype=torch.float64)):
        assert (p.gather(1, inverse_cdf(p, uniform.expand(200))[:, None]) > 0).all()


def test_inverse_cdf_of_unnormalized_probabilities():
    p = torch.tensor([[[2.0, 6.0], [8.0, 0.0]]])
    for uniform, expected in ((0.249, 0), (0.25, 1)):
        assert inverse_cdf(p, torch.tensor([[uniform, 0.999]], dtype=torch.float64)).tolist() == [[expected, 0]]


def test_completions_of_a_request_have_different_seeds():
    for seed in (0, 5, 2**63 - 1):
        seeds = [derive_seed(seed, index) for index in range(100)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 100
        assert all(0 <= derived < 2**63 for derived in seeds)
