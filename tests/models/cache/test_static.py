"""Tests of the static cache: which entries a pass sets to zero."""

import torch

from outrider.core import tree
from outrider.core.types import Batch, DraftBudget, Scores, SequenceState
from outrider.models.cache.static import StaticCache

CPU = torch.device("cpu")
NO_DRAFT = tree.empty(1, CPU)


def write(cache, text, *, start, drafted=0):
    """Write ones for the tokens of a text from `start` on and for draft tokens. Return the batch."""
    feed = tuple(text[start:])
    batch = Batch(seqs=(SequenceState.of(text),), start=(start,), feed=(feed,), budget=DraftBudget((drafted,)))
    draft = tree.chain(torch.ones(1, drafted, dtype=torch.int64), (drafted,)) if drafted else NO_DRAFT
    ones = torch.ones(1, len(feed) + drafted, 2)
    cache.write(0, cache.stage(batch, draft), ones, ones)
    return batch


def commit(cache, batch):
    cache.commit(tree.prefill_round(batch, NO_DRAFT, Scores(logits=torch.zeros(1, 1, 9))))


def filled(cache):
    """Return how many entries of slot 0 are not zero."""
    keys, values = cache.entries(0, [0], 0, 16)
    assert torch.equal(keys, values)
    return int(keys.any(-1).sum())


def test_entries_of_a_committed_pass_stay():
    """A shorter draft after a longer one sets nothing to zero: its entries are finite."""
    cache = StaticCache(slots=1, capacity=16, device=CPU)
    cache.admit(0, [1, 2, 3])
    commit(cache, write(cache, [1, 2, 3], start=0, drafted=6))
    assert filled(cache) == 9
    write(cache, [1, 2, 3, 4], start=3, drafted=1)
    assert filled(cache) == 9


def test_entries_of_other_passes_are_set_to_zero():
    """They may be NaN if the pass was repeated, because its logits were not finite, or is of another sequence."""
    cache = StaticCache(slots=1, capacity=16, device=CPU)
    cache.admit(0, [1, 2, 3])
    write(cache, [1, 2, 3], start=0, drafted=6)
    commit(cache, write(cache, [1, 2, 3], start=0))  # the same pass without a draft
    assert filled(cache) == 3
    write(cache, [1, 2, 3, 4], start=3, drafted=6)
    cache.admit(0, [5])
    write(cache, [5], start=0)
    assert filled(cache) == 1
