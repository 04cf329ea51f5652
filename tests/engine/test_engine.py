"""What the engine reads of a verdict."""

from __future__ import annotations

import torch

from outrider.core import tree
from outrider.core.types import Scores, Verdict
from outrider.engine import readback


def test_one_copy_from_a_device_reads_what_many_read():
    source = torch.Generator().manual_seed(3)
    draft = tree.chain(torch.randint(50000, (3, 4), generator=source), (4, 2, 0))
    verdict = Verdict(
        path=torch.tensor([[0, 1, -1, -1], [0, -1, -1, -1], [-1] * 4]),
        accepted=torch.tensor([2, 1, 0]),
        bonus=torch.randint(50000, (3,), generator=source),
        logprob=torch.rand(3, 5, generator=source).log(),
    )
    scores = Scores(logits=torch.empty(3, 5, 0), best=torch.tensor([[1] * 5, [1, 1, -1, 1, 1], [0] * 5]))
    one, many = readback._read_device(draft, verdict, scores), readback._read_host(draft, verdict, scores)
    assert many[2] == [True, False, True]
    assert [list(map(bool, one[2])), *one[:2], *one[3:]] == [many[2], *many[:2], *many[3:]]
