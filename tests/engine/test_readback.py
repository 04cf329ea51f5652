"""Tests of how the engine copies a verdict to the host."""

import torch

from outrider.core import devices, tree
from outrider.core.types import Batch, DraftBudget, Scores, SequenceState, Verdict
from outrider.engine.readback import read_verdict


def test_single_copy_from_a_device_equals_separate_copies(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    draft = tree.chain(torch.randint(50000, (3, 4), generator=generator), (4, 2, 0))
    verdict = Verdict(
        path=torch.tensor([[0, 1, -1, -1], [0, -1, -1, -1], [-1] * 4]),
        accepted=torch.tensor([2, 1, 0]),
        bonus=torch.randint(50000, (3,), generator=generator),
        logprob=torch.rand(3, 5, generator=generator).log(),
    )
    scores = Scores(logits=torch.empty(3, 5, 0), best=torch.tensor([[1] * 5, [1, 1, -1, 1, 1], [0] * 5]))
    seqs = tuple(SequenceState.of((1,)) for _ in range(3))
    batch = Batch(seqs=seqs, start=(0,) * 3, feed=((1,),) * 3, budget=DraftBudget((4,) * 3))
    separate = read_verdict(batch, draft, scores, verdict)
    monkeypatch.setattr(devices, "is_cpu", lambda device: False)
    single = read_verdict(batch, draft, scores, verdict)
    assert separate.failed == (False, True, False)
    assert [len(tokens) for tokens in separate.emitted] == [3, 0, 1]
    for name in ("failed", "path", "emitted", "sampled_logprob"):
        assert getattr(single, name) == getattr(separate, name)
