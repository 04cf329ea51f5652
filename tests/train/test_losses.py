"""The losses of training."""

import math

import pytest
import torch

from outrider.errors import OutriderError
from outrider.train.loss import chunked
from outrider.train.loss.losses import LOSSES, Distributions, length_loss, parse
from tests.train.expected_losses import expected_loss, expected_rejections


def _distributions(*, draft_vocab=7, vocab=7, seed=0):
    """Random target distributions over `vocab` tokens, and draft distributions over the first `draft_vocab` of them."""
    generator = torch.Generator().manual_seed(seed)
    p = (torch.randn(5, vocab, generator=generator) * 2).softmax(-1)[:, :draft_vocab]
    return Distributions(p, (torch.randn(5, draft_vocab, generator=generator) * 2).log_softmax(-1))


@pytest.mark.parametrize("draft_vocab", [7, 4])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_equals_its_definition(name, draft_vocab):
    dist = _distributions(draft_vocab=draft_vocab)
    pairs = zip(dist.p.tolist(), dist.log_q.exp().tolist(), strict=True)
    expected = [expected_loss(name, p, q) for p, q in pairs]
    assert LOSSES[name](dist).tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["kl", "kl2", "rkl", "jsd", "tv", "nla", "hybrid"])
def test_loss_of_equal_distributions_is_zero(name):
    p = _distributions().p
    assert LOSSES[name](Distributions(p, p.log())).tolist() == pytest.approx([0] * 5, abs=1e-5)


def test_identities_between_losses():
    dist = _distributions()
    swapped = Distributions(dist.log_q.exp(), dist.p.log())
    assert torch.allclose(LOSSES["rkl"](dist), LOSSES["kl"](swapped), atol=1e-5)
    assert torch.allclose(LOSSES["jsd"](dist), LOSSES["jsd"](swapped), atol=1e-6)
    assert LOSSES["jsd"](dist).max() < math.log(2)
    assert torch.equal(LOSSES["tv"](dist), 1 - dist.alpha)
    entropy = -(dist.p * dist.p.log()).sum(-1)
    assert torch.allclose(LOSSES["ce"](dist) - LOSSES["kl"](dist), entropy, atol=1e-5)


def test_cross_entropy_and_kl_have_the_same_gradient():
    gradients = []
    for name in ("ce", "kl"):
        logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(4)).requires_grad_()
        LOSSES[name](Distributions(_distributions().p, logits.log_softmax(-1))).sum().backward()
        gradients.append(logits.grad)
    assert torch.allclose(*gradients, atol=1e-6)


def test_alpha_excludes_tokens_outside_the_draft_vocabulary():
    p = _distributions(draft_vocab=4).p
    best = Distributions(p, (p / p.sum(-1, keepdim=True)).log())
    assert torch.allclose(best.alpha, p.sum(-1), atol=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_of_extreme_distributions_are_finite(name):
    logits = torch.tensor([[80.0, -80.0, 0.0]], requires_grad=True)
    LOSSES[name](Distributions(torch.tensor([[0.0, 1.0, 0.0]]), logits.log_softmax(-1))).sum().backward()
    assert logits.grad.isfinite().all()


def test_length_loss_is_the_expected_number_of_rejected_draft_tokens():
    alphas = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    exists = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    loss = length_loss(alphas, exists, [1.0] * 4)
    columns = [alphas[:, c][exists[:, c]].tolist() for c in range(3)]
    assert loss.tolist() == pytest.approx([expected_rejections(column) for column in columns], abs=1e-6)
    loss.sum().backward()
    assert not alphas.grad[~exists].any()


def test_length_loss_has_a_gradient_at_alpha_zero():
    alphas = torch.tensor([[1.0], [0.0], [0.5]], requires_grad=True)
    length_loss(alphas, torch.ones(3, 1, dtype=torch.bool), [1.0] * 3).sum().backward()
    assert alphas.grad.flatten().tolist() == pytest.approx([-1.0, -1.5, 0.0])


@pytest.mark.parametrize("text", [*sorted(LOSSES), "ce:0.3,tv:0.7", "length", "kl:0.5,length:2"])
@pytest.mark.parametrize("chunk_logits", [14, 1 << 20])
def test_chunked_loss_equals_loss_without_chunks(chunk_logits, text, monkeypatch):
    """The loss, alpha and the gradient of the logits are the same."""
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", {"cpu": chunk_logits})
    losses = parse(text)
    weights = torch.arange(1.0, 6.0)

    def run(compute):
        logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(4)).requires_grad_()
        loss, alpha = compute(logits)
        total = (loss * weights).sum()
        (total + alpha.square().sum() if "length" in losses else total).backward()
        return loss, alpha, logits.grad

    def without_chunks(logits):
        dist = Distributions(_distributions().p, logits.log_softmax(-1))
        terms = [weight * LOSSES[name](dist) for name, weight in losses.items() if name != "length"]
        return sum(terms, torch.zeros(5)), dist.alpha

    actual = run(lambda logits: chunked.chunked_loss(logits, _distributions().p, losses))
    expected = run(without_chunks)
    assert actual[1].requires_grad == ("length" in losses)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert torch.allclose(actual_tensor, expected_tensor, atol=1e-6)


def test_parse_losses_with_weights():
    assert parse("ce") == {"ce": 1.0}
    assert parse("ce:0.1, tv:0.9,length") == {"ce": 0.1, "tv": 0.9, "length": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nll", "loss 'nll' is unknown; use ce, kl"),
        ("", "loss '' is unknown"),
        ("ce:x", "'x' of loss ce is not a number; write ce:0.5"),
        ("ce:0", "not a finite number above 0"),
        ("ce:-1", "not a finite number above 0"),
        ("ce:inf", "not a finite number above 0"),
        ("ce:nan", "not a finite number above 0"),
        ("ce,tv,ce", "loss ce occurs twice in 'ce,tv,ce'"),
    ],
)
def test_parse_rejects_invalid_losses(text, message):
    with pytest.raises(OutriderError, match=message):
        parse(text)
