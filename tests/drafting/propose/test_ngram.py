"""Tests of the n-gram proposer: what it copies, and what it learns."""

from outrider.core.types import Scores
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_round
from tests.drafting.propose.toy_rounds import admit, batch_of, commit


def draft_of(text, budget=3, **sizes):
    """Return the draft tokens and parents after a text."""
    proposer = NgramProposer(toy_setup(ToyTarget(vocab=16)), **sizes)
    draft = proposer.propose(batch_of(admit(proposer, [text]), budget))
    count = draft.width[0]
    return draft.tokens[0, :count].tolist(), draft.parent[0, :count].tolist()


def test_copies_what_followed_the_last_ngram():
    assert draft_of([1, 2, 3, 4, 5, 9, 1, 2, 3]) == ([4, 5, 9], [-1, 0, 1])


def test_longest_ngram_comes_first():
    tokens, _ = draft_of([1, 2, 7, 8, 2, 9, 8, 1, 2], budget=1)
    assert tokens == [7]


def test_latest_occurrence_comes_first():
    tokens, parents = draft_of([1, 2, 7, 1, 2, 8, 1, 2], budget=8)
    first = [token for token, parent in zip(tokens, parents, strict=True) if parent < 0]
    assert first[0] == 8
    assert 7 in first


def test_a_repeated_end_is_continued_periodically():
    assert draft_of([5, 6, 5, 6, 5], budget=4) == ([6, 5, 6, 5], [-1, 0, 1, 2])


def test_a_text_without_repetition_has_no_draft():
    assert draft_of([1, 2, 3, 4]) == ([], [])
    assert draft_of([1, 2, 3, 1, 9, 3], shortest=3) == ([], [])


def test_a_wrong_token_may_lie_between_the_ngram_and_its_continuation():
    tokens, _ = draft_of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 9, 5], shortest=2, longest=3)
    assert tokens[0] == 6


def test_tokens_that_are_always_rejected_are_drafted_no_more():
    proposer = NgramProposer(toy_setup(ToyTarget(vocab=16)))
    (seq,) = seqs = admit(proposer, [[1, 2, 1, 2, 1]])
    widths = []
    for _ in range(40):
        batch = batch_of(seqs, 3)
        draft = proposer.propose(batch)
        widths.append(draft.width[0])
        commit(proposer, make_round(batch, draft, Scores(logits=None), [()], [(3 + len(widths) % 12,)]))
        seq.token_ids[-1:] = [1, 2]
    assert widths[0] == 3
    assert widths[-1] < 3
