"""Noise: uniform, independent, the same in every batch, and safe from one round to the next."""

import pytest
import torch

from outrider.core import tree
from outrider.core.noise import NoiseStream, PositionNoise, derive_seed, inverse_cdf, mix, to_uniform
from outrider.core.types import DraftKind, Packed
from outrider.testing.enumeration import race_joint
from outrider.verify.rules import block

MANY = 40_000


def noise(first=0, rows=MANY, kind=PositionNoise, seed=0):
    return kind(torch.arange(rows) + seed, torch.full((rows,), first))


def guess(source, law, index):
    """A proposer's guess number `index` [B]."""
    return inverse_cdf(law, source.uniforms(int(index.max()) + 1).gather(1, index[:, None])[:, 0])


def zeros(rows=MANY):
    return torch.zeros(rows, dtype=torch.int64)


def law(*mass, rows=MANY):
    return torch.tensor(mass, dtype=torch.float64).expand(rows, -1)


def chi_square(outcome, expected):
    """Per degree of freedom: about 1 when `outcome` is drawn from `expected`."""
    expected = expected.flatten() * len(outcome)
    assert (outcome.bincount(minlength=len(expected))[expected == 0] == 0).all()
    counts, expected = outcome.bincount(minlength=len(expected))[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum() / (len(expected) - 1))


def bins(uniform, count):
    return (uniform * count).long()


def test_mix_is_the_finaliser_of_splitmix64():
    def reference(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return x ^ (x >> 31)

    for value in (0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321):
        assert int(mix(torch.tensor(value))) % 2**64 == reference(value % 2**64)


def test_uniform_stays_below_one():
    ends = to_uniform(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert ends.min() == 0
    assert ends.max() < 1


@pytest.mark.parametrize("first", [0, 1, 4096])
def test_draws_follow_their_law(first):
    mass = (0.4, 0.0, 0.3, 0.2, 0.1)
    expected, source = torch.tensor(mass), noise(first)
    assert chi_square(source.sample(law(*mass), zeros()), expected) < 3
    assert chi_square(source.sample_race(law(*mass), zeros()), expected) < 3
    assert chi_square(guess(source, law(*mass), zeros()), expected) < 3
    for chance in (0.0, 0.01, 0.5, 1.0):
        flips = source.bernoulli(torch.full((MANY,), chance), zeros())
        assert abs(float(flips.double().mean()) - chance) < 4 * (chance * (1 - chance) / MANY) ** 0.5 + 1e-12


def test_draws_of_one_seed_along_a_text_follow_their_law():
    row = PositionNoise(torch.full((1,), 7), zeros(1))
    mass = torch.tensor([0.5, 0.3, 0.2])
    for draw in (row.sample, row.sample_race):
        assert chi_square(draw(mass.expand(1, MANY, -1), torch.arange(MANY)[None])[0], mass) < 3


def test_sources_are_independent():
    """Seeds that are neighbours, positions that are neighbours, streams, and coins of a round."""
    even = law(*[1 / 8] * 8)
    source, again, later = noise(5), noise(5, seed=1), noise(6)
    ones = zeros() + 1
    pairs = [
        (source.sample(even, zeros()), again.sample(even, zeros())),
        (source.sample(even, zeros()), source.sample(even, ones)),
        (source.sample(even, zeros()), source.sample_race(even, zeros())),
        (source.sample(even, zeros()), guess(source, even, zeros())),
        (source.sample_race(even, zeros()), source.sample_race(even, ones)),
        (guess(source, even, zeros()), guess(source, even, ones)),
        (guess(source, even, zeros()), guess(later, even, zeros())),
        (guess(source, even, zeros()), source.bernoulli(even[:, 0] * 4, zeros()).long() * 4),
        (source.bernoulli(even[:, 0] * 4, zeros()).long() * 4, source.bernoulli(even[:, 0] * 4, ones).long() * 4),
    ]
    for left, right in pairs:
        expected = torch.outer(left.bincount(minlength=8), right.bincount(minlength=8)) / MANY**2
        assert chi_square(left * 8 + right, expected) < 1.7


def test_a_row_draws_the_same_in_every_batch():
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
        assert guess(alone, p[b : b + 1, 0], index[:1])[0] == guess(together, p[:, 0], index)[b]
        assert alone.bernoulli(p[b : b + 1, 0, 0], index[:1])[0] == together.bernoulli(p[:, 0, 0], index)[b]


def test_token_and_race_belong_to_the_position():
    even = law(*[1 / 50] * 50)
    early, late = noise(8), noise(10)
    for name in ("sample", "sample_race"):
        assert torch.equal(getattr(early, name)(even, zeros() + 2), getattr(late, name)(even, zeros()))


def test_coins_and_guesses_belong_to_the_round():
    """What a round asks of the position that comes 2 places later, the round that starts there asks anew."""
    even = law(*[1 / 50] * 50)
    early, late = noise(8), noise(10)
    assert (guess(early, even, zeros() + 2) == guess(late, even, zeros())).double().mean() < 0.03
    half = torch.full((MANY,), 0.5)
    assert (
        abs(float((early.bernoulli(half, zeros() + 2) == late.bernoulli(half, zeros())).double().mean()) - 0.5) < 0.01
    )


class KeyedByPosition(PositionNoise):
    """The mistake: a rejected guess and the coin that rejected it come back in the next round."""

    def uniforms(self, count):
        return self._uniform(NoiseStream.DRAFT, torch.arange(count).expand(len(self.first), count))

    def _per_round(self, stream, index):
        return self._uniform(stream, index)


def test_draws_are_those_of_any_device():
    source, count = noise(5), 6
    index = torch.arange(count).expand(MANY, count)
    assert torch.equal(source.uniforms(count), source._per_round(NoiseStream.DRAFT, index))


def several_rounds(kind, p, q, length):
    """[MANY] sequences of `length` tokens that `block` emits in rounds of two guesses, as numbers in base V."""
    out, rows = torch.zeros(MANY, length + 3, dtype=torch.int64), torch.arange(MANY)
    done = zeros()
    while (done < length).any():
        source = kind(rows, done)
        tokens = torch.stack([guess(source, q.expand(MANY, -1), zeros() + i) for i in range(2)], 1)
        draft = tree.chain(
            tokens, (2,) * MANY, kind=torch.full_like(tokens, DraftKind.SAMPLED), q=Packed.of(q.expand(MANY, 2, -1))
        )
        verdict = block(draft, p.expand(MANY, 3, -1), source)
        emitted = torch.cat([tokens, tokens[:, :1]], 1).scatter(1, verdict.accepted[:, None], verdict.bonus[:, None])
        for i in range(3):
            write = (done < length) & (i <= verdict.accepted)
            out[rows[write], (done + i)[write]] = emitted[write, i]
        done = torch.where(done < length, done + verdict.accepted + 1, done)
    return (out[:, :length] * len(p) ** torch.arange(length)).sum(1)


def test_rounds_add_up_to_the_law_only_with_fresh_coins():
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.2, 0.05, 0.75])
    expected = torch.einsum("a,b,c,d->dcba", p, p, p, p)
    assert chi_square(several_rounds(PositionNoise, p, q, 4), expected) < 1.5
    assert chi_square(several_rounds(KeyedByPosition, p, q, 4), expected) > 5


def test_a_race_has_the_joint_law_that_the_proofs_assume():
    p, q = torch.tensor([0.5, 0.2, 0.3, 0.0]), torch.tensor([0.1, 0.5, 0.0, 0.4])
    source = noise()
    x, y = source.sample_race(q.expand(MANY, -1), zeros()), source.sample_race(p.expand(MANY, -1), zeros())
    joint = race_joint(p.double(), q.double())
    assert torch.allclose(joint.sum(0), p.double())
    assert chi_square(x * 4 + y, joint) < 2


def test_inverse_cdf_never_returns_what_has_no_probability():
    ends = torch.tensor([0.0, 2.0**-48, 0.5, 1 - 2.0**-48], dtype=torch.float64)
    for mass in ([0, 1, 0], [0, 0, 1e-30], [1, 0, 0], [0, 1e-30, 0, 1, 0], [0, 3, 0, 4, 0]):
        p = torch.tensor(mass, dtype=torch.float32)
        assert (p[inverse_cdf(p.expand(4, -1), ends)] > 0).all()
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(200, 500, generator=generator) ** 20 * (torch.rand(200, 500, generator=generator) < 0.1)
    p[:, 250] += 1e-20
    for uniform in (*ends, *torch.rand(50, generator=generator, dtype=torch.float64)):
        assert (p.gather(1, inverse_cdf(p, uniform.expand(200))[:, None]) > 0).all()


def test_inverse_cdf_takes_a_law_of_any_size_and_shape():
    p = torch.tensor([[[2.0, 6.0], [8.0, 0.0]]])
    for uniform, expected in ((0.249, 0), (0.25, 1)):
        assert inverse_cdf(p, torch.tensor([[uniform, 0.999]], dtype=torch.float64)).tolist() == [[expected, 0]]


def test_completions_of_a_request_get_seeds_of_their_own():
    for seed in (0, 5, 2**63 - 1):
        seeds = [derive_seed(seed, index) for index in range(100)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 100
        assert all(0 <= each < 2**63 for each in seeds)
