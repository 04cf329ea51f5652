"""Lookahead: the window and the n-gram pool, compared with the paper, and the value of window tokens."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from outrider.core import tree
from outrider.core.types import Scores
from outrider.drafting.propose.lookup import lookahead_window
from outrider.drafting.propose.lookup.lookahead import LookaheadProposer, Sizes, parse_lookahead_size
from outrider.drafting.propose.lookup.lookahead_window import NgramPool, SequenceWindow
from outrider.drafting.propose.registry import find_proposer
from outrider.errors import OutriderError
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_round, make_seq
from outrider.verify.rules import verify_greedy
from tests.drafting.propose.toy_rounds import admit, batch_of, check_fewer_passes, check_one_copy, commit, score, verify

SIZES = Sizes(window=3, size=4, guesses=2)
WINDOW_TOKENS = 3 * 3


def admitted(prompts, sizes=SIZES, vocab=12):
    """Return a target, a proposer, and sequences that are admitted to it."""
    target = ToyTarget(vocab=vocab, spread=3.0)
    proposer = LookaheadProposer(toy_setup(target), sizes)
    return target, proposer, admit(proposer, prompts)


def step(proposer, target, seqs, budget, *, cut=None):
    """Run a greedy round, in which `cut` draft tokens are verified. Return the draft and the window of sequence 0."""
    batch = batch_of(seqs, budget)
    draft = proposer.propose(batch)
    columns = list(proposer.windows[0].columns)
    verified = draft if cut is None else tree.cut(draft, (cut,) * len(seqs))
    commit(proposer, verify(target, batch, verified, with_best=True))
    return draft, columns


def path_of(draft, b, node):
    path = ()
    while node >= 0:
        path = (int(draft.tokens[b, node]), *path)
        node = int(draft.parent[b, node])
    return path


def ngrams_of(proposer, slot):
    """Return the n-gram pool of a sequence, by first token."""
    return proposer.windows[slot].pool.ngrams


def test_window_and_pool_follow_the_paper():
    """The first tokens of the columns are a chain. Each column hangs below its position, and gives an n-gram."""
    target, proposer, (seq,) = admitted([[3, 1, 4, 1, 5]])
    expected_pool = {}
    for _ in range(25):
        text = list(seq.token_ids)
        draft, columns = step(proposer, target, [seq], 30)
        paths = {path_of(draft, 0, node) for node in range(draft.width[0])}
        moved = []
        for position, column in enumerate(columns):
            path = (*(other[0] for other in columns[:position]), *column)
            assert path in paths
            context = [*text, *path]
            new = int(target.table[context[-2], context[-1]].argmax())
            others = [rest for rest in expected_pool.get(column[0], []) if rest != (*column[1:], new)]
            expected_pool[column[0]] = [(*column[1:], new), *others][: SIZES.guesses]
            moved.append((*column[1:], new))
        assert len(columns) == SIZES.window
        assert proposer.windows[0].columns == moved[len(seq.token_ids) - len(text) - 1 :]
        assert ngrams_of(proposer, 0) == expected_pool
    assert len(expected_pool) > 5


@pytest.mark.parametrize("budget", range(30))
def test_draft_stays_within_any_budget(budget):
    target, proposer, seqs = admitted([[3, 1, 4], [1, 5, 9, 2, 6]])
    for _ in range(12):
        draft, _ = step(proposer, target, seqs, budget)
        assert all(width <= budget for width in draft.width)
        assert all(a >= b for probs in draft.accept_prob or () for a, b in pairwise(probs))
        for b, width in enumerate(draft.width):
            pairs = list(zip(draft.parent[b, :width].tolist(), draft.tokens[b, :width].tolist(), strict=True))
            assert len(set(pairs)) == width, "a node is duplicated"
    proposer.propose(batch_of(seqs, budget))
    for window in proposer.windows.values():
        assert min(budget // 2 // 3, 3) <= len(window.columns) <= min(budget // 3, 3)


def test_small_budget_has_no_window():
    _, proposer, (seq,) = admitted([[3, 1, 4, 1, 5]])
    proposer.windows[0].pool.add((seq.token_ids[-1], 7, 8, 9))
    draft = proposer.propose(batch_of([seq], 2))
    assert draft.tokens.tolist() == [[7, 8]]
    assert proposer.windows[0].columns == []


def test_pool_keeps_the_latest_ngrams_of_a_token():
    pool = NgramPool(2)
    for ngram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)]:
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(2) == []


def test_pool_is_bounded(monkeypatch):
    monkeypatch.setattr(lookahead_window, "MAX_POOL_TOKENS", 8)
    pool = NgramPool(2)
    for first in range(30):
        pool.add((first, 1, 2))
    assert 4 < len(pool.ngrams) <= 8
    assert 29 in pool.ngrams


def test_window_moves_by_the_emitted_tokens():
    pool = NgramPool(2)
    window = SequenceWindow(pool, random.Random(0), [(1, 2), (3, 4), (5, 6)])
    window.move([7, 8, None], [9], emitted=2)
    assert window.columns == [(4, 8), (6, 9)]  # a column that was not scored gets a random token of the sequence
    assert pool.ngrams == {1: [(2, 7)], 3: [(4, 8)]}
    window.move([0, 0], [9], emitted=5)
    assert window.columns == []


def test_probability_of_window_tokens_is_accepted_tokens_per_window_token():
    """It rises if window tokens are left out, because the others then earn more."""
    target, proposer, (seq,) = admitted([[3, 1, 4]])

    def window_prob():
        """Return the probability that a sequence has whose pool is empty, so that it drafts window tokens alone."""
        new = make_seq([3, 1, 4], 1)
        proposer.admit(1, new.request)
        probs = proposer.propose(batch_of([new], 24)).accept_prob[0]
        assert probs == pytest.approx([probs[0]] * len(probs))
        return probs[0]

    before = len(seq.token_ids)
    rounds = 300
    for _ in range(rounds):
        step(proposer, target, [seq], 24)
    accepted = len(seq.token_ids) - before - rounds  # each round also emits a token of the target
    with_window = window_prob()
    assert with_window == pytest.approx(accepted / (rounds * WINDOW_TOKENS), rel=0.1)
    for _ in range(40):  # a planner that keeps the two likeliest draft tokens and no window token
        step(proposer, target, [seq], 24, cut=2)
    assert window_prob() > with_window


def test_window_tokens_are_found_in_changed_drafts():
    """They are found by their tokens, whatever their node in the verified tree is."""
    target, proposer, (seq,) = admitted([[3, 1, 4, 1, 5]])
    batch = batch_of([seq], 12)
    proposer.propose(batch)
    column = proposer.windows[0].columns[0]
    merged = tree.one_hot_tree(torch.tensor([[11, *column]]), torch.tensor([[-1, -1, 1, 2]]), (4,))
    logits = score(target, seq, merged, 0)[None]
    best = logits.argmax(-1)
    (path, emitted), *_ = verify_greedy(merged, best)
    proposer.commit(make_round(batch, merged, Scores(logits=logits, best=None), [path], [emitted]))
    assert ngrams_of(proposer, 0)[column[0]] == [(*column[1:], int(best[0, 4]))]


def test_sequences_share_no_ngrams():
    target, alone, seqs = admitted([[3, 1, 4]])
    _, in_batch, batch_seqs = admitted([[3, 1, 4], [1, 5, 9, 2, 6]])
    for _ in range(15):
        step(alone, target, seqs, WINDOW_TOKENS)
        step(in_batch, target, batch_seqs, WINDOW_TOKENS)
    alone_pool = ngrams_of(alone, 0)
    batch_pool = ngrams_of(in_batch, 0)
    tokens = seqs[0].token_ids
    batch_tokens = batch_seqs[0].token_ids
    assert tokens[: len(batch_tokens)] == batch_tokens[: len(tokens)]
    assert set(alone_pool) | {token for ngrams in alone_pool.values() for ngram in ngrams for token in ngram}
    in_batch.release(1)
    assert 1 not in in_batch.windows
    in_batch.admit(1, make_seq([2, 2], 1).request)
    assert not ngrams_of(in_batch, 1)
    assert batch_pool is ngrams_of(in_batch, 0)


def test_commit_makes_one_copy_from_the_device(monkeypatch):
    target, proposer, seqs = admitted([[3, 1, 4], [1, 5, 9]])
    for _ in range(5):
        step(proposer, target, seqs, 20)
    check_one_copy(monkeypatch, target, proposer, seqs, 20)


@pytest.mark.fast_cases("0.9")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_the_targets_with_fewer_passes(temperature):
    check_fewer_passes("lookahead:5x3x5", k=20, temperature=temperature, max_tokens=90, tau=1.1)


def test_sizes_are_parsed_from_the_argument():
    setup = toy_setup(ToyTarget())
    assert parse_lookahead_size("") == Sizes()
    assert parse_lookahead_size("9x3x4") == Sizes(window=9, size=3, guesses=4)
    for argument in ("9", "9x3", "9x1x4", "0x3x4", "9x3x0", "axbxc", "9x3x4x5"):
        with pytest.raises(OutriderError, match="write lookahead:"):
            find_proposer(f"lookahead:{argument}", setup)
    for argument in ("257x3x4", "9x33x4", "9x3x65", "9" * 5000 + "x3x4"):
        with pytest.raises(OutriderError, match="256x32x64 at most"):
            find_proposer(f"lookahead:{argument}", setup)


def test_window_of_one_token():
    _, proposer, (seq,) = admitted([[3, 1, 4, 1, 5]], replace(SIZES, window=1, size=2))
    assert proposer.propose(batch_of([seq], 12)).width == (1,)
