"""Lookahead: the window's iteration and the pool against a plain reading of the paper, and what riders are worth."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Scores
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.propose.lookup import lookahead
from outrider.propose.lookup.lookahead import LookaheadProposer, Sizes
from outrider.propose.registry import find_proposer
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_round, make_row
from outrider.verify.rules import verify_greedy
from tests.helpers.engines import make_engine, outputs, run

SHAPE = Sizes(window=3, size=4, guesses=2)
RIDERS = 3 * 3


def batch_of(rows, budget):
    feeds = tuple((row.token_ids[-1],) for row in rows)
    starts = tuple(len(row.token_ids) - 1 for row in rows)
    return Batch(seqs=tuple(rows), start=starts, feed=feeds, draft_budget=(budget,) * len(rows))


def admitted(prompts, shape=SHAPE, vocab=12):
    target = ToyTarget(vocab=vocab, spread=3.0)
    proposer = LookaheadProposer(toy_setup(target), shape)
    rows = [make_row(list(prompt), slot) for slot, prompt in enumerate(prompts)]
    for row in rows:
        proposer.admit(row.slot, row.request)
    return target, proposer, rows


def score(target, row, draft, b):
    """[1 + N, V] what a toy says at each node of row b."""
    endings = [tuple(row.token_ids[-2:])]
    for token, parent in zip(draft.tokens[b].tolist(), draft.parent[b].tolist(), strict=True):
        endings.append((endings[parent + 1][1], token))
    return torch.stack([target.table[ending] for ending in endings])


def step(proposer, target, rows, budget, *, cut=None):
    """One greedy round, of which `cut` guesses are verified; the draft that was proposed, and row 0's window."""
    batch = batch_of(rows, budget)
    draft = proposer.propose(batch)
    window = list(proposer._states[0].columns)
    verified = draft if cut is None else tree.cut(draft, (cut,) * len(rows))
    logits = torch.stack([score(target, row, verified, b) for b, row in enumerate(rows)])
    best = logits.argmax(-1)
    kept = verify_greedy(verified, best)
    paths, said = [path for path, _ in kept], [tokens for _, tokens in kept]
    proposer.commit(make_round(batch, verified, Scores(logits=logits, best=best), paths, said))
    for row, tokens in zip(rows, said, strict=True):
        row.token_ids += tokens
    return draft, window


def path_of(draft, b, node):
    path = ()
    while node >= 0:
        path = (int(draft.tokens[b, node]), *path)
        node = int(draft.parent[b, node])
    return path


def test_window_and_pool_are_the_papers():
    """Level 0 of the window is a line, each column hangs below its place in it, and what follows makes n-grams."""
    target, proposer, (row,) = admitted([[3, 1, 4, 1, 5]])
    state, pool = proposer._states[0], {}
    for _ in range(25):
        text = list(row.token_ids)
        draft, window = step(proposer, target, [row], 30)
        paths = {path_of(draft, 0, node) for node in range(draft.width[0])}
        moved = []
        for j, column in enumerate(window):
            path = (*(other[0] for other in window[:j]), *column)
            assert path in paths
            seen = [*text, *path]
            new = int(target.table[seen[-2], seen[-1]].argmax())
            others = [rest for rest in pool.get(column[0], []) if rest != (*column[1:], new)]
            pool[column[0]] = [(*column[1:], new), *others][: SHAPE.guesses]
            moved.append((*column[1:], new))
        assert len(window) == SHAPE.window
        assert state.columns == moved[len(row.token_ids) - len(text) - 1 :]
        assert state.pool._after == pool
    assert len(pool) > 5


@pytest.mark.parametrize("budget", range(30))
def test_budgets_of_every_size(budget):
    target, proposer, rows = admitted([[3, 1, 4], [1, 5, 9, 2, 6]])
    for _ in range(12):
        draft, _ = step(proposer, target, rows, budget)
        assert all(width <= budget for width in draft.width)
        assert all(a >= b for row in draft.accept_prob or () for a, b in pairwise(row))
        for b, width in enumerate(draft.width):
            pairs = list(zip(draft.parent[b, :width].tolist(), draft.tokens[b, :width].tolist(), strict=True))
            assert len(set(pairs)) == width, "a guess is made twice"
        for row in rows:
            guesses = len(proposer._open[row.slot][0].tokens)
            columns = len(proposer._whole[row.slot].tokens)
            assert guesses <= columns <= guesses + RIDERS
    batch = batch_of(rows, budget)
    proposer.propose(batch)
    for state in proposer._states.values():
        assert min(budget // 2 // 3, 3) <= len(state.columns) <= min(budget // 3, 3)


def test_too_small_a_budget_guesses_from_the_pool_alone():
    _, proposer, (row,) = admitted([[3, 1, 4, 1, 5]])
    proposer._states[0].pool.add((row.token_ids[-1], 7, 8, 9))
    draft = proposer.propose(batch_of([row], 2))
    assert draft.tokens.tolist() == [[7, 8]]
    assert proposer._states[0].columns == []


def test_the_latest_ngram_stands_first_and_few_are_kept():
    pool = lookahead._Pool(2)
    for ngram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)]:
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(2) == []


def test_pool_is_bounded(monkeypatch):
    monkeypatch.setattr(lookahead, "_ROOM", 8)
    pool = lookahead._Pool(2)
    for first in range(30):
        pool.add((first, 1, 2))
    assert 4 < len(pool._after) <= 8
    assert 29 in pool._after


def test_the_window_moves_as_far_as_the_text():
    pool = lookahead._Pool(2)
    state = lookahead._State(pool, random.Random(0), [(1, 2), (3, 4), (5, 6)])
    state.move([7, 8, None], [9], emitted=2)
    assert state.columns == [(4, 8), (6, 9)]  # what was not scored goes on somehow
    assert pool._after == {1: [(2, 7)], 3: [(4, 8)]}
    state.move([0, 0], [9], emitted=5)
    assert state.columns == []


def test_riders_are_worth_what_they_earn():
    """Their chance is guesses that came true by riders scored; it rises where they are left out and missed."""
    target, proposer, rows = admitted([[3, 1, 4]])
    draft, _ = step(proposer, target, rows, 24)
    assert draft.accept_prob == (pytest.approx([lookahead._WORTH] * draft.width[0]),)
    earned, scored = 0.0, RIDERS
    for _ in range(60):
        before = len(rows[0].token_ids)
        step(proposer, target, rows, 24)
        true = len(proposer._whole[0].path(rows[0].token_ids[before:]))
        earned, scored = earned * lookahead._MEMORY + true, scored * lookahead._MEMORY + RIDERS
    riding = proposer._worth()
    assert riding == pytest.approx((earned + lookahead._TRUST * lookahead._WORTH) / (scored + lookahead._TRUST))
    for _ in range(40):  # a planner that takes the best two guesses and no rider
        step(proposer, target, rows, 24, cut=2)
    assert proposer._worth() > riding


def test_cut_and_merged_drafts_are_understood():
    """Riders are found by their tokens, wherever they stand."""
    target, proposer, (row,) = admitted([[3, 1, 4, 1, 5]])
    batch = batch_of([row], 12)
    proposer.propose(batch)
    column = proposer._states[0].columns[0]
    other = tree.one_hot_tree(torch.tensor([[11, *column]]), torch.tensor([[-1, -1, 1, 2]]), (4,))
    logits = score(target, row, other, 0)[None]
    best = logits.argmax(-1)
    (path, said), *_ = verify_greedy(other, best)
    proposer.commit(make_round(batch, other, Scores(logits=logits, best=None), [path], [said]))
    assert proposer._states[0].pool._after[column[0]] == [(*column[1:], int(best[0, 4]))]


def test_rows_do_not_share():
    target, alone, rows = admitted([[3, 1, 4]])
    _, beside, both = admitted([[3, 1, 4], [1, 5, 9, 2, 6]])
    for _ in range(15):
        step(alone, target, rows, RIDERS)
        step(beside, target, both, RIDERS)
    mine, its = alone._states[0].pool._after, beside._states[0].pool._after
    assert rows[0].token_ids[: len(both[0].token_ids)] == both[0].token_ids[: len(rows[0].token_ids)]
    assert set(mine) | {token for ngrams in mine.values() for ngram in ngrams for token in ngram}
    beside.release(1)
    assert 1 not in beside._states
    beside.admit(1, make_row([2, 2], 1).request)
    assert not beside._states[1].pool._after
    assert its is beside._states[0].pool._after


def test_one_copy_from_the_device(monkeypatch):
    target, proposer, rows = admitted([[3, 1, 4], [1, 5, 9]])
    for _ in range(5):
        step(proposer, target, rows, 20)
    batch = batch_of(rows, 20)
    draft = proposer.propose(batch)
    logits = torch.stack([score(target, row, draft, b) for b, row in enumerate(rows)])
    kept = verify_greedy(draft, logits.argmax(-1))
    round = make_round(batch, draft, Scores(logits=logits), [p for p, _ in kept], [s for _, s in kept])
    copies, real = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: copies.append(tensor.shape) or real(tensor))
    for name in ("item", "__int__", "__float__", "__bool__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor is waited for"))
    proposer.commit(round)
    proposer.propose(batch_of(rows, 20))
    assert len(copies) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_is_the_targets_and_comes_sooner(temperature):
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=90, ignore_eos=True)
    prompt = "<|endoftext|>def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
    texts, taus = [], []
    for proposer in ("none", "lookahead:5x3x5"):
        llm = LLM(proposer=proposer, k=20, dtype="float32", verifier="walk", max_num_seqs=2, max_model_len=128)
        (completion,) = llm.generate([prompt], params)
        texts.append(completion.token_ids)
        taus.append(completion.stats.tau)
    assert texts[0] == texts[1]
    assert taus[0] == 1 < 1.1 < taus[1]


def test_guesses_come_true_on_a_toy():
    chance = random.Random(2)
    prompts = [[chance.randrange(6) for _ in range(9)] for _ in range(5)]
    params, texts = SamplingParams(temperature=0.0), []
    for k in (0, 12):
        engine = make_engine(ToyTarget(spread=3.0), lambda s: LookaheadProposer(s, SHAPE), verifier="walk", k=k, rows=3)
        texts.append(outputs(run(engine, prompts, params, limit=40, ends=frozenset())))
    assert texts[0] == texts[1]
    assert engine.stats.tau > 1.5


def test_shapes_by_name():
    setup = toy_setup(ToyTarget())
    assert find_proposer("lookahead", setup)._shape == Sizes()
    assert find_proposer("lookahead:9x3x4", setup)._shape == Sizes(window=9, size=3, guesses=4)
    for wrong in ("9", "9x3", "9x1x4", "0x3x4", "9x3x0", "axbxc", "9x3x4x5"):
        with pytest.raises(OutriderError, match="write lookahead:"):
            find_proposer(f"lookahead:{wrong}", setup)
    for large in ("257x3x4", "9x33x4", "9x3x65", "9" * 5000 + "x3x4"):
        with pytest.raises(OutriderError, match="256x32x64 at most"):
            find_proposer(f"lookahead:{large}", setup)


def test_shapes_differ_in_what_they_ride():
    _, proposer, (row,) = admitted([[3, 1, 4, 1, 5]], replace(SHAPE, window=1, size=2))
    assert proposer.propose(batch_of([row], 12)).width == (1,)
