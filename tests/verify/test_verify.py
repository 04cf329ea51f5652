"""Tests that verifiers are exact, by enumeration, and that biased verifiers are detected."""

from dataclasses import replace

import pytest
import torch

from outrider.core.types import DraftKind, Verdict
from outrider.errors import OutriderError
from outrider.testing.enumeration import Case, Instance, Proof, prove, race_joint
from outrider.verify import lossy
from outrider.verify import rules as verify
from outrider.verify.verdict import prefix_of, tokens_before, verdict_of
from tests.helpers import biased_verifiers

H, S, W = DraftKind.ONE_HOT, DraftKind.SAMPLED, DraftKind.WITHOUT_REPLACEMENT  # one-hot, sampled, without replacement
ROUNDING = 1e-12

VERIFIERS = tuple(verify.EXACT.values())
TREES = tuple(v for v in VERIFIERS if v.trees)
# These verifiers do not sample at all nodes at once, so larger instances are possible.
TREES_BY_ACCEPTANCE = tuple(v for v in TREES if v.name not in ("walk", "coupled"))
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
# Vocabulary sizes; 3 for all other cases.
SIZES = {"plain": (3, 4, 5), "zeros": (3, 5), "disjoint": (4,), "everything": (3, 4)}
SMALL_TREES = {
    "top-k": ((-1, -1, -1, 0), (H, H, H, H)),
    "sampled siblings": ((-1, -1, 0, 0), (S, S, S, S)),
    "without replacement": ((-1, -1, 0, 0), (W, W, W, W)),
    "more nodes than tokens": ((-1, -1, -1, -1), (W, W, W, W)),
    "top and sampled": ((-1, -1, 0, 0), (H, S, H, S)),
    "top and without replacement": ((-1, -1, -1, 1), (H, W, W, H)),
    "sampled and top": ((-1, -1, 1, 1), (S, H, S, H)),
    "all kinds": ((-1, -1, -1, 0), (S, W, H, W)),
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


def chain(depth):
    return tuple(range(-1, depth - 1))


def make_instance(vocab, parent, kinds, seed=0, **special):
    return Instance.random(vocab, parent, kinds, generator=torch.Generator().manual_seed(seed), case=Case(**special))


def assert_exact(proof: Proof):
    assert proof.error < ROUNDING
    assert proof.logprob_error < ROUNDING


def by_name(verifier):
    return verifier.name


@pytest.mark.fast_cases(
    "walk-plain",
    "walk-zeros",
    "coupled-same",
    "coupled-disjoint",
    "rejection-same zeros",
    "rejection-ending",
    "block-foreign",
    "block-everything",
    "siblings-plain",
    "siblings-zeros",
    "traversal-same",
    "traversal-disjoint",
)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_chains_are_exact(verifier, special):
    for vocab in SIZES.get(special, (3,)):
        for depth in range(4):
            for kinds in {(H,) * depth, (S,) * depth, (W,) * depth, (H, S, H)[:depth], (S, H, S)[:depth]}:
                seed = vocab * 10 + depth
                assert_exact(prove(verifier.rule, make_instance(vocab, chain(depth), kinds, seed, **SPECIAL[special])))


@pytest.mark.fast_cases(
    "walk-top-k-plain",
    "walk-top and sampled-same zeros",
    "walk-sampled after without replacement-apart",
    "walk-sampled siblings-same",
    "walk-top and without replacement-foreign",
    "walk-depth first-zeros",
    "coupled-sampled siblings-zeros",
    "coupled-top and without replacement-ending",
    "coupled-depth first-plain",
    "coupled-without replacement-disjoint",
    "coupled-sampled and top-everything",
    "siblings-without replacement-same",
    "siblings-sampled and top-foreign",
    "siblings-more nodes than tokens-same zeros",
    "siblings-all kinds-apart",
    "traversal-more nodes than tokens-disjoint",
    "traversal-all kinds-everything",
    "traversal-top-k-zeros",
    "traversal-top and sampled-ending",
    "traversal-sampled after without replacement-plain",
)
@pytest.mark.parametrize("special", [*SPECIAL, "apart"])
@pytest.mark.parametrize("shape", SMALL_TREES)
@pytest.mark.parametrize("verifier", TREES, ids=by_name)
def test_trees_are_exact(verifier, shape, special):
    for vocab in SIZES.get(special, (3,))[: 2 if verifier in TREES_BY_ACCEPTANCE else 1]:
        assert_exact(
            prove(verifier.rule, make_instance(vocab, *SMALL_TREES[shape], **SPECIAL.get(special, {"apart": True})))
        )


@pytest.mark.fast_cases(
    "siblings-binary, sampled-plain",
    "siblings-binary, without replacement-zeros",
    "siblings-binary, depth first-same",
    "siblings-binary, mixed-disjoint",
    "siblings-deep-same zeros",
    "traversal-binary, sampled-ending",
    "traversal-binary, without replacement-foreign",
    "traversal-binary, depth first-everything",
    "traversal-binary, mixed-plain",
    "traversal-deep-zeros",
)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("shape", BIG_TREES)
@pytest.mark.parametrize("verifier", TREES_BY_ACCEPTANCE, ids=by_name)
def test_deep_trees_are_exact(verifier, shape, special):
    vocab = 4 if special == "disjoint" else 3
    assert_exact(prove(verifier.rule, make_instance(vocab, *BIG_TREES[shape], **SPECIAL[special])))


@pytest.mark.parametrize("verifier", TREES, ids=by_name)
def test_deep_deterministic_trees_are_exact(verifier):
    for special in ("plain", "zeros", "same", "ending", "foreign"):
        assert_exact(prove(verifier.rule, make_instance(3, BINARY, (H,) * 6, **SPECIAL[special])))


@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_equal_distributions_are_accepted_and_disjoint_ones_rejected(verifier):
    if verifier.name != "walk":  # it samples from p independently of the draft
        assert prove(verifier.rule, make_instance(3, chain(3), (S,) * 3, same=True)).accepted == pytest.approx(3)
    assert prove(verifier.rule, make_instance(4, chain(3), (S,) * 3, disjoint=True)).accepted == 0


@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_stopping_after_an_unlikely_draft_token_is_exact(verifier):
    for seed in range(3):
        assert_exact(
            prove(biased_verifiers.stops_after_unlikely(verifier.rule), make_instance(4, chain(3), (S,) * 3, seed))
        )


# Known results on acceptance rates.


@pytest.mark.parametrize("seed", range(20))
def test_block_accepts_at_least_as_much_as_rejection(seed):
    instance = make_instance(4, chain(3), (S,) * 3, seed, zeros=0.2)
    rejection, block = (prove(rule, instance).accepted for rule in (verify.rejection, verify.block))
    assert rejection <= block + ROUNDING


@pytest.mark.fast_cases(
    "sampled-plain", "sampled-same zeros", "mixed-disjoint", "mixed-everything", "one-hot-same", "one-hot-foreign"
)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("kinds", [(S, S, S), (H, S, W), (H, H, H)], ids=["sampled", "mixed", "one-hot"])
def test_traversal_of_a_chain_accepts_as_much_as_block(kinds, special):
    instance = make_instance(4, chain(3), kinds, **SPECIAL[special])
    traversal, block = (prove(rule, instance).accepted for rule in (verify.traversal, verify.block))
    assert traversal == pytest.approx(block, abs=ROUNDING)


@pytest.mark.fast_cases("plain", "disjoint", "foreign")
@pytest.mark.parametrize("special", SPECIAL)
def test_all_rules_accept_equally_on_one_hot_trees(special):
    instance = make_instance(4 if special == "disjoint" else 3, BINARY, (H,) * 6, **SPECIAL[special])
    walk, siblings, traversal = (
        prove(rule, instance).accepted for rule in (verify.walk, verify.siblings, verify.traversal)
    )
    assert siblings == pytest.approx(walk, abs=ROUNDING)
    assert traversal == pytest.approx(walk, abs=ROUNDING)


def test_all_rules_accept_equally_with_a_greedy_target():
    instance = make_instance(4, chain(3), (S,) * 3)
    greedy = tuple(torch.nn.functional.one_hot(probs.argmax(-1), 4).double() for probs in instance.target)
    accepted = {v.name: prove(v.rule, replace(instance, target=greedy)).accepted for v in VERIFIERS}
    assert list(accepted.values()) == pytest.approx([accepted["walk"]] * len(accepted), abs=ROUNDING)


def test_traversal_accepts_more_than_siblings_on_sampled_trees():
    for seed in range(5):
        instance = make_instance(3, BINARY, (W,) * 6, seed)
        assert prove(verify.traversal, instance).accepted > prove(verify.siblings, instance).accepted - ROUNDING


@pytest.mark.parametrize("seed", range(10))
def test_acceptance_of_coupled_is_within_its_bounds(seed):
    instance = make_instance(5, (-1,), (S,), seed, zeros=0.3)
    distance = float((instance.target[0] - instance.proposal[0]).clamp(min=0).sum())
    accepted = prove(verify.coupled, instance).accepted
    assert (1 - distance) / (1 + distance) - ROUNDING <= accepted <= 1 - distance + ROUNDING
    assert prove(verify.rejection, instance).accepted == pytest.approx(1 - distance, abs=ROUNDING)


def test_race_joint_has_p_and_q_as_marginals():
    for special in SPECIAL.values():
        instance = make_instance(4, (-1, 0), (S, S), **special)
        p, q = instance.target[1], instance.proposal[1]
        valid = q.sum(-1) > 0
        joint = race_joint(p, q)[valid]
        assert torch.allclose(joint.sum(-1), q[valid], rtol=0, atol=ROUNDING)
        assert torch.allclose(joint.sum(-2), p[valid], rtol=0, atol=ROUNDING)


# Optimized code paths against simple ones.


@pytest.mark.fast_cases(
    "walk-plain",
    "walk-same",
    "walk-same zeros",
    "walk-foreign",
    "coupled-zeros",
    "coupled-disjoint",
    "coupled-ending",
    "coupled-everything",
)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("rule", [verify.walk, verify.coupled], ids=lambda rule: rule.__name__)
def test_walk_of_a_chain_equals_walk_of_a_tree(rule, special):
    def both(draft, p, noise):
        sample = noise.sample if rule is verify.walk else noise.sample_race
        tokens = sample(p, tokens_before(draft))
        as_chain, as_tree = (rule(replace(draft, chain=is_chain), p, Replay(tokens)) for is_chain in (True, False))
        for name in ("path", "accepted", "bonus", "logprob"):
            assert torch.equal(getattr(as_chain, name), getattr(as_tree, name))
        return as_chain

    assert_exact(prove(both, make_instance(4, chain(3), (S, H, S), **SPECIAL[special])))


class Replay:
    """Noise that returns given tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    def sample(self, probs, ahead):
        return self.tokens

    sample_race = sample


@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_sequences_of_a_batch_are_verified_independently(verifier):
    """The sequences of the batch have different counts and distributions."""
    instance = make_instance(3, chain(2), (S, H), ending=0.7)
    inputs = []

    def record(draft, p, noise):
        inputs.append((draft, p))
        return verifier.rule(draft, p, noise)

    prove(record, instance)
    draft, p = inputs[0]
    batched = verifier.rule(draft, p, Deterministic())
    for b in range(len(p)):
        fields = {name: getattr(draft, name)[b : b + 1] for name in ("tokens", "parent", "count", "kind")}
        single = replace(draft, **fields, q=replace(draft.q, at=draft.q.at[b : b + 1]))
        alone = verifier.rule(single, p[b : b + 1], Deterministic())
        for name in ("path", "accepted", "bonus", "logprob"):
            assert torch.equal(getattr(alone, name)[0], getattr(batched, name)[b])


class Deterministic:
    """Noise without randomness."""

    def sample(self, probs, ahead):
        return probs.argmax(-1)

    sample_race = sample

    def bernoulli(self, prob, index):
        return prob > 0.5


# The enumeration detects biased rules.


def largest_error(rule, *shape, seeds=range(6), **special):
    return max(prove(rule, make_instance(*shape, seed, **special)).error for seed in seeds)


SAMPLE_RULES = [verify.rejection, verify.block, verify.siblings, verify.traversal]


@pytest.mark.parametrize("rule", SAMPLE_RULES, ids=lambda rule: rule.__name__)
def test_dropping_unlikely_draft_tokens_is_biased(rule):
    assert largest_error(biased_verifiers.drops_unlikely(rule), 4, chain(2), (S, S)) > 1e-3


@pytest.mark.parametrize("rule", SAMPLE_RULES, ids=lambda rule: rule.__name__)
def test_budget_that_depends_on_later_draft_tokens_is_biased(rule):
    assert largest_error(biased_verifiers.looks_ahead(rule), 4, chain(2), (S, S)) > 1e-3


@pytest.mark.parametrize("rule", [verify.siblings, verify.traversal], ids=lambda rule: rule.__name__)
def test_softmax_q_for_one_hot_draft_tokens_is_biased(rule):
    for seed in range(3):
        instance = make_instance(4, (-1, -1), (H, H), seed)
        q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        assert prove(biased_verifiers.scores_softmax(rule, q), instance).error > 1e-3


@pytest.mark.parametrize("rule", SAMPLE_RULES, ids=lambda rule: rule.__name__)
def test_recomputing_q_in_another_precision_is_biased(rule):
    assert largest_error(biased_verifiers.recomputes_q(rule), 4, chain(2), (S, S)) > 1e-6


@pytest.mark.parametrize("rule", SAMPLE_RULES, ids=lambda rule: rule.__name__)
def test_accepting_draft_tokens_of_probability_zero_is_biased(rule):
    assert largest_error(biased_verifiers.accepts_at_zero(rule), 4, chain(2), (S, S), zeros=0.5) > 1e-3


@pytest.mark.parametrize("rule", [biased_verifiers.block_uncapped, biased_verifiers.block_with_token_residual])
def test_block_without_its_cap_or_residual_is_biased(rule):
    assert largest_error(rule, 4, chain(3), (S, S, S)) > 1e-3


@pytest.mark.parametrize("verifier", lossy.LOSSY.values(), ids=by_name)
def test_lossy_rules_are_biased_and_not_marked_exact(verifier):
    assert not verifier.exact
    assert largest_error(verifier.rule, 4, chain(2), (S, S)) > 1e-3


@pytest.mark.parametrize("verifier", VERIFIERS, ids=by_name)
def test_greedy_bonus_token_is_biased(verifier):
    assert largest_error(biased_verifiers.greedy_bonus(verifier.rule), 3, chain(2), (S, S)) > 1e-3


def test_accepting_padding_or_a_foreign_id_is_an_error():
    def accept_all(draft, p, noise):
        accepted = torch.full_like(draft.count, draft.size)
        return verdict_of(draft, p, prefix_of(draft, accepted), accepted, noise.sample(p[:, -1], accepted))

    instance = make_instance(3, chain(1), (S,), same=True)
    assert_exact(prove(accept_all, instance))
    half = torch.full((1,), 0.5, dtype=torch.float64)
    assert prove(accept_all, replace(instance, ends=(half,))).error > 0.01
    no_probability = torch.zeros_like(instance.proposal[0])
    assert prove(accept_all, replace(instance, proposal=(no_probability,))).error > 0.01


def test_path_that_skips_a_node_is_an_error():
    def skip_first_node(draft, p, noise):
        one = torch.ones_like(draft.count)
        path = torch.stack([one, -one], 1)
        return verdict_of(draft, p, path, one, noise.sample(p[:, 2], one))

    assert prove(skip_first_node, make_instance(3, chain(2), (S, S), same=True)).error > 0.01


def test_wrong_log_probabilities_are_detected():
    def halve_logprobs(draft, p, noise) -> Verdict:
        verdict = verify.walk(draft, p, noise)
        return replace(verdict, logprob=verdict.logprob * 0.5)

    proof = prove(halve_logprobs, make_instance(3, chain(2), (S, S)))
    assert proof.error < ROUNDING
    assert proof.logprob_error > 0.1


def test_error_if_bernoulli_repeats_an_index():
    def repeat_index(draft, p, noise):
        index = torch.zeros_like(draft.count)
        noise.bernoulli(torch.full_like(p[:, 0, 0], 0.5), index)
        noise.bernoulli(torch.full_like(p[:, 0, 0], 0.5), index)
        return verify.walk(draft, p, noise)

    with pytest.raises(OutriderError, match="called twice with one index"):
        prove(repeat_index, make_instance(3, chain(1), (S,)))


def test_errors_of_inconsistent_instances():
    instance = make_instance(3, chain(2), (S, S))
    with pytest.raises(OutriderError, match="parent"):
        replace(instance, parent=(0, 1))
    with pytest.raises(OutriderError, match="length"):
        replace(instance, kinds=(S,))
    with pytest.raises(OutriderError, match="target"):
        replace(instance, target=instance.target[:1])
