"""On a GPU the Triton rules and filters give the results of torch, in batches that share a sequence and that do not."""

from dataclasses import fields, replace

import pytest
import torch

from outrider.core.noise import PositionNoise
from outrider.core.types import Packed
from outrider.models.triton.fastest import fastest_sampling, fastest_verifier
from outrider.verify.rules import EXACT
from outrider.verify.sampling import SamplingTensors, target_probs
from tests.helpers.verification import KINDS, SHAPES, make_case
from tests.models.native.test_native_sampling import PARAMS, sampling_tensors

GPU = torch.device("cuda")


@pytest.mark.parametrize("batch_size", [3, 200])
@pytest.mark.parametrize("kinds", ["one-hot", "mixed"])
@pytest.mark.parametrize("name", EXACT)
def test_verdict_equals_torch_rule(name, kinds, batch_size):
    generator = torch.Generator().manual_seed(0)
    shape = SHAPES["tree" if EXACT[name].trees else "chain"]
    draft, p = make_case(shape, KINDS[kinds], batch_size=batch_size, vocab=40000, generator=generator, near=True)
    moved = {key: getattr(draft, key).to(GPU) for key in ("tokens", "parent", "count", "kind")}
    q = draft.q and Packed(values=draft.q.values.to(GPU), at=draft.q.at.to(GPU))
    draft = replace(draft, **moved, q=q)
    noise = PositionNoise(torch.arange(batch_size, device=GPU), draft.count)
    packed = Packed.of(p.to(GPU))
    verdict = fastest_verifier(EXACT[name], GPU).verify(draft, packed, noise)
    expected = EXACT[name].verify(draft, packed, noise)
    assert torch.equal(verdict.path, expected.path)
    assert torch.equal(verdict.bonus, expected.bonus)
    torch.testing.assert_close(verdict.logprob, expected.logprob)


@pytest.mark.parametrize("nodes", [1, 30])
def test_probs_equal_torch(nodes):
    logits = torch.randn(len(PARAMS), nodes, 40000, generator=torch.Generator().manual_seed(0)).to(GPU) * 3
    on_cpu = sampling_tensors(PARAMS, 40000)
    tensors = [field.name for field in fields(SamplingTensors) if isinstance(getattr(on_cpu, field.name), torch.Tensor)]
    sampling = replace(on_cpu, **{name: getattr(on_cpu, name).to(GPU) for name in tensors})
    probs = fastest_sampling(GPU).probs(logits, sampling, slice(None))
    torch.testing.assert_close(probs, target_probs(logits, sampling, slice(None)), atol=1e-4, rtol=1e-3)
