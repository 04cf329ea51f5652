"""Draft heads with mask tokens (P-EAGLE): descriptions, agreement of engine and training, and training."""

import random
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.types import Batch, DraftBudget
from outrider.errors import OutriderError
from outrider.models.heads.description import AuxStates, Feedback, FuseNorm, HeadDescription, Kind, MaskTokens
from outrider.models.heads.store import make_module
from outrider.models.heads.targets.registry import make_head_target
from outrider.testing.drive import random_tree
from outrider.train.loss import masks
from outrider.train.loss.steps import Chains, TrainingBatch
from outrider.train.loss.unroll import unrolled
from outrider.train.model.presets import Sizes, describe
from tests.helpers.train_setup import scatter
from tests.models.heads.drive_head import (
    CPU,
    TABLES,
    admit,
    commit_feed,
    grow,
    make_trainer,
    measure_tau,
    next_batch,
    note_states,
    random_head,
    score_texts,
)
from tests.models.heads.training_pass import LENGTHS, TrainingPass

SMALL = Sizes(hidden=64, layers=8, vocab=40, epsilon=1e-5, depth=2, draft_tokens=4)


def make_head(description: HeadDescription, seed: int = 0):
    """Return a module with random weights and a random draft vocabulary."""
    module = random_head(description, seed)
    if description.draft_vocab:
        module.ids.copy_(torch.randperm(40)[:9].sort().values)
    return module


def variants() -> dict[str, HeadDescription]:
    """Descriptions with mask tokens, by name."""
    plain = describe("peagle", SMALL)
    return {
        "plain": plain,
        "reduced draft vocabulary": describe("peagle", replace(SMALL, draft_vocab=9, depth=1)),
        "own embedding": replace(
            plain, own_embedding=True, body=replace(plain.body, hidden=48, heads=4, head_norms=True)
        ),
        "normalized states": replace(
            plain, aux_states=replace(plain.aux_states, norm=FuseNorm.EACH), masks=MaskTokens(draft_tokens=2, token=0)
        ),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masks": None}, "predicts from mask tokens but has none"),
        (
            {"masks": MaskTokens(draft_tokens=1, token=3)},
            "predicts 1 draft tokens from mask tokens, which needs at least 2",
        ),
        ({"masks": MaskTokens(draft_tokens=4, token=40)}, "mask token is 40, but its vocabulary has 40 tokens"),
        (
            {"block": describe("dflash", SMALL).block, "input_fusion": None},
            "must combine hidden states with embeddings and cannot fill in a block",
        ),
    ],
)
def test_invalid_descriptions_are_rejected(change, message):
    with pytest.raises(OutriderError, match=message):
        replace(describe("peagle", SMALL), **change)
    with pytest.raises(OutriderError, match="use --draft-tokens 2 or more"):
        describe("peagle", replace(SMALL, draft_tokens=1))


@pytest.mark.parametrize("name", variants())
def test_engine_logits_equal_training_logits(name):
    """One training pass equals the passes of sequences in a batch, which have different draft budgets."""
    rng = random.Random(4)
    description = variants()[name]
    module = make_head(description, seed=3)
    head = make_head_target(module, TABLES, slots=3, context=24)
    num_draft_tokens = description.masks.draft_tokens
    training = TrainingPass(module, 9)
    assert len(training.steps) == num_draft_tokens
    seqs = training.start(head, chunks=(3,))
    num_compared = 0
    while seqs:
        note_states(head, seqs, training.aux_states, [len(seq.token_ids) - 1 for seq in seqs])
        budgets = [rng.randint(1, 6) for _ in seqs]
        batch = next_batch(head, seqs).limited(tuple(budgets))
        chain = tree.empty(len(seqs), CPU)
        logits = [head.score(batch, chain).logits[:, -1]]
        for depth in range(1, num_draft_tokens):
            chain = tree.chain(torch.randint(0, 40, (len(seqs), depth)), (depth,) * len(seqs))
            logits.append(head.score(batch, chain, first=depth - 1).logits[:, -1])
        for b, seq in enumerate(seqs):
            depths = range(min(budgets[b], num_draft_tokens))
            num_compared += sum(training.check(depth, seq, logits[depth][b]) for depth in depths)
        commit_feed(head, batch, chain)
        seqs = grow(seqs, training.tokens, LENGTHS, rng)
    assert num_compared >= 20


def test_logits_of_a_node_depend_only_on_its_depth():
    head = make_head_target(make_head(describe("peagle", SMALL)), TABLES, slots=2, context=32)
    seqs = admit(head, [[1, 2, 3, 4, 5], [6, 7, 8]])
    note_states(head, seqs, torch.randn(2, 5, 3, 64), [4, 2])
    batch = next_batch(head, seqs).limited((9, 9))
    draft = random_tree([9, 6], 40, random.Random(5))
    tree_logits = head.score(batch, draft).logits
    depths = tree.depths(draft)
    chain_logits = head.score(batch, tree.chain(torch.zeros(2, 3, dtype=torch.int64), (3, 3)), 0).logits
    for b, width in enumerate(draft.width):
        for node in range(width):
            assert torch.equal(tree_logits[b, 1 + node], chain_logits[b, min(int(depths[b, node]), 3) - 1])


def test_masks_at_the_end_of_the_context():
    """One sequence has no room for mask tokens, the other one has."""
    head = make_head_target(make_head(describe("peagle", SMALL)), TABLES, slots=2, context=12)
    texts = [[3] * 11, [4] * 4]
    aux_states = torch.randn(2, 11, 3, 64)
    seqs = admit(head, texts)
    note_states(head, seqs, aux_states, [10, 3])
    batch = next_batch(head, seqs).limited((1, 4))
    logits = head.score(batch, tree.empty(2, CPU)).logits[:, 0]
    larger_head = make_head_target(make_head(describe("peagle", SMALL)), TABLES, slots=2, context=32)
    assert torch.allclose(logits, score_texts(larger_head, texts, aux_states), atol=1e-4)


@pytest.mark.parametrize(("share", "max_columns"), [(1.0, 5), (0.4, 512)])
def test_masks_in_one_training_pass_are_independent(share, max_columns, monkeypatch):
    module = make_head(describe("peagle", SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    texts = TrainingBatch(
        tokens=torch.randint(0, 40, (2, 16)),
        aux_states=torch.randn(2, 15, 3, 64),
        target_probs=torch.rand(30, 40),
        loss_mask=torch.ones(2, 15, dtype=torch.bool),
    )
    all_steps = list(unrolled(module, texts, 9))
    monkeypatch.setattr(masks, "MAX_COLUMNS", max_columns)
    torch.manual_seed(8)
    sampled_steps = list(unrolled(module, texts, 9, share))
    assert torch.equal(sampled_steps[0].loss_mask, all_steps[0].loss_mask)
    counts = [int(step.loss_mask.sum()) for step in sampled_steps]
    assert 0 < counts[1] < int(all_steps[1].loss_mask.sum())
    chosen = sampled_steps[1].loss_mask
    for step, full_step in zip(sampled_steps[1:], all_steps[1:], strict=True):
        assert torch.equal(step.loss_mask, full_step.loss_mask & chosen)
        assert step.weight > 1
        expected = scatter(full_step.logits, full_step.loss_mask)[step.loss_mask]
        assert torch.allclose(step.logits, expected, atol=1e-5)
        chosen = step.loss_mask | (chosen & ~full_step.loss_mask)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_chains_stay_in_their_column_when_columns_are_sampled(kind):
    """`--loss length` combines the steps of a column, so all of them must belong to one chain."""
    module = make_head(describe(kind, SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    loss_mask = torch.zeros(2, 15, dtype=torch.bool)
    loss_mask[0, 3:] = True
    loss_mask[1, 6:12] = True
    target_probs = torch.rand(2, 15, 40)
    texts = TrainingBatch(
        tokens=torch.randint(0, 40, (2, 16)),
        aux_states=torch.randn(2, 15, 3, 64),
        target_probs=target_probs[loss_mask],
        loss_mask=loss_mask,
    )
    torch.manual_seed(2)
    for depth, step in enumerate(unrolled(module, texts, 4, 0.5)):
        assert step.loss_mask.shape == (2, 14)
        seq, column = step.loss_mask.nonzero(as_tuple=True)
        assert loss_mask[seq, column + 1].all()
        assert torch.equal(step.target, target_probs[seq, column + 1 + depth])


def test_no_chains_without_trained_columns():
    chains = Chains.of(torch.zeros(2, 5, dtype=torch.bool), 0.5, 9)
    assert not chains.valid.any()
    assert chains.weight == 0


@pytest.mark.slow
def test_training_lowers_the_loss_and_raises_acceptance(nano):
    target, prompts, _ = nano
    plain = describe("eagle3", Sizes(hidden=128, layers=4, vocab=12288, epsilon=1e-5, own_lm_head=False))
    description = replace(
        plain,
        kind=Kind.PEAGLE,
        target_layers=2,
        aux_states=AuxStates(layers=(0, 1), fused=True),
        masks=MaskTokens(draft_tokens=4, token=12287),
        feedback=Feedback.RAW,
    )
    trainer, texts = make_trainer(nano, description, steps=4)
    module = trainer.trainee.module
    tau_before = measure_tau(module, target, prompts)
    mask_before = module.mask.detach().clone()
    stats = [trainer.train([texts], progress=step / 60) for step in range(60)]
    assert stats[-1].loss < 0.6 * stats[0].loss
    acceptance = [step for step in stats if step.alpha_counts][-1].acceptance
    assert min(acceptance) > 0.4
    assert len(acceptance) == 4
    assert measure_tau(module, target, prompts) > tau_before + 1
    assert not torch.equal(module.mask, mask_before)


def test_texts_of_one_and_two_tokens_are_trained():
    module = make_module(describe("peagle", SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    for length in (1, 2):
        texts = TrainingBatch(
            tokens=torch.ones(1, length + 1, dtype=torch.int64),
            aux_states=torch.randn(1, length, 3, 64),
            target_probs=torch.rand(length, 40),
            loss_mask=torch.ones(1, length, dtype=torch.bool),
        )
        steps = list(unrolled(module, texts, 9))
        assert sum(int(step.loss_mask.sum()) for step in steps) == length - 1


def test_prefill_without_draft_budget():
    head = make_head_target(make_head(describe("peagle", SMALL)), TABLES, slots=1, context=32)
    seqs = admit(head, [[1, 2, 3]])
    note_states(head, seqs, torch.randn(1, 2, 3, 64), [2])
    batch = Batch(seqs=tuple(seqs), start=(0,), feed=((1, 2, 3),), budget=DraftBudget((0,)))
    assert head.score(batch, tree.empty(1, CPU)).logits.shape == (1, 1, 40)
