"""Every backend packs the columns of a pass in the same way."""

import random

import pytest
import torch

from outrider.core import tree
from outrider.core.cache import lay_out, node_order, pack
from outrider.core.types import Batch, DraftBudget, SequenceState
from outrider.models.native.batch_columns import columns_of
from outrider.models.torch.static_pass import Bucket, round_integers

CPU = torch.device("cpu")


def batch_of(*rows):
    """Return a batch of rows (slot, start, feed)."""
    seqs = tuple(SequenceState.of((1,) * (start + len(feed)), slot=slot) for slot, start, feed in rows)
    starts = tuple(start for _, start, _ in rows)
    return Batch(seqs=seqs, start=starts, feed=tuple(feed for *_, feed in rows), budget=DraftBudget((9,) * len(rows)))


def test_feed_comes_before_draft_tokens():
    first, second = pack(batch_of((3, 0, (5, 6, 7)), (1, 4, (8,))), (0, 2), -1)
    assert (first.begin, first.end, first.start, first.nodes) == (0, 3, 0, 0)
    assert (second.begin, second.end, second.start, second.nodes, second.base) == (3, 6, 4, 2, 5)
    assert [list(span.outputs) for span in (first, second)] == [[2], [3, 4, 5]]
    assert node_order([first, second], 3) == [0, 0, 0, 1, 2, 3]


def test_only_nodes_from_the_first_one_on():
    (span,) = pack(batch_of((0, 4, (8,))), (3,), 1)
    assert (span.begin, span.end, span.start, span.nodes, span.first) == (0, 2, 6, 2, 1)
    assert list(span.outputs) == [0, 1]


@pytest.mark.parametrize("first", [-1, 0, 1])
@pytest.mark.parametrize("chain", [True, False])
def test_backends_compute_the_same_columns(first, chain):
    rng = random.Random(first)
    for _ in range(20):
        count = rng.randint(1, 4)
        slots = rng.sample(range(4), count)
        rows = [(slot, rng.randrange(5), tuple(rng.choices(range(50), k=rng.choice([1, 1, 3])))) for slot in slots]
        batch = batch_of(*rows)
        width = (2, *(rng.randrange(4) for _ in slots[1:]))
        size = max(width)
        tokens = torch.tensor([rng.choices(range(50), k=size) for _ in slots])
        parents = torch.tensor([[rng.randrange(-1, node) if node else -1 for node in range(size)] for _ in slots])
        draft = tree.chain(tokens, width) if chain else tree.one_hot_tree(tokens, parents, width)
        layout = lay_out(batch, draft, first, CPU)
        columns, spans, order = columns_of(batch, draft, first, vocab=50)
        assert layout.tokens.tolist() == columns.token.tolist()
        assert layout.positions.tolist() == columns.position.tolist()
        assert layout.keep.tolist() == columns.output_columns.tolist()
        assert (None if layout.nodes is None else layout.nodes.flatten().tolist()) == order
        integers = round_integers(Bucket(rows=4, columns=6, length=32), batch, draft, first, spare=31)
        entries = [integers[24 + 6 * span.slot :][: span.end - span.begin] for span in spans]
        assert [entry for row in entries for entry in row] == columns.entry.tolist()
