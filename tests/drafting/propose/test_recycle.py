"""Token recycling: the stored successors, the trees that grow from them, and the separation of sequences."""

import random
from itertools import pairwise

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget, Scores
from outrider.drafting.propose.lookup import successors
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.drafting.propose.lookup.recycle import RecycleProposer
from outrider.drafting.propose.lookup.successors import SIMILAR, Successors, SuccessorTable, prior
from outrider.drafting.propose.registry import find_proposer
from outrider.errors import OutriderError
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_round, make_seq
from outrider.verify.rules import verify_greedy
from tests.drafting.propose.toy_rounds import admit, batch_of, check_fewer_passes, check_one_copy, commit, score, verify

GREEDY = SamplingParams(temperature=0.0)


def run_rounds(proposer, target, seqs, budget, rounds):
    """Run greedy rounds. Return the committed tokens of all sequences before, the draft and the logits of each."""
    history = []
    for _ in range(rounds):
        batch = batch_of(seqs, budget)
        draft = proposer.propose(batch)
        round = verify(target, batch, draft)
        history.append(([tuple(seq.token_ids) for seq in seqs], draft, round.scores.logits))
        commit(proposer, round)
    return history


def admitted(prompts, *, vocab=40, seed=0):
    """Return a target, a proposer, and sequences that are admitted to it."""
    target = ToyTarget(vocab=vocab, seed=seed, spread=3.0)
    proposer = RecycleProposer(toy_setup(target))
    return target, proposer, admit(proposer, prompts)


def successors_of(proposer, slot):
    """Return the stored successors of a sequence, by suffix."""
    return proposer.tables[slot].by_suffix


def test_single_tokens_have_the_latest_successors():
    """As in the paper: the eight likeliest tokens at the last node with that token that was scored."""
    target, proposer, seqs = admitted([[3, 1, 4]])
    expected = {}
    for texts, draft, logits in run_rounds(proposer, target, seqs, 12, 30):
        for token, node_logits in zip([texts[0][-1], *draft.tokens[0].tolist()], logits[0], strict=True):
            expected[token] = node_logits.argsort(descending=True)[:8].tolist()
    stored = successors_of(proposer, 0)
    assert len(expected) > 20
    for token, tokens in expected.items():
        assert stored[token,].tokens == tokens


def test_longer_suffixes_have_their_own_successors():
    target, proposer, seqs = admitted([[3, 1, 4]])
    expected = {}
    for texts, draft, logits in run_rounds(proposer, target, seqs, 12, 30):
        paths = [texts[0]]
        for token, parent in zip(draft.tokens[0].tolist(), draft.parent[0].tolist(), strict=True):
            paths.append((*paths[parent + 1], token))
        for path, node_logits in zip(paths, logits[0], strict=True):
            for size in (2, 3, 4):
                if len(path) >= size:
                    expected[path[-size:]] = node_logits.argsort(descending=True)[:8].tolist()
    stored = successors_of(proposer, 0)
    assert all(stored[suffix].tokens == tokens for suffix, tokens in expected.items())
    assert {len(suffix) for suffix in expected} == {2, 3, 4}


def test_prompt_is_stored():
    _, proposer, seqs = admitted([[7, 8, 9, 5, 7, 8, 6, 1, 7, 8]])
    draft = proposer.propose(batch_of(seqs, 1))
    assert draft.tokens.tolist() == [[6]]  # the latest successor of 7, 8
    draft = proposer.propose(batch_of(seqs, 2))
    assert set(draft.tokens[0].tolist()) >= {6}
    assert list(successors_of(proposer, 0)[7, 8].tokens) == [6, 9]


@pytest.mark.parametrize(
    ("make", "size_of"),
    [
        (RecycleProposer, lambda proposer: len(successors_of(proposer, 0))),
        (NgramProposer, lambda proposer: len(proposer.indexes[0])),
    ],
)
def test_prompt_is_stored_as_it_is_prefilled(make, size_of):
    """Not at admission, which would delay other sequences. The draft is the same as with the whole prompt at once."""
    rng = random.Random(5)
    seq = make_seq([rng.randrange(6) for _ in range(90)], 0)
    chunked = make(toy_setup(ToyTarget(vocab=6)))
    at_once = make(toy_setup(ToyTarget(vocab=6)))
    for proposer in (chunked, at_once):
        proposer.admit(0, seq.request)
    sizes = [size_of(chunked)]
    for start in range(0, 89, 16):
        end = min(start + 16, 89)
        feed = tuple(seq.token_ids[start:end])
        chunked.propose(Batch(seqs=(seq,), start=(start,), feed=(feed,), budget=DraftBudget((0,))))
        sizes.append(size_of(chunked))
    assert sizes[0] == 0
    assert all(before < after for before, after in pairwise(sizes))
    drafts = [proposer.propose(batch_of([seq], 8)) for proposer in (chunked, at_once)]
    assert drafts[0].width == (8,)
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert drafts[0].parent.tolist() == drafts[1].parent.tolist()
    assert size_of(chunked) == size_of(at_once)


def test_unknown_token_uses_successors_of_a_similar_one():
    table = SuccessorTable(0)
    table.put((1, 2, 3, 4), Successors([5, 6, 7], [3.0, 2.0, 1.0]))
    assert list(table.candidates((1, 2, 3, 4, 9))) == []
    # A draft token at the same place, which was scored but not accepted.
    similar = Successors([8, 1], [4.0, 1.0])
    table.put((2, 3, 4, 6), similar)
    assert list(table.candidates((1, 2, 3, 4, 9))) == [(8, similar.kind(SIMILAR, 0)), (1, similar.kind(SIMILAR, 1))]
    table.add_output([3, 3, 8])
    # The most frequent output tokens come last.
    assert [token for token, _ in table.candidates((1, 2, 3, 4, 9))] == [8, 1, 3]


def test_kind_depends_on_the_logits():
    even = Successors([1, 2, 3], [9.0, 8.9, -torch.inf])
    certain = Successors([1, 2], [50.0, 1.0])
    priors = [prior(even.kind(1, rank)) for rank in range(3)]
    assert priors[0] == priors[1] > 100 * priors[2]
    assert prior(certain.kind(1, 0)) == pytest.approx(2 * priors[0], rel=0.01)


def best_nodes(proposer, table, suffix, budget):
    """Return the likeliest nodes of the full tree by brute force, as pairs of probability and path."""
    nodes = []

    def visit(suffix, path, parent_prob):
        prob = parent_prob
        for token, kind in table.candidates(suffix):
            prob = min(prob, parent_prob * proposer.accept_prob(kind))
            if prob > 0.1:
                nodes.append((prob, (*path, token)))
                visit((*suffix[-4:], token), (*path, token), prob)

    visit(suffix, (), 1.0)
    return sorted(nodes, key=lambda node: -node[0])[:budget]


def test_tree_has_the_likeliest_nodes():
    target, proposer, seqs = admitted([[3, 1, 4]], vocab=12)
    run_rounds(proposer, target, seqs, 12, 12)
    expected = best_nodes(proposer, proposer.tables[0], tuple(seqs[0].token_ids[-5:]), 9)
    draft = proposer.propose(batch_of(seqs, 9))
    assert draft.accept_prob is not None
    assert sorted(draft.accept_prob[0]) == pytest.approx(sorted(prob for prob, _ in expected))


@pytest.mark.parametrize("budget", range(40))
def test_draft_stays_within_any_budget(budget):
    target, proposer, seqs = admitted([[3, 1, 4], [1, 5, 9, 2, 6]])
    for _, draft, _ in run_rounds(proposer, target, seqs, budget, 6):
        assert all(width <= budget for width in draft.width)
        assert all(a >= b for probs in draft.accept_prob or () for a, b in pairwise(probs))
        for b, width in enumerate(draft.width):
            pairs = list(zip(draft.parent[b, :width].tolist(), draft.tokens[b, :width].tolist(), strict=True))
            assert len(set(pairs)) == width, "a node is duplicated"
    assert draft.width == (budget, budget)  # by now enough successors are stored


def test_sequences_share_no_successors():
    """The table of a sequence is the same alone and in a batch, and is dropped with the sequence."""
    target, alone, seqs = admitted([[3, 1, 4]])
    run_rounds(alone, target, seqs, 10, 8)
    _, in_batch, batch_seqs = admitted([[3, 1, 4], [1, 5, 9, 2, 6, 5]])
    run_rounds(in_batch, target, batch_seqs, 0, 4)
    _, alone, seqs = admitted([[3, 1, 4]])
    run_rounds(alone, target, seqs, 0, 4)
    assert seqs[0].token_ids == batch_seqs[0].token_ids
    assert successors_of(alone, 0) == successors_of(in_batch, 0)
    in_batch.release(1)
    new_seq = make_seq([2, 2], 1)
    in_batch.admit(1, new_seq.request)
    in_batch.propose(batch_of([new_seq], 0))
    assert set(successors_of(in_batch, 1)) == {(2,)}
    assert not list(in_batch.tables[1].candidates((3, 1, 4)))


def test_prefilling_sequences_store_no_logits():
    target, proposer, seqs = admitted([[3, 1, 4], [1, 5, 9]])
    before = dict(successors_of(proposer, 1))
    batch = Batch(seqs=tuple(seqs), start=(2, 0), feed=((4,), (1,)), budget=DraftBudget((3, 0)))
    draft = proposer.propose(batch)
    logits = torch.stack([score(target, seq, draft, b) for b, seq in enumerate(seqs)])
    path, emitted = verify_greedy(draft, logits.argmax(-1))[0]
    proposer.commit(make_round(batch, draft, Scores(logits=logits), [path, ()], [emitted, ()]))
    assert successors_of(proposer, 1) == before
    assert successors_of(proposer, 0)[3, 1, 4].tokens == logits[0, 0].argsort(descending=True)[:8].tolist()


def test_successors_of_other_proposers_drafts_are_stored():
    target, proposer, seqs = admitted([[3, 1, 4]])
    batch = batch_of(seqs, 4)
    proposer.propose(batch)
    draft = tree.one_hot_tree(torch.tensor([[11, 12, 13]]), torch.tensor([[-1, -1, 0]]), (3,))
    logits = score(target, seqs[0], draft, 0)[None]
    proposer.commit(make_round(batch, draft, Scores(logits=logits), [()], [(int(logits[0, 0].argmax()),)]))
    stored = successors_of(proposer, 0)
    for node, suffix in enumerate([(3, 1, 4), (3, 1, 4, 11), (3, 1, 4, 12), (1, 4, 11, 13)]):
        assert stored[suffix].tokens == logits[0, node].argsort(descending=True)[:8].tolist()


def test_number_of_suffixes_is_bounded(monkeypatch):
    monkeypatch.setattr(successors, "MAX_SUFFIXES", 200)
    target, proposer, seqs = admitted([[3, 1, 4]])
    run_rounds(proposer, target, seqs, 12, 40)
    assert 100 < len(successors_of(proposer, 0)) <= 200


def test_commit_makes_one_copy_from_the_device(monkeypatch):
    target, proposer, seqs = admitted([[3, 1, 4], [1, 5, 9]])
    check_one_copy(monkeypatch, target, proposer, seqs, 9)


@pytest.mark.fast_cases("0.9")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_the_targets_with_fewer_passes(temperature):
    check_fewer_passes("recycle", k=12, temperature=temperature, max_tokens=60, tau=1.3)


def test_argument_is_rejected():
    setup = toy_setup(ToyTarget())
    assert isinstance(find_proposer("recycle", setup), RecycleProposer)
    with pytest.raises(OutriderError, match="write recycle"):
        find_proposer("recycle:5", setup)
