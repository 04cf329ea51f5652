"""Training steps: the loss of a step, micro-batches, chosen chains, and the learning rate."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.errors import OutriderError
from outrider.models.heads.formats.base import TargetInfo
from outrider.models.heads.formats.registry import format_of
from outrider.models.heads.store import import_head
from outrider.train.loss.losses import Distributions, parse
from outrider.train.loss.steps import Step
from outrider.train.model.trainee import make_trainee
from outrider.train.trainer import StepStats, Trainer, lr_factor
from tests.helpers.train_setup import (
    ConstantTrainee,
    make_batch,
    make_settings,
    make_setup,
    record_gradients,
    scatter,
    single_sequence,
)
from tests.train.expected_losses import expected_loss, expected_rejections


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
                terms = [weight * expected_loss(name, p, q) for name, weight in losses.items() if name != "length"]
                total += decay**step * sum(terms)
            total += decay_sum * losses.get("length", 0) * expected_rejections(alphas)
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
    for _ in range(15):
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
from outrider.runtime.processes import rank
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
