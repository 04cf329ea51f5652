"""Every verifier against the law it promises, by enumeration."""

from dataclasses import replace

import pytest
import torch

from outrider.core.types import DraftKind, Verdict
from outrider.errors import OutriderError
from outrider.testing.enumeration import Instance, Proof, prove, race_joint
from outrider.verify import lossy
from outrider.verify import rules as verify
from outrider.verify.verdict import prefix_of, tokens_before, verdict_of
from tests.helpers import biased_verifiers

H, S, W = DraftKind.ONE_HOT, DraftKind.SAMPLED, DraftKind.WITHOUT_REPLACEMENT
ROUNDING = 1e-12

VERIFIERS = tuple(verify.EXACT.values())
TREES = tuple(v for v in VERIFIERS if v.trees)
COINS = tuple(v for v in TREES if v.name not in ("walk", "coupled"))  # those that do not draw at every node at once
SPECIAL = {
    "plain": {},
    "zeros": {"zeros": 0.4},
    "same": {"same": True},
    "disjoint": {"disjoint": True},
    "same zeros": {"same": True, "zeros": 0.5},
    "ending": {"ending": 0.8},
    "foreign": {"foreign": 0.4},
    "everything": {"zeros": 0.3, "ending": 0.5, "foreign": 0.2, "apart": True},
}
SIZES = {"plain": (3, 4, 5), "zeros": (3, 5), "disjoint": (4,), "everything": (3, 4)}  # of the vocabulary; 3 elsewhere
SMALL_TREES = {
    "top-k": ((-1, -1, -1, 0), (H, H, H, H)),
    "sampled siblings": ((-1, -1, 0, 0), (S, S, S, S)),
    "without replacement": ((-1, -1, 0, 0), (W, W, W, W)),
    "more than there are": ((-1, -1, -1, -1), (W, W, W, W)),
    "top and sampled": ((-1, -1, 0, 0), (H, S, H, S)),
    "top and without replacement": ((-1, -1, -1, 1), (H, W, W, H)),
    "sampled and top": ((-1, -1, 1, 1), (S, H, S, H)),
    "all three": ((-1, -1, -1, 0), (S, W, H, W)),
    "sampled after without replacement": ((-1, -1, -1, -1), (W, S, W, S)),
    "depth first": ((-1, 0, -1, 2), (W, H, W, S)),
}
BIG_TREES = {
    "binary, sampled": ((-1, -1, 0, 0, 1, 1), (S,) * 6),
    "binary, without replacement": ((-1, -1, 0, 0, 1, 1), (W,) * 6),
    "binary, depth first": ((-1, 0, 0, -1, 3, 3), (W,) * 6),
    "binary, mixed": ((-1, -1, 0, 0, 1, 1), (H, S, W, W, S, H)),
    "deep": ((-1, 0, 1, -1, 3, 0), (W, S, H, W, W, H)),
}
BINARY = (-1, -1, 0, 0, 1, 1)


def line(depth):
    return tuple(range(-1, depth - 1))


def draw(vocab, parent, laws, seed=0, **special):
    return Instance.random(vocab, parent, laws, generator=torch.Generator().manual_seed(seed), **special)


def assert_exact(proof: Proof):
    assert proof.error < ROUNDING
    assert proof.logprob_error < ROUNDING


def by_name(verifier):
    return verifier.name


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_chains_are_exact(verifier, special):
    for vocab in SIZES.get(special, (3,)):
        for depth in range(4):
            for laws in {(H,) * depth, (S,) * depth, (W,) * depth, (H, S, H)[:depth], (S, H, S)[:depth]}:
                seed = vocab * 10 + depth
                assert_exact(prove(verifier.rule, draw(vocab, line(depth), laws, seed, **SPECIAL[special])))


@pytest.mark.parametrize("special", [*SPECIAL, "apart"])
@pytest.mark.parametrize("shape", SMALL_TREES)
@pytest.mark.parametrize("verifier", TREES, ids=by_name)
def test_trees_are_exact(verifier, shape, special):
    for vocab in SIZES.get(special, (3,))[: 2 if verifier in COINS else 1]:
        assert_exact(prove(verifier.rule, draw(vocab, *SMALL_TREES[shape], **SPECIAL.get(special, {"apart": True}))))


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("shape", BIG_TREES)
@pytest.mark.parametrize("verifier", COINS, ids=by_name)
def test_deep_trees_are_exact(verifier, shape, special):
    vocab = 4 if special == "disjoint" else 3
    assert_exact(prove(verifier.rule, draw(vocab, *BIG_TREES[shape], **SPECIAL[special])))


@pytest.mark.parametrize("verifier", TREES, ids=by_name)
def test_deep_deterministic_trees_are_exact(verifier):
    for special in ("plain", "zeros", "same", "ending", "foreign"):
        assert_exact(prove(verifier.rule, draw(3, BINARY, (H,) * 6, **SPECIAL[special])))


@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_the_same_law_everywhere_is_accepted_whole(verifier):
    if verifier.name != "walk":  # which samples the target anew
        assert prove(verifier.rule, draw(3, line(3), (S,) * 3, same=True)).accepted == pytest.approx(3)
    assert prove(verifier.rule, draw(4, line(3), (S,) * 3, disjoint=True)).accepted == 0


@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_keeping_the_unlikely_guess_and_stopping_after_it_is_exact(verifier):
    for seed in range(3):
        assert_exact(prove(biased_verifiers.stops_after_unlikely(verifier.rule), draw(4, line(3), (S,) * 3, seed)))


# What is known of how much each rule accepts.


@pytest.mark.parametrize("seed", range(20))
def test_block_accepts_at_least_as_much_as_rejection(seed):
    instance = draw(4, line(3), (S,) * 3, seed, zeros=0.2)
    token, block = (prove(rule, instance).accepted for rule in (verify.rejection, verify.block))
    assert token <= block + ROUNDING


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("laws", [(S, S, S), (H, S, W), (H, H, H)], ids=str)
def test_traversal_of_a_chain_is_block(laws, special):
    instance = draw(4, line(3), laws, **SPECIAL[special])
    traversal, block = (prove(rule, instance).accepted for rule in (verify.traversal, verify.block))
    assert traversal == pytest.approx(block, abs=ROUNDING)


@pytest.mark.parametrize("special", SPECIAL)
def test_coins_add_nothing_to_deterministic_trees(special):
    instance = draw(4 if special == "disjoint" else 3, BINARY, (H,) * 6, **SPECIAL[special])
    walk, siblings, traversal = (prove(r, instance).accepted for r in (verify.walk, verify.siblings, verify.traversal))
    assert siblings == pytest.approx(walk, abs=ROUNDING)
    assert traversal == pytest.approx(walk, abs=ROUNDING)


def test_all_rules_agree_when_the_target_is_greedy():
    instance = draw(4, line(3), (S,) * 3)
    greedy = tuple(torch.nn.functional.one_hot(law.argmax(-1), 4).double() for law in instance.target)
    accepted = {v.name: prove(v.rule, replace(instance, target=greedy)).accepted for v in VERIFIERS}
    assert list(accepted.values()) == pytest.approx([accepted["walk"]] * len(accepted), abs=ROUNDING)


def test_traversal_accepts_more_than_siblings_on_sampled_trees():
    for seed in range(5):
        instance = draw(3, BINARY, (W,) * 6, seed)
        assert prove(verify.traversal, instance).accepted > prove(verify.siblings, instance).accepted - ROUNDING


@pytest.mark.parametrize("seed", range(10))
def test_a_shared_race_accepts_what_it_promises(seed):
    instance = draw(5, (-1,), (S,), seed, zeros=0.3)
    distance = float((instance.target[0] - instance.proposal[0]).clamp(min=0).sum())
    accepted = prove(verify.coupled, instance).accepted
    assert (1 - distance) / (1 + distance) - ROUNDING <= accepted <= 1 - distance + ROUNDING
    assert prove(verify.rejection, instance).accepted == pytest.approx(1 - distance, abs=ROUNDING)


def test_the_joint_law_of_a_race_has_both_as_margins():
    for special in SPECIAL.values():
        instance = draw(4, (-1, 0), (S, S), **special)
        p, q = instance.target[1], instance.proposal[1]
        drawn = q.sum(-1) > 0
        joint = race_joint(p, q)[drawn]
        assert torch.allclose(joint.sum(-1), q[drawn], rtol=0, atol=ROUNDING)
        assert torch.allclose(joint.sum(-2), p[drawn], rtol=0, atol=ROUNDING)


# Optimised paths against plain ones.


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("rule", [verify.walk, verify.coupled], ids=lambda rule: rule.__name__)
def test_the_walk_along_a_chain_is_the_walk_down_a_tree(rule, special):
    def both(draft, p, noise):
        sample = (
            noise.sample(p, tokens_before(draft)) if rule is verify.walk else noise.sample_race(p, tokens_before(draft))
        )
        fast, plain = (rule(replace(draft, chain=chain), p, Replay(sample)) for chain in (True, False))
        for name in ("path", "accepted", "bonus", "logprob"):
            assert torch.equal(getattr(fast, name), getattr(plain, name))
        return fast

    assert_exact(prove(both, draw(4, line(3), (S, H, S), **SPECIAL[special])))


class Replay:
    def __init__(self, answer):
        self.answer = answer

    def sample(self, law, ahead):
        return self.answer

    sample_race = sample


@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_a_row_is_judged_alone(verifier):
    """Rows of different counts and laws in one batch do not touch each other."""
    instance = draw(3, line(2), (S, H), ending=0.7)
    seen = []

    def spy(draft, p, noise):
        seen.append((draft, p))
        return verifier.rule(draft, p, noise)

    prove(spy, instance)
    draft, p = seen[0]
    together = verifier.rule(draft, p, Fixed())
    for b in range(len(p)):
        row = replace(draft, **{k: getattr(draft, k)[b : b + 1] for k in ("tokens", "parent", "count", "kind")})
        row = replace(row, q=replace(draft.q, at=draft.q.at[b : b + 1]))
        alone = verifier.rule(row, p[b : b + 1], Fixed())
        for name in ("path", "accepted", "bonus", "logprob"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[b])


class Fixed:
    def sample(self, law, ahead):
        return law.argmax(-1)

    sample_race = sample

    def bernoulli(self, chance, index):
        return chance > 0.5


# A proof that cannot fail proves nothing.


def worst(rule, *shape, seeds=range(6), **special):
    return max(prove(rule, draw(*shape, seed, **special)).error for seed in seeds)


SAMPLERS = [verify.rejection, verify.block, verify.siblings, verify.traversal]


@pytest.mark.parametrize("rule", SAMPLERS, ids=lambda rule: rule.__name__)
def test_a_guess_may_not_be_dropped_for_its_own_probability(rule):
    assert worst(biased_verifiers.drops_unlikely(rule), 4, line(2), (S, S)) > 1e-3


@pytest.mark.parametrize("rule", SAMPLERS, ids=lambda rule: rule.__name__)
def test_a_budget_may_not_look_at_later_guesses(rule):
    assert worst(biased_verifiers.looks_ahead(rule), 4, line(2), (S, S)) > 1e-3


@pytest.mark.parametrize("rule", [verify.siblings, verify.traversal], ids=lambda rule: rule.__name__)
def test_chosen_guesses_may_not_be_scored_with_a_softmax(rule):
    for seed in range(3):
        instance = draw(4, (-1, -1), (H, H), seed)
        q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        assert prove(biased_verifiers.scores_softmax(rule, q), instance).error > 1e-3


@pytest.mark.parametrize("rule", SAMPLERS, ids=lambda rule: rule.__name__)
def test_q_may_not_be_recomputed_in_another_precision(rule):
    assert worst(biased_verifiers.recomputes_q(rule), 4, line(2), (S, S)) > 1e-6


@pytest.mark.parametrize("rule", SAMPLERS, ids=lambda rule: rule.__name__)
def test_a_guess_of_no_probability_may_not_be_kept(rule):
    assert worst(biased_verifiers.accepts_at_zero(rule), 4, line(2), (S, S), zeros=0.5) > 1e-3


@pytest.mark.parametrize("rule", [biased_verifiers.block_uncapped, biased_verifiers.block_with_token_residual])
def test_block_needs_its_cap_and_its_residual(rule):
    assert worst(rule, 4, line(3), (S, S, S)) > 1e-3


@pytest.mark.parametrize("verifier", lossy.LOSSY.values(), ids=by_name)
def test_lossy_rules_are_lossy_and_say_so(verifier):
    assert not verifier.exact
    assert worst(verifier.rule, 4, line(2), (S, S)) > 1e-3


@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_the_bonus_must_be_drawn(verifier):
    assert worst(biased_verifiers.greedy_bonus(verifier.rule), 3, line(2), (S, S)) > 1e-3


def test_accepting_padding_or_a_foreign_id_is_an_error():
    def trusting(draft, p, noise):
        kept = torch.full_like(draft.count, draft.size)
        return verdict_of(draft, p, prefix_of(draft, kept), kept, noise.sample(p[:, -1], kept))

    greedy = draw(3, line(1), (S,), same=True)
    assert_exact(prove(trusting, greedy))
    half = torch.full((1,), 0.5, dtype=torch.float64)
    assert prove(trusting, replace(greedy, ends=(half,))).error > 0.01
    assert prove(trusting, replace(greedy, proposal=(torch.zeros_like(greedy.proposal[0]),))).error > 0.01


def test_a_path_that_jumps_is_an_error():
    def jumping(draft, p, noise):
        at = torch.ones_like(draft.count)
        path = torch.stack([at, -at], 1)
        return verdict_of(draft, p, path, at, noise.sample(p[:, 2], at))

    assert prove(jumping, draw(3, line(2), (S, S), same=True)).error > 0.01


def test_wrong_log_probabilities_are_found():
    def lying(draft, p, noise) -> Verdict:
        verdict = verify.walk(draft, p, noise)
        return replace(verdict, logprob=verdict.logprob * 0.5)

    proof = prove(lying, draw(3, line(2), (S, S)))
    assert proof.error < ROUNDING
    assert proof.logprob_error > 0.1


def test_a_coin_is_tossed_once():
    def tosses_twice(draft, p, noise):
        one = torch.zeros_like(draft.count)
        noise.bernoulli(torch.full_like(p[:, 0, 0], 0.5), one)
        noise.bernoulli(torch.full_like(p[:, 0, 0], 0.5), one)
        return verify.walk(draft, p, noise)

    with pytest.raises(OutriderError, match="tossed twice"):
        prove(tosses_twice, draw(3, line(1), (S,)))


def test_an_instance_that_contradicts_itself_is_refused():
    instance = draw(3, line(2), (S, S))
    with pytest.raises(OutriderError, match="parent"):
        replace(instance, parent=(0, 1))
    with pytest.raises(OutriderError, match="length"):
        replace(instance, laws=(S,))
    with pytest.raises(OutriderError, match="target"):
        replace(instance, target=instance.target[:1])
