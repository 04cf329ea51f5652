"""Losses, training steps, and the drafts that can be trained."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core.params import SamplingParams
from outrider.core.types import SharedWeights
from outrider.errors import OutriderError
from outrider.heads.formats.base import TargetInfo
from outrider.heads.formats.registry import format_of
from outrider.heads.hidden_states import apply_final_norm
from outrider.heads.store import import_head, make_module
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.train.loss import chunked
from outrider.train.loss.losses import LOSSES, Distributions, length_loss, parse
from outrider.train.loss.steps import Step
from outrider.train.model.init_weights import init_weights, principal_directions
from outrider.train.model.presets import KINDS, Sizes, describe
from outrider.train.model.trainee import make_trainee
from outrider.train.settings import DRAFT, Settings
from outrider.train.trainer import StepStats, Trainer, lr_factor
from tests.helpers import engines, tiny, train_setup
from tests.helpers.train_setup import (
    NANO,
    ConstantTrainee,
    make_batch,
    make_sample,
    make_settings,
    make_setup,
    record_gradients,
    scatter,
    single_sequence,
)


@pytest.fixture(scope="module")
def nano():
    return train_setup.load_target()


# Losses


def _distributions(*, draft_vocab=7, vocab=7, seed=0):
    """Random target distributions over `vocab` tokens, and draft distributions over the first `draft_vocab` of them."""
    generator = torch.Generator().manual_seed(seed)
    p = (torch.randn(5, vocab, generator=generator) * 2).softmax(-1)[:, :draft_vocab]
    return Distributions(p, (torch.randn(5, draft_vocab, generator=generator) * 2).log_softmax(-1))


def _expected_loss(name, p, q):
    """A loss by its definition, for one pair of distributions as lists of floats."""
    alpha = sum(map(min, p, q))
    total = sum(p)
    p = [x / total for x in p]

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    def softened(a):
        roots = [math.sqrt(x) for x in a]
        return [root / sum(roots) for root in roots]

    middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    weight = math.exp(-3 * alpha)
    return {
        "ce": -sum(x * math.log(y) for x, y in zip(p, q, strict=True)),
        "kl": kl(p, q),
        "kl2": 4 * kl(softened(p), softened(q)),
        "rkl": kl(q, p),
        "jsd": (kl(p, middle) + kl(q, middle)) / 2,
        "tv": 1 - alpha,
        "nla": -math.log(alpha),
        "hybrid": weight * kl(p, q) + (1 - weight) * (1 - alpha),
    }[name]


@pytest.mark.parametrize("draft_vocab", [7, 4])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_equals_its_definition(name, draft_vocab):
    dist = _distributions(draft_vocab=draft_vocab)
    pairs = zip(dist.p.tolist(), dist.log_q.exp().tolist(), strict=True)
    expected = [_expected_loss(name, p, q) for p, q in pairs]
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


def _expected_rejections(alphas):
    """The expected number of rejected draft tokens, by enumeration of all outcomes of a chain."""
    total = 0.0
    for accepted in product((True, False), repeat=len(alphas)):
        probability = math.prod(a if ok else 1 - a for a, ok in zip(alphas, accepted, strict=True))
        first_rejected = next((i for i, ok in enumerate(accepted) if not ok), len(alphas))
        total += probability * (len(alphas) - first_rejected)
    return total


def test_length_loss_is_the_expected_number_of_rejected_draft_tokens():
    alphas = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    exists = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    loss = length_loss(alphas, exists, [1.0] * 4)
    columns = [alphas[:, c][exists[:, c]].tolist() for c in range(3)]
    assert loss.tolist() == pytest.approx([_expected_rejections(column) for column in columns], abs=1e-6)
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
    monkeypatch.setattr(chunked, "_CHUNK_LOGITS", {"cpu": chunk_logits})
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


# Steps


def _expected_step_loss(texts, logits, losses, decay):
    """The loss of a step by its definition, column by column, for the `logits` [steps, V] of all columns."""
    total = 0.0
    num_columns = 0
    target_probs = scatter(texts.target_probs, texts.loss_mask)
    decay_sum = sum(decay**step for step in range(len(logits)))
    for b in range(len(texts.loss_mask)):
        length = int(texts.loss_mask[b].sum())
        num_columns += length
        for c in range(length):
            alphas = []
            for step in range(min(len(logits), length - c)):
                p = target_probs[b, c + step].tolist()
                q = logits[step].softmax(-1).tolist()
                alphas.append(sum(map(min, p, q)))
                terms = [weight * _expected_loss(name, p, q) for name, weight in losses.items() if name != "length"]
                total += decay**step * sum(terms)
            total += decay_sum * losses.get("length", 0) * _expected_rejections(alphas)
    return total / decay_sum / num_columns


@pytest.mark.parametrize("text", ["ce", "kl:0.3,tv:0.7", "length", "ce:0.5,length:2"])
def test_step_loss_is_the_mean_over_columns(text):
    texts = make_batch(vocab=11)
    losses = parse(text)
    trainee = ConstantTrainee(3, 11)
    trainer = Trainer(trainee, losses=losses, steps=3, decay=0.8, lr=1e-3)
    logits = trainee.module.weight.detach().clone()
    stats = trainer.train([texts], progress=0.5)
    assert stats.columns == 19
    assert stats.loss == pytest.approx(_expected_step_loss(texts, logits, losses, 0.8), rel=1e-3)


@pytest.mark.parametrize("kind", ["mtp", "medusa"])
def test_micro_batches_and_padding_do_not_change_the_gradient(kind, nano):
    batch = make_batch()
    with_other_padding = replace(
        batch,
        aux_states=torch.where(batch.loss_mask[..., None, None], batch.aux_states, 1e3),
        tokens=torch.where(torch.nn.functional.pad(batch.loss_mask, (1, 0), value=True), batch.tokens, 5),
    )
    single_sequences = [single_sequence(batch, b, length) for b, length in enumerate((9, 6, 4))]
    results = []
    for micro_batches in ([batch], [with_other_padding], single_sequences):
        torch.manual_seed(7)
        trainee = make_trainee(kind, make_settings(), make_setup(nano), nano.tables)
        trainer = Trainer(trainee, losses=parse("ce"), steps=trainee.steps, decay=0.8, lr=1e-3)
        gradients = record_gradients(trainer)
        stats = trainer.train(micro_batches, progress=0.5)
        results.append((stats.loss, gradients[0]))
    (loss, gradient), *other_results = results
    for other_loss, other_gradient in other_results:
        assert other_loss == pytest.approx(loss, rel=1e-3)
        assert torch.nn.functional.cosine_similarity(gradient, other_gradient, dim=0) > 0.999


class _PartialChains(ConstantTrainee):
    """A trainee with three equal chains, of which only some have a second draft token."""

    def __init__(self, has_second):
        super().__init__(2, 11)
        self._has_second = torch.tensor(has_second)

    def unroll(self, texts, steps):
        yield next(super().unroll(texts, 1))
        count = int(self._has_second.sum())
        target = texts.target_probs[:1].expand(count, -1)
        logits = self.module.weight[1].expand(count, -1)
        yield Step(logits=logits, target=target, loss_mask=self._has_second[None], weight=3 / count)


@pytest.mark.parametrize("text", ["ce", "length", "tv:0.5,length:2"])
def test_chosen_chains_represent_all_chains(text):
    texts = make_batch(lengths=(3,), vocab=11)
    texts = replace(texts, target_probs=texts.target_probs[:1].expand(3, -1))
    results = []
    for has_second in ([True, True, True], [False, True, False]):
        trainer = Trainer(_PartialChains(has_second), losses=parse(text), steps=2, decay=0.8, lr=1e-3)
        gradients = record_gradients(trainer)
        loss = trainer.train([texts], progress=0.5).loss
        results.append((loss, gradients[0]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)


def test_step_without_trained_columns_changes_no_weights():
    trainee = ConstantTrainee(2, 11)
    before = trainee.module.weight.detach().clone()
    trainer = Trainer(trainee, losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    texts = make_batch(vocab=11)
    for micro_batches in ([], [replace(texts, loss_mask=torch.zeros_like(texts.loss_mask))]):
        assert trainer.train(micro_batches, progress=0.5).columns == 0
    assert trainer.step == 2
    assert torch.equal(trainee.module.weight, before)


def test_nan_loss_ends_the_training():
    trainee = ConstantTrainee(2, 11)
    with torch.no_grad():
        trainee.module.weight[0, 0] = torch.nan
    before = trainee.module.weight.detach().clone()
    trainer = Trainer(trainee, losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    with pytest.raises(OutriderError, match=r"the loss at step 0 is nan .* use a smaller --lr"):
        trainer.train([make_batch(vocab=11)], progress=0.5)
    assert torch.equal(trainee.module.weight.nan_to_num(), before.nan_to_num())


def test_confidence_head_learns_the_acceptance(nano):
    torch.manual_seed(1)
    trainee = make_trainee("dspark", make_settings(draft_tokens=2), make_setup(nano), nano.tables)
    trainer = Trainer(trainee, losses=parse("tv"), steps=2, decay=1.0, lr=1e-2)
    (step, *_) = list(trainee.unroll(make_batch(), 2))
    assert step.confidence is not None
    for _ in range(30):
        trainer.train([make_batch()], progress=0.5)
    step, _ = trainee.unroll(make_batch(), 2)
    dist = Distributions(step.target, step.logits.log_softmax(-1))
    assert (step.confidence.sigmoid().mean() - dist.alpha.mean()).abs() < 0.1


def test_learning_rate_rises_and_falls():
    factors = [lr_factor(i / 1000) for i in range(1001)]
    peak = factors.index(max(factors))
    assert factors[peak] == pytest.approx(1, abs=0.01)
    assert 20 <= peak <= 40
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[0] > 0
    assert factors[-1] == pytest.approx(0.05)


def test_mask_token_id_uses_a_frozen_embedding(nano, tmp_path):
    trainee = make_trainee("dflash", make_settings(draft_tokens=2, mask_token_id=9), make_setup(nano), nano.tables)
    texts = make_batch()
    aux_states = torch.randn(*texts.aux_states.shape[:2], len(trainee.aux_states.layers), 128)
    trainer = Trainer(trainee, losses={"ce": 1.0}, steps=2, decay=1.0, lr=1e-2)
    before = trainee.module.fuse.weight.clone()
    trainer.train([replace(texts, aux_states=aux_states)], progress=0.5)
    assert not torch.equal(trainee.module.fuse.weight, before)
    assert torch.equal(trainee.module.mask, nano.tables.embedding[9])
    trainee.save(tmp_path / "draft")
    trained = import_head(tmp_path / "draft")
    target_info = TargetInfo(vocab=12288, hidden=128, layers=2, embedding=lambda: nano.tables.embedding)
    config, _ = format_of("dflash").write(trained.description, trained.weights, target_info)
    assert config["dflash_config"]["mask_token_id"] == 9


def test_acceptance_by_position():
    stats = StepStats()
    stats.add_alpha(0, torch.tensor([0.5, 1.0]))
    stats.add_alpha(1, torch.tensor([]))
    stats.add_alpha(0, torch.tensor([0.0]))
    assert stats.acceptance == [0.5, 0.0]


_TWO_PROCESSES = """
import sys, torch
from outrider.train.loss.losses import parse
from outrider.parallel.processes import rank
from outrider.train.distributed import join_group, leave_group
from outrider.train.data.batches import most_frequent_tokens
from outrider.train.trainer import Trainer
from tests.helpers.train_setup import CPU, ConstantTrainee, make_batch, make_sample, record_gradients, single_sequence
torch.set_num_threads(1)
join_group(CPU)
texts, trainee = make_batch(vocab=11), ConstantTrainee(3, 11)
trainer = Trainer(trainee, losses=parse("ce:0.5,length:2"), steps=3, decay=0.8, lr=1e-3)
micro_batches = [[single_sequence(texts, 0, 9)], [single_sequence(texts, 1, 6), single_sequence(texts, 2, 4)]][rank()]
gradients = record_gradients(trainer)
stats = trainer.train(micro_batches, progress=0.5)
ids = most_frequent_tokens([make_sample([[0, 5, 5, 6], [0, 7, 7, 6]][rank()])], 10, 3, CPU)
torch.save([stats.loss, stats.columns, gradients[0], ids], f"{sys.argv[1]}/{rank()}.pt")
leave_group()
"""


@pytest.mark.slow
def test_two_processes_make_the_same_step_as_one(tmp_path):
    (tmp_path / "two.py").write_text(_TWO_PROCESSES)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(tmp_path / "two.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    trainee = ConstantTrainee(3, 11)
    trainer = Trainer(trainee, losses=parse("ce:0.5,length:2"), steps=3, decay=0.8, lr=1e-3)
    gradients = record_gradients(trainer)
    stats = trainer.train([make_batch(vocab=11)], progress=0.5)
    for rank in range(2):
        loss, columns, gradient, ids = torch.load(tmp_path / f"{rank}.pt")
        assert (loss, columns) == (pytest.approx(stats.loss, rel=1e-5), 19)
        assert torch.allclose(gradient.flatten(), gradients[0], atol=1e-6)
        assert ids.tolist() == [5, 6, 7]


# Drafts that can be trained


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dflash", {"draft_vocab_size": 99999}, "--draft-vocab-size is 99999, and the target has 12288 tokens"),
        ("medusa", {"intermediate_size": 64}, "leave --intermediate-size out"),
        ("medusa", {"ttt_length": 3}, "medusa drafts 4 tokens and trains all of them; leave --ttt-length out"),
        ("hydra", {"depth": 1}, "use 2 or more"),
        ("mtp", {"draft_tokens": 5}, "mtp has no block; leave --draft-tokens out"),
        ("mtp", {"mask_token_id": 5}, "mtp has no block; leave --mask-token-id out"),
        ("mtp", {"ttt_length": 1, "multi_step_share": 0.5}, "--ttt-length 1 trains only the first draft token"),
        ("dflash", {"mask_token_id": 12288}, "--mask-token-id is 12288, and the target has 12288 tokens"),
        ("eagle3", {}, "reads three layers, and this target has 2"),
        ("slim", {}, "reads three layers, and this target has 2"),
        ("mtp", {"hidden_size": 64}, "mtp is as wide as its target; leave --hidden-size out"),
        (DRAFT, {}, "name its folder with --init-from DIR"),
        (DRAFT, {"init_from": NANO, "depth": 2}, "--depth shapes a new draft"),
        ("kv-sharing", {"centroids": 100}, "--centroids is 100, and 12288 tokens do not divide .* use 96"),
        ("kv-sharing", {"centroids": 96, "centroid_top_k": 97}, "--centroid-top-k is 97, and there are 96 clusters"),
        ("mtp", {"centroids": 96}, "mtp has no token clusters; leave --centroids out"),
        (DRAFT, {"init_from": NANO, "hidden_size": 64}, "--hidden-size shapes a new draft"),
        (DRAFT, {"init_from": NANO, "own_lm_head": True}, "--own-lm-head shapes a new draft"),
        (
            DRAFT,
            {"init_from": NANO, "multi_step_share": 0.5},
            "a draft model trains all draft tokens at every position; leave --multi-step-share out",
        ),
        (
            "hydra",
            {"multi_step_share": 0.5},
            "hydra trains all draft tokens at every position; leave --multi-step-share out",
        ),
        (
            "mtp",
            {"mtp_modules": 2, "multi_step_share": 0.5},
            "mtp trains all draft tokens at every position; leave --multi-step-share out",
        ),
        (DRAFT, {"init_from": "out"}, "--init-from and --out are both out"),
        (DRAFT, {"init_from": "nowhere"}, "nowhere is not a folder"),
    ],
)
def test_options_that_do_not_fit_the_kind_are_rejected(kind, options, message, nano):
    with pytest.raises(OutriderError, match=message):
        make_trainee(kind, make_settings(**options), make_setup(nano), nano.tables)


@pytest.mark.parametrize("kind", ["eagle3", "eagle31", "slim", "peagle"])
def test_narrow_draft_has_own_embedding_and_lm_head(kind):
    sizes = Sizes(hidden=384, layers=8, vocab=40, epsilon=1e-5)
    narrow = describe(kind, replace(sizes, width=128))
    assert (narrow.width, narrow.own_lm_head, narrow.own_embedding) == (128, True, True)
    assert describe("slim", sizes).width == 192
    with pytest.raises(OutriderError, match="leave --shared-lm-head out, or --hidden-size"):
        describe(kind, replace(sizes, width=128, own_lm_head=False))
    with pytest.raises(OutriderError, match="--hidden-size is 512, and the target is 384 wide"):
        describe(kind, replace(sizes, width=512))
    with pytest.raises(OutriderError, match="does not divide into heads"):
        describe(kind, replace(sizes, width=100))


def test_narrow_draft_starts_with_principal_directions_of_the_tables():
    torch.manual_seed(1)
    basis = torch.randn(64, 128)
    norm = torch.rand(128) + 0.5
    tables = SharedWeights(
        embedding=torch.randn(90, 128), head=torch.randn(90, 64) @ basis / norm, norm=norm, epsilon=1e-6
    )
    sizes = Sizes(hidden=128, layers=4, vocab=90, epsilon=1e-6, width=64, draft_vocab=9)
    module = make_module(describe("slim", sizes))
    module.ids.copy_(torch.arange(3, 12))
    torch.nn.init.zeros_(module.fuse.weight)
    init_weights(module, tables)
    state = torch.randn(5, 64) @ torch.linalg.qr(basis.T).Q.T  # in the subspace on which the logits depend
    projection = module.fuse.weight[:, -128:].detach()
    target_probs = (apply_final_norm(state, tables) @ tables.head.T).float()[:, 3:12].softmax(-1)
    assert torch.allclose(module.logits(state @ projection.T).softmax(-1), target_probs, atol=1e-4)
    directions = principal_directions(basis, 9)
    assert torch.allclose(directions.T @ directions, torch.eye(9), atol=1e-5)


def test_narrow_draft_is_trained_further_as_the_same_kind(tmp_path):
    mini = train_setup.load_target(str(embedded("mini")))
    setup = make_setup(mini)
    first = make_trainee("slim", make_settings(hidden_size=64, draft_vocab_size=50), setup, mini.tables)
    first.save(tmp_path / "slim")
    with pytest.raises(OutriderError, match="at its projection, and eagle3 does so at its attention; train"):
        make_trainee("eagle31", make_settings(init_from=str(tmp_path / "slim")), setup, mini.tables)
    second = make_trainee("slim", make_settings(init_from=str(tmp_path / "slim")), setup, mini.tables)
    assert second.ids.tolist() == first.ids.tolist()
    assert second.module.description.width == 64


def test_draft_model_with_another_vocabulary_is_rejected(nano):
    setup = make_setup(nano)
    other_tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    with pytest.raises(OutriderError, match="another vocabulary than the target"):
        make_trainee(DRAFT, make_settings(init_from=NANO), replace(setup, tokenizer=other_tokenizer), nano.tables)


def test_identity_has_newer_options_only_if_they_are_set():
    assert "mask_token_id" not in make_settings().identity()
    assert make_settings(mask_token_id=0).identity()["mask_token_id"] == 0
    assert not make_settings().identity().keys() & {"dtype", "quantize"}
    assert make_settings(dtype="float32", quantize="int8").identity().keys() >= {"dtype", "quantize"}


def test_invalid_settings_are_rejected():
    for options, message in (
        ({"lr": 0.0}, "use --lr in"),
        ({"loss_decay": 1.5}, "use --lr in"),
        ({"cache_gb": 3.0}, "with --cache-dir DIR"),
        ({"seed": 1 << 64}, "--seed is 18446744073709551616; use a number"),
        ({"ttt_length": 10**9}, "--ttt-length is 1000000000; use 256 at most"),
        ({"mtp_modules": 10**9}, "--mtp-modules is 1000000000; use 256 at most"),
        ({"intermediate_size": 10**15}, "use 1048576 at most"),
        ({"cache_dir": "x", "cache_gb": 0.0}, "above 0"),
    ):
        with pytest.raises(OutriderError, match=message):
            make_settings(**options)
    with pytest.raises(OutriderError, match="train needs prompts"):
        Settings(out="out", data=[])


@pytest.mark.parametrize("kind", ["mtp", "medusa", "dspark"])
def test_trained_head_can_be_trained_further(kind, nano, tmp_path):
    setup = make_setup(nano)
    first = make_trainee(kind, make_settings(draft_vocab_size=50), setup, nano.tables)
    first.begin(lambda: [make_sample([1, 2, 3, 9, 70, 700])])
    with torch.no_grad():
        for weight in first.module.parameters():
            weight.add_(0.1)
    first.save(tmp_path / "head")
    second = make_trainee(kind, make_settings(init_from=str(tmp_path / "head")), setup, nano.tables)
    second.begin(lambda: pytest.fail("the head already has its draft vocabulary"))
    assert second.ids.tolist() == first.ids.tolist()
    for name, weight in first.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[name], weight.to(torch.bfloat16).to(weight.dtype))
    texts = make_batch(lengths=(6, 4))
    texts = replace(texts, target_probs=texts.target_probs[:, second.ids])
    trainer = Trainer(second, losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    assert trainer.train([texts], progress=0.5).columns
    other_kind = "hydra" if kind == "medusa" else "medusa"
    with pytest.raises(OutriderError, match=f"is of kind {kind}, for a target with"):
        make_trainee(other_kind, make_settings(init_from=str(tmp_path / "head")), setup, nano.tables)
    with pytest.raises(OutriderError, match="defines the shape of the draft; leave --depth"):
        make_trainee(kind, make_settings(init_from=str(tmp_path / "head"), draft_vocab_size=9), setup, nano.tables)


def test_draft_model_has_the_logits_of_transformers(nano):
    trainee = make_trainee(DRAFT, make_settings(init_from=NANO), make_setup(nano), nano.tables)
    texts = make_batch(lengths=(9, 6))
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    logits = model(texts.tokens[:, :9]).logits
    target_probs = scatter(texts.target_probs, texts.loss_mask)
    for i, step in enumerate(list(trainee.unroll(texts, 3))):
        assert torch.allclose(step.logits, logits[:, i:][step.loss_mask], atol=1e-4)
        assert torch.equal(step.target, target_probs[:, i:][step.loss_mask])
        assert torch.equal(step.loss_mask, texts.loss_mask[:, i:])


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "mixtral"])
def test_draft_models_of_several_architectures_can_be_trained(name, tmp_path):
    for role, architecture in (("target", "llama"), ("draft", name)):
        tiny.save(tmp_path / role, tiny.ARCHITECTURES[architecture](), seed=len(role))
    loaded = train_setup.load_target(tmp_path / "target")
    settings = make_settings(init_from=str(tmp_path / "draft"))
    trainee = make_trainee(DRAFT, settings, make_setup(loaded), loaded.tables)
    texts = make_batch(hidden=32, vocab=tiny.VOCAB)
    trainer = Trainer(trainee, losses=parse("ce"), steps=1, decay=0.8, lr=1e-2)
    losses = [trainer.train([texts], progress=0.5).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    trainee.save(tmp_path / "trained")
    engine = engines.make_engine(loaded.target, lambda _: trainee.proposer(make_setup(loaded)), k=3, rows=2)
    engines.run(engine, [(1, 2, 3), (4, 5)], SamplingParams(temperature=1.0), limit=9)
    assert engine.stats.draft_tokens
    saved_state = load_checkpoint(tmp_path / "trained", dtype="float32", device="cpu").model.state_dict()
    trained_state = trainee.module.state_dict()
    assert saved_state.keys() == trained_state.keys()
    assert all(torch.equal(saved_state[name], value.bfloat16().float()) for name, value in trained_state.items())


@pytest.mark.parametrize("kind", ["mtp", "dspark", DRAFT])
def test_proposer_is_a_copy_and_uses_no_random_numbers(kind, nano):
    torch.manual_seed(5)
    settings = make_settings(init_from=NANO if kind == DRAFT else None)
    trainee = make_trainee(kind, settings, make_setup(nano), nano.tables)
    state = torch.get_rng_state()
    weights = [weight.detach().clone() for weight in trainee.module.parameters()]
    proposer = trainee.proposer(make_setup(nano))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(weights, trainee.module.parameters(), strict=True))
    assert all(weight.requires_grad for weight in trainee.module.parameters())
    num_bytes = proposer.model.bytes()
    with torch.no_grad():
        for weight in trainee.module.parameters():
            weight.zero_()
    assert proposer.model.bytes() == num_bytes


def test_command_help_lists_all_kinds():
    from outrider.cli.drafts import train

    help = next(iter(train.__annotations__["kind"].__metadata__)).help
    assert all(kind in help for kind in [*KINDS, DRAFT])
