"""Tests of `best`, which uses the draft with the highest expected value."""

from dataclasses import replace

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.proposer import ProposerSetup
from outrider.core.types import Batch, DraftBudget, Draw, Needs, Packed, Round, Scores, SequenceState
from outrider.drafting.propose.best import Best
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.testing.toy_target import ToyTarget

VOCAB = 16
OTHER = 9  # a token that no part drafts


class Lookup:
    """Drafts given tokens with given acceptance probabilities, and records its draft budgets."""

    needs = Needs()

    def __init__(self, tokens, probs=None, *, sampled=False):
        self.tokens = list(tokens)
        self.probs = probs
        self.sampled = sampled
        self.budgets = []

    def admit(self, slot, request):
        pass

    def propose(self, batch):
        self.budgets.append(batch.draft_budget)
        widths = tuple(min(len(self.tokens), budget) for budget in batch.draft_budget)
        if not max(widths):
            return tree.empty(len(widths), torch.device("cpu"))
        tokens = torch.tensor([self.tokens[: max(widths)]] * len(widths))
        probs = self.probs and tuple(tuple(self.probs[:width]) for width in widths)
        draft = tree.chain(tokens, widths, accept_prob=probs)
        if not self.sampled:
            return draft
        q = functional.one_hot(tokens, VOCAB).float()
        return replace(draft, kind=torch.ones_like(tokens), q=Packed.of(q), accept_prob=None)

    def commit(self, round):
        pass

    def release(self, slot):
        pass


class Model(Lookup, DraftModelProposer):
    """The same, but counts as a draft model, whose draft tokens take time."""

    model = ToyTarget(vocab=VOCAB, slots=1)


def make_best(*parts, draw=Draw.SAMPLE):
    target = ToyTarget(vocab=VOCAB, slots=4)
    setup = ProposerSetup(
        target=target,
        vocab=VOCAB,
        slots=4,
        context=64,
        device=torch.device("cpu"),
        dtype=torch.float32,
        draw=draw,
        tokenizer=None,
    )
    return Best(setup, parts)


def run(best, *, accepted, rounds=1, seqs=1, budget=4, params=None, **prices):
    """Run rounds in which so many draft tokens are accepted. Return the draft tokens of the last round."""
    texts = tuple(SequenceState.of((1, 2, 3), slot=slot, params=params) for slot in range(seqs))
    batch = Batch(seqs=texts, start=(2,) * seqs, feed=((3,),) * seqs, budget=DraftBudget((budget,) * seqs, **prices))
    for _ in range(rounds):
        draft = best.propose(batch)
        drafted = [tokens[:width] for tokens, width in zip(draft.host_tokens(), draft.width, strict=True)]
        path = tuple(tuple(range(min(accepted, width))) for width in draft.width)
        emitted = tuple((*tokens[: len(nodes)], OTHER) for tokens, nodes in zip(drafted, path, strict=True))
        best.commit(
            Round(
                batch=batch,
                draft=draft,
                scores=Scores(logits=torch.zeros(1)),
                path=path,
                emitted=emitted,
                sampled_logprob=((0.0,),) * seqs,
                failed=(False,) * seqs,
            )
        )
    return drafted


def test_model_drafts_where_the_lookup_promises_less():
    lookup, model = Lookup([1, 1], [0.3, 0.1]), Model([2, 2, 2])
    assert run(make_best(lookup, model), accepted=3, rounds=8) == [[2, 2, 2]]
    assert model.budgets == [(4,)] * 8


def test_model_does_not_run_where_the_lookup_promises_more():
    lookup, model = Lookup([1, 1, 1, 1], [0.99, 0.98, 0.97, 0.96]), Model([2, 2])
    best = make_best(lookup, model)
    run(best, accepted=1, rounds=4)  # the model's first rounds
    assert run(best, accepted=4, rounds=4) == [[1, 1, 1, 1]]
    assert model.budgets[-4:] == [(0,)] * 4


def test_draft_tokens_of_the_model_have_a_price():
    """At a price of half an output token for each, three of four accepted draft tokens are worth one."""
    prices = {"min_path_prob": 0.1, "min_draft_probs": (0.6,)}
    for prob, expected in ((0.9, 1), (0.5, 1), (0.2, 2)):
        lookup, model = Lookup([1, 1], [prob, prob]), Model([2, 2, 2, 2])
        best = make_best(lookup, model)
        run(best, accepted=3, rounds=4)
        drafted = run(best, accepted=3, rounds=1, **prices)
        assert drafted[0][0] == expected
        assert run(best, accepted=3, rounds=1)[0][0] == 2  # without prices


def test_estimates_are_corrected_by_what_is_accepted():
    lookup, model = Lookup([1, 1, 1], [0.9, 0.9, 0.9]), Model([2, 2])
    best = make_best(lookup, model)
    run(best, accepted=1, rounds=4)  # the model's first rounds: one token of two is accepted
    assert run(best, accepted=0, rounds=1) == [[1, 1, 1]]
    assert run(best, accepted=0, rounds=12)[0] == [2, 2]


def test_acceptance_is_learned_for_drafts_without_estimates():
    """Three draft tokens are worth 1.2 at first, and less than the model's one once they were not accepted."""
    lookup, model = Lookup([1, 1, 1]), Model([2, 2])
    assert run(make_best(lookup, model), accepted=1, rounds=8) == [[2, 2]]


def test_each_sequence_has_its_own_draft():
    class Uneven(Lookup):
        def propose(self, batch):
            draft = super().propose(batch)
            return tree.cut(draft, (len(self.tokens), 0)) if draft.size else draft

    lookup, model = Uneven([1, 1, 1, 1], [0.99] * 4), Model([2, 2])
    best = make_best(lookup, model)
    run(best, accepted=1, rounds=4, seqs=2)
    assert run(best, accepted=4, seqs=2) == [[1, 1, 1, 1], [2, 2]]
    assert model.budgets[-1] == (0, 4)


def test_sampled_drafts_are_kept():
    params = SamplingParams(temperature=1.0)
    first, second = Lookup([1], sampled=True), Model([2, 2, 2])
    assert run(make_best(first, second), accepted=0, rounds=6, params=params) == [[1]]
    assert second.budgets == [(0,)] * 6


def test_draft_of_a_seed_comes_from_a_draft_model():
    """What a lookup drafts may depend on other requests. Greedy texts do not depend on their drafts."""
    seeded = SamplingParams(temperature=1.0, seed=5)
    lookup, model, other = Lookup([1, 1, 1, 1], [0.9] * 4), Model([2, 2, 2], sampled=True), Model([3, 3])
    assert run(make_best(lookup, model, other), accepted=0, rounds=6, params=seeded) == [[2, 2, 2]]
    assert lookup.budgets == other.budgets == [(0,)] * 6
    for other_params in (replace(seeded, seed=None), replace(seeded, temperature=0)):
        run(make_best(lookup, model, other), accepted=0, params=other_params)
        assert lookup.budgets[-1] != (0,)


def test_draft_of_a_seed_without_a_draft_model_is_the_first_one():
    params = SamplingParams(temperature=1.0, seed=5)
    for draw, expected in ((Draw.SAMPLE, [1, 1]), (Draw.ARGMAX, [2, 2, 2])):
        first, second = Lookup([1, 1], [0.2, 0.1]), Lookup([2, 2, 2], [0.9, 0.9, 0.9])
        assert run(make_best(first, second, draw=draw), accepted=3, rounds=4, params=params) == [expected]


def test_budget_is_kept():
    lookup, model = Lookup([1] * 6, [0.1] * 6), Model([2] * 6)
    best = make_best(lookup, model)
    assert run(best, accepted=2, rounds=2, budget=3) == [[2, 2, 2]]
    assert run(best, accepted=2, budget=0) == [[]]
