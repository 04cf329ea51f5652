"""Token recycling: what is remembered, how the tree grows from it, and that it is each row's own."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Scores
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.propose.lookup import recycle
from outrider.propose.lookup.ngram import NgramProposer
from outrider.propose.lookup.recycle import RecycleProposer
from outrider.propose.registry import find_proposer
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_round, make_row
from outrider.verify.rules import verify_greedy
from tests.helpers.engines import make_engine, outputs, run

GREEDY = SamplingParams(temperature=0.0)


def batch_of(rows, budget):
    feeds = tuple((row.token_ids[-1],) for row in rows)
    starts = tuple(len(row.token_ids) - 1 for row in rows)
    return Batch(seqs=tuple(rows), start=starts, feed=feeds, draft_budget=(budget,) * len(rows))


def score(target, row, draft, b):
    """[1 + N, V] what a toy says at each node of row b."""
    endings = [tuple(row.token_ids[-2:])]
    for token, parent in zip(draft.tokens[b].tolist(), draft.parent[b].tolist(), strict=True):
        endings.append((endings[parent + 1][1], token))
    return torch.stack([target.table[ending] for ending in endings])


def live(proposer, target, rows, budget, rounds):
    """Greedy rounds, each as (batch, draft, logits), told to the proposer."""
    told = []
    for _ in range(rounds):
        batch = batch_of(rows, budget)
        draft = proposer.propose(batch)
        logits = torch.stack([score(target, row, draft, b) for b, row in enumerate(rows)])
        kept = verify_greedy(draft, logits.argmax(-1))
        told.append(([tuple(row.token_ids) for row in rows], draft, logits))
        scores = Scores(logits=logits)
        proposer.commit(make_round(batch, draft, scores, [path for path, _ in kept], [said for _, said in kept]))
        for row, (_, said) in zip(rows, kept, strict=True):
            row.token_ids += said
    return told


def admitted(prompts, *, vocab=40, seed=0):
    target = ToyTarget(vocab=vocab, seed=seed, spread=3.0)
    proposer = RecycleProposer(toy_setup(target))
    rows = [make_row(list(prompt), slot) for slot, prompt in enumerate(prompts)]
    for row in rows:
        proposer.admit(row.slot, row.request)
    return target, proposer, rows


def test_the_table_is_the_papers():
    """Under each token stand the eight likeliest at the last node that was scored with it."""
    target, proposer, rows = admitted([[3, 1, 4]])
    table = {}
    for texts, draft, logits in live(proposer, target, rows, 12, 30):
        for token, said in zip([texts[0][-1], *draft.tokens[0].tolist()], logits[0], strict=True):
            table[token] = said.argsort(descending=True)[:8].tolist()
    known = proposer._memories[0]._after
    assert len(table) > 20
    for token, successors in table.items():
        assert known[token,].tokens == successors


def test_longer_endings_are_their_own():
    target, proposer, rows = admitted([[3, 1, 4]])
    table = {}
    for texts, draft, logits in live(proposer, target, rows, 12, 30):
        paths = [texts[0]]
        for token, parent in zip(draft.tokens[0].tolist(), draft.parent[0].tolist(), strict=True):
            paths.append((*paths[parent + 1], token))
        for path, said in zip(paths, logits[0], strict=True):
            for size in (2, 3, 4):
                if len(path) >= size:
                    table[path[-size:]] = said.argsort(descending=True)[:8].tolist()
    known = proposer._memories[0]._after
    assert all(known[ending].tokens == successors for ending, successors in table.items())
    assert {len(ending) for ending in table} == {2, 3, 4}


def test_a_prompt_is_read():
    _, proposer, rows = admitted([[7, 8, 9, 5, 7, 8, 6, 1, 7, 8]])
    draft = proposer.propose(batch_of(rows, 1))
    assert draft.tokens.tolist() == [[6]]  # the latest
    draft = proposer.propose(batch_of(rows, 2))
    assert set(draft.tokens[0].tolist()) >= {6}
    assert list(proposer._memories[0]._after[7, 8].tokens) == [6, 9]


@pytest.mark.parametrize(("make", "held"), [(RecycleProposer, "_memories"), (NgramProposer, "_indexes")])
def test_a_prompt_is_read_as_far_as_it_is_fed(make, held):
    """And not when its row is admitted, which would keep the others waiting; guesses are those of all at once."""
    chance = random.Random(5)
    row = make_row([chance.randrange(6) for _ in range(90)], 0)
    pieces, whole = (make(toy_setup(ToyTarget(vocab=6))) for _ in range(2))
    for each in (pieces, whole):
        each.admit(0, row.request)
    sizes = [len(getattr(pieces, held)[0]._after)]
    for at in range(0, 89, 16):
        end = min(at + 16, 89)
        pieces.propose(Batch(seqs=(row,), start=(at,), feed=(tuple(row.token_ids[at:end]),), draft_budget=(0,)))
        sizes.append(len(getattr(pieces, held)[0]._after))
    assert sizes[0] == 0
    assert all(before < after for before, after in pairwise(sizes))
    drafts = [each.propose(batch_of([row], 8)) for each in (pieces, whole)]
    assert drafts[0].width == (8,)
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert drafts[0].parent.tolist() == drafts[1].parent.tolist()
    assert getattr(pieces, held)[0]._after == getattr(whole, held)[0]._after


def test_an_unknown_token_borrows_from_its_rivals():
    memory = recycle._Memory(0)
    memory.put((1, 2, 3, 4), recycle._Seen([5, 6, 7], [3.0, 2.0, 1.0]))
    assert list(memory.guesses((1, 2, 3, 4, 9))) == []
    memory.put((2, 3, 4, 6), recycle._Seen([8, 1], [4.0, 1.0]))  # a guess at that place, which was not kept
    tokens, kinds = zip(*memory.guesses((1, 2, 3, 4, 9)), strict=True)
    assert tokens == (8, 1)
    assert {kind // recycle._KINDS for kind in kinds} == {recycle._KIN}
    memory.emit([3, 3, 8])
    assert [token for token, _ in memory.guesses((1, 2, 3, 4, 9))] == [8, 1, 3]  # and then what it says most


def test_kinds_tell_how_sure_the_target_was():
    seen = recycle._Seen([1, 2, 3], [9.0, 8.9, -torch.inf])
    levels = [seen.kind(1, rank) % recycle._KINDS // recycle._BREADTH for rank in range(3)]
    assert levels == [recycle._EVEN, recycle._EVEN, 0]
    sure = recycle._Seen([1, 2], [50.0, 1.0])
    assert sure.kind(1, 0) % recycle._KINDS // recycle._BREADTH == 2 * recycle._EVEN
    assert recycle._expected(sure.kind(1, 0)) > recycle._expected(seen.kind(1, 0)) > recycle._expected(seen.kind(1, 2))


def best_first(proposer, memory, ending, budget):
    """The likeliest guesses of the full tree, by brute force: their paths."""
    found = []

    def visit(ending, path, chance):
        most = chance
        for token, kind in memory.guesses(ending):
            most = min(most, chance * proposer._chance(kind))
            if most > 0.1:
                found.append((most, (*path, token)))
                visit((*ending[-4:], token), (*path, token), most)

    visit(ending, (), 1.0)
    return sorted(found, key=lambda pair: -pair[0])[:budget]


def test_the_tree_is_the_likeliest_one():
    target, proposer, rows = admitted([[3, 1, 4]], vocab=12)
    live(proposer, target, rows, 12, 12)
    wanted = best_first(proposer, proposer._memories[0], tuple(rows[0].token_ids[-5:]), 9)
    draft = proposer.propose(batch_of(rows, 9))
    assert draft.accept_prob is not None
    assert sorted(draft.accept_prob[0]) == pytest.approx(sorted(chance for chance, _ in wanted))


@pytest.mark.parametrize("budget", range(40))
def test_budgets_of_every_size(budget):
    target, proposer, rows = admitted([[3, 1, 4], [1, 5, 9, 2, 6]])
    for _, draft, _ in live(proposer, target, rows, budget, 6):
        assert all(width <= budget for width in draft.width)
        assert all(a >= b for row in draft.accept_prob or () for a, b in pairwise(row))
        for b, width in enumerate(draft.width):
            pairs = list(zip(draft.parent[b, :width].tolist(), draft.tokens[b, :width].tolist(), strict=True))
            assert len(set(pairs)) == width, "a guess is made twice"
    assert draft.width == (budget, budget)  # by now there is enough to guess


def test_rows_do_not_share():
    """What one row remembers is the same alone and beside another; and goes when it goes."""
    target, alone, rows = admitted([[3, 1, 4]])
    live(alone, target, rows, 10, 8)
    _, beside, both = admitted([[3, 1, 4], [1, 5, 9, 2, 6, 5]])
    live(beside, target, both, 0, 4)
    live(alone2 := admitted([[3, 1, 4]])[1], target, only := [make_row([3, 1, 4], 0)], 0, 4)
    assert only[0].token_ids == both[0].token_ids
    assert alone2._memories[0]._after == beside._memories[0]._after
    beside.release(1)
    beside.admit(1, (again := make_row([2, 2], 1)).request)
    beside.propose(batch_of([again], 0))
    assert set(beside._memories[1]._after) == {(2,)}
    assert beside._memories[1].guesses((3, 1, 4)) is not None
    assert not list(beside._memories[1].guesses((3, 1, 4)))


def test_rows_that_only_feed_teach_nothing():
    target, proposer, rows = admitted([[3, 1, 4], [1, 5, 9]])
    before = dict(proposer._memories[1]._after)
    batch = Batch(seqs=tuple(rows), start=(2, 0), feed=((4,), (1,)), draft_budget=(3, 0))
    draft = proposer.propose(batch)
    logits = torch.stack([score(target, row, draft, b) for b, row in enumerate(rows)])
    path, said = verify_greedy(draft, logits.argmax(-1))[0]
    proposer.commit(make_round(batch, draft, Scores(logits=logits), [path, ()], [said, ()]))
    assert proposer._memories[1]._after == before
    assert proposer._memories[0]._after[3, 1, 4].tokens == logits[0, 0].argsort(descending=True)[:8].tolist()


def test_others_guesses_teach_as_well():
    target, proposer, rows = admitted([[3, 1, 4]])
    batch = batch_of(rows, 4)
    proposer.propose(batch)
    draft = tree.one_hot_tree(torch.tensor([[11, 12, 13]]), torch.tensor([[-1, -1, 0]]), (3,))
    logits = score(target, rows[0], draft, 0)[None]
    proposer.commit(make_round(batch, draft, Scores(logits=logits), [()], [(int(logits[0, 0].argmax()),)]))
    known = proposer._memories[0]._after
    for node, ending in enumerate([(3, 1, 4), (3, 1, 4, 11), (3, 1, 4, 12), (1, 4, 11, 13)]):
        assert known[ending].tokens == logits[0, node].argsort(descending=True)[:8].tolist()


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(recycle, "_ROOM", 200)
    target, proposer, rows = admitted([[3, 1, 4]])
    live(proposer, target, rows, 12, 40)
    assert 100 < len(proposer._memories[0]._after) <= 200


def test_one_copy_from_the_device(monkeypatch):
    target, proposer, rows = admitted([[3, 1, 4], [1, 5, 9]])
    copies = []
    real = torch.Tensor.tolist
    batch = batch_of(rows, 9)
    draft = proposer.propose(batch)
    logits = torch.stack([score(target, row, draft, b) for b, row in enumerate(rows)])
    kept = verify_greedy(draft, logits.argmax(-1))
    round = make_round(batch, draft, Scores(logits=logits), [p for p, _ in kept], [s for _, s in kept])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: copies.append(tensor.shape) or real(tensor))
    for name in ("item", "__int__", "__float__", "__bool__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor is waited for"))
    proposer.commit(round)
    proposer.propose(batch_of(rows, 9))
    assert len(copies) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_is_the_targets_and_comes_sooner(temperature):
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=60, ignore_eos=True)
    prompt = "<|endoftext|>def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
    texts, taus = [], []
    for proposer in ("none", "recycle"):
        llm = LLM(proposer=proposer, k=12, dtype="float32", verifier="walk", max_num_seqs=2, max_model_len=128)
        (completion,) = llm.generate([prompt], params)
        texts.append(completion.token_ids)
        taus.append(completion.stats.tau)
    assert texts[0] == texts[1]
    assert taus[0] == 1 < 1.3 < taus[1]


def test_guesses_come_true_on_a_toy():
    chance = random.Random(2)
    prompts = [[chance.randrange(6) for _ in range(9)] for _ in range(5)]
    engine = make_engine(ToyTarget(spread=3.0), RecycleProposer, verifier="walk", k=6, rows=3)
    plain = make_engine(ToyTarget(spread=3.0), RecycleProposer, verifier="walk", k=0, rows=3)
    texts = [outputs(run(one, prompts, GREEDY, limit=40, ends=frozenset())) for one in (engine, plain)]
    assert texts[0] == texts[1]
    assert engine.stats.tau > 2


def test_it_takes_no_argument():
    setup = toy_setup(ToyTarget())
    assert isinstance(find_proposer("recycle", setup), RecycleProposer)
    with pytest.raises(OutriderError, match="write recycle"):
        find_proposer("recycle:5", setup)
