"""Draft heads with several MTP modules: the engine agrees with training, and training works."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.errors import OutriderError
from outrider.models.heads.description import Feedback, HeadDescription
from outrider.models.heads.targets.multi_module import MultiModuleTarget
from outrider.models.heads.targets.registry import make_head_target
from outrider.testing.drive import random_tree
from outrider.train.loss.losses import parse
from outrider.train.model.presets import Sizes, describe
from outrider.train.model.trainee import make_trainee
from outrider.train.trainer import Trainer
from tests.helpers import train_setup
from tests.helpers.train_setup import make_settings, make_setup
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
)
from tests.models.heads.training_pass import LENGTHS, TrainingPass

SMALL = Sizes(hidden=64, layers=8, vocab=40, epsilon=1e-5, modules=3)


def variants() -> dict[str, HeadDescription]:
    """Descriptions with several modules, by name."""
    plain = describe("mtp", SMALL)
    return {
        "plain": plain,
        "two layers each": replace(plain, body=replace(plain.body, layers=2)),
        "other conventions": replace(
            plain,
            modules=2,
            feedback=Feedback.NORMED,
            input_fusion=replace(plain.input_fusion, embedding_first=False, zero_first=False),
        ),
        "reduced draft vocabulary": describe("mtp", replace(SMALL, draft_vocab=9, modules=4)),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [({"modules": 0}, "has 0 modules"), ({"kind": "eagle"}, "has 3 modules, but only MTP can have several")],
)
def test_invalid_descriptions_are_rejected(change, message):
    with pytest.raises(OutriderError, match=message):
        replace(describe("mtp", SMALL), **change)


@pytest.mark.parametrize("name", variants())
def test_engine_logits_equal_training_logits(name):
    """The logits of every module in training equal those of sequences in a batch that are prefilled in chunks."""
    rng = random.Random(4)
    description = variants()[name]
    module = random_head(description, seed=3)
    head = make_head_target(module, TABLES, slots=3, context=24)
    assert isinstance(head, MultiModuleTarget)
    modules = description.modules
    training = TrainingPass(module, modules)
    assert len(training.steps) == modules
    seqs = training.start(head, chunks=(2, 1))
    num_compared = 0
    while seqs:
        note_states(head, seqs, training.aux_states, [len(seq.token_ids) - 1 for seq in seqs])
        batch = next_batch(head, seqs)
        chain = tree.empty(len(seqs), CPU)
        logits = [head.score(batch, chain).logits[:, -1]]
        continuations = [training.tokens[seq.slot, len(seq.token_ids) :].tolist() + [0] * modules for seq in seqs]
        for depth in range(1, modules):
            draft_tokens = torch.tensor([continuation[:depth] for continuation in continuations])
            chain = tree.chain(draft_tokens, (depth,) * len(seqs))
            logits.append(head.score(batch, chain, first=depth - 1).logits[:, -1])
        for b, seq in enumerate(seqs):
            num_compared += sum(training.check(depth, seq, logits[depth][b]) for depth in range(modules))
        commit_feed(head, batch, chain)
        seqs = grow(seqs, training.tokens, LENGTHS, rng)
    assert num_compared > 15


def test_logits_of_a_node_depend_only_on_its_path():
    """Other nodes of the tree do not matter."""
    head = make_head_target(random_head(describe("mtp", SMALL)), TABLES, slots=2, context=32)
    seqs = admit(head, [[1, 2, 3, 4, 5], [6, 7, 8, 9]])
    note_states(head, seqs, torch.randn(2, 5, 1, 64), [4, 3])
    batch = next_batch(head, seqs)
    draft = random_tree([8, 6], 40, random.Random(5))
    head.score(batch, tree.empty(2, CPU))
    levels = [tree.cut(draft, (node + 1,) * 2) for node in range(draft.size)]
    tree_logits = torch.cat([head.score(batch, level, node).logits for node, level in enumerate(levels)], 1)
    shallow_nodes = [
        (b, node)
        for b, width in enumerate(draft.width)
        for node in range(width)
        if int(tree.depths(draft)[b, node]) < head.max_draft_tokens
    ]
    assert len(shallow_nodes) > 6
    for b, node in shallow_nodes:
        path = [node]
        while (parent := int(draft.parent[b, path[0]])) >= 0:
            path.insert(0, parent)
        head.score(batch, tree.empty(2, CPU))
        for depth in range(1, 1 + len(path)):
            chain = tree.chain(draft.tokens[:, path[:depth]], (depth,) * 2)
            chain_logits = head.score(batch, chain, depth - 1).logits
        assert torch.allclose(chain_logits[b, 0], tree_logits[b, node], atol=1e-4)


def test_released_slot_does_not_affect_the_next_sequence():
    head = make_head_target(random_head(describe("mtp", SMALL)), TABLES, slots=1, context=32)
    empty = tree.empty(1, CPU)
    aux_states = torch.randn(1, 12, 1, 64)
    for text in ([3] * 12, [1, 2, 3, 4, 5, 6]):
        seqs = admit(head, [text])
        note_states(head, seqs, aux_states, [len(text) - 1])
        for max_tokens in (4, 2):
            batch = next_batch(head, seqs, max_tokens)
            logits = head.score(batch, empty).logits
            commit_feed(head, batch, empty)
        head.cache.release(0)
        assert head.cache.length(0) == 0
    fresh_head = make_head_target(random_head(describe("mtp", SMALL)), TABLES, slots=1, context=32)
    seqs = admit(fresh_head, [[1, 2, 3, 4, 5, 6]])
    note_states(fresh_head, seqs, aux_states, [5])
    assert torch.allclose(fresh_head.score(next_batch(fresh_head, seqs), empty).logits, logits, atol=1e-4)


@pytest.mark.slow
def test_training_lowers_the_loss_and_raises_acceptance(nano):
    target, prompts, _ = nano
    description = describe("mtp", Sizes(hidden=128, layers=2, vocab=12288, epsilon=1e-5, modules=3))
    trainer, texts = make_trainer(nano, description, steps=3)
    module = trainer.trainee.module
    tau_before = measure_tau(module, target, prompts)
    stats = [trainer.train([texts], progress=step / 60) for step in range(60)]
    assert stats[-1].loss < 0.6 * stats[0].loss
    assert len([step for step in stats if step.alpha_counts][-1].acceptance) == 3
    assert measure_tau(module, target, prompts) > tau_before + 1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("medusa", {"mtp_modules": 2}, "medusa has no modules; leave --mtp-modules out"),
        (
            "mtp",
            {"mtp_modules": 3, "ttt_length": 4},
            "mtp drafts 3 tokens and trains all of them; leave --ttt-length out",
        ),
        ("draft", {"mtp_modules": 2, "init_from": train_setup.NANO}, "--mtp-modules shapes a new draft"),
    ],
)
def test_conflicting_options_are_rejected(kind, options, message):
    setup = train_setup.load_target()
    with pytest.raises(OutriderError, match=message):
        make_trainee(kind, make_settings(**options), make_setup(setup), setup.tables)


def test_all_modules_are_trained():
    setup = train_setup.load_target()
    trainee = make_trainee("mtp", make_settings(mtp_modules=3), make_setup(setup), setup.tables)
    assert trainee.steps == 3
    trainer = Trainer(trainee, losses=parse("ce,length:0.5"), steps=3, decay=0.8, lr=1e-3)
    gradients = train_setup.record_gradients(trainer)
    trainer.train([train_setup.make_batch()], progress=0.5)
    assert gradients[0].isfinite().all()
    assert all(weight.grad is None for weight in trainee.module.parameters())
