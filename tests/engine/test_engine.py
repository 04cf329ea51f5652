"""Tests of how the engine copies a verdict to the host."""

from __future__ import annotations

import torch

from outrider.core import tree
from outrider.core.types import Scores, Verdict
from outrider.engine import readback


def test_single_device_copy_equals_separate_copies():
    generator = torch.Generator().manual_seed(3)
    draft = tree.chain(torch.randint(50000, (3, 4), generator=generator), (4, 2, 0))
    verdict = Verdict(
        path=torch.tensor([[0, 1, -1, -1], [0, -1, -1, -1], [-1] * 4]),
        accepted=torch.tensor([2, 1, 0]),
        bonus=torch.randint(50000, (3,), generator=generator),
        logprob=torch.rand(3, 5, generator=generator).log(),
    )
    scores = Scores(logits=torch.empty(3, 5, 0), best=torch.tensor([[1] * 5, [1, 1, -1, 1, 1], [0] * 5]))
    single = readback._read_device(draft, verdict, scores)
    separate = readback._read_host(draft, verdict, scores)
    assert separate[2] == [True, False, True]
    assert [list(map(bool, single[2])), *single[:2], *single[3:]] == [separate[2], *separate[:2], *separate[3:]]
