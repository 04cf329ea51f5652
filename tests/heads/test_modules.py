"""Drafts with several modules for multi-token prediction: what training must agree with, and what it brings."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.core import tree
from outrider.errors import OutriderError
from outrider.heads.description import Feedback, HeadDescription
from outrider.heads.hidden_states import normed
from outrider.heads.store import make_module
from outrider.heads.targets.multi_module import MultiModuleTarget
from outrider.heads.targets.registry import make_head_target
from outrider.testing.drive import random_tree
from outrider.train.data.batches import Reader
from outrider.train.loss.losses import parse
from outrider.train.loss.steps import Texts
from outrider.train.loss.unroll import unrolled
from outrider.train.model.presets import Sizes, describe
from outrider.train.model.trainee import make_trainee
from outrider.train.trainer import Trainer
from tests.heads.test_block_heads import CPU, TABLES, admit, batch_of, commit, measure, tell
from tests.helpers import train_setup
from tests.helpers.train_setup import make_settings, make_setup, spread

SMALL = Sizes(hidden=64, layers=8, vocab=40, epsilon=1e-5, modules=3)


def make_draft(description: HeadDescription, seed: int = 0):
    """A module whose every part says something."""
    torch.manual_seed(seed)
    module = make_module(description).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if "norm" in name:
            weight += 0.5 * torch.randn(weight.shape)
    return module


def variants() -> dict[str, HeadDescription]:
    plain = describe("mtp", SMALL)
    return {
        "as it is": plain,
        "of two layers each": replace(plain, body=replace(plain.body, layers=2)),
        "of other habits": replace(
            plain,
            modules=2,
            feedback=Feedback.NORMED,
            input_fusion=replace(plain.input_fusion, embedding_first=False, zero_first=False),
        ),
        "of few tokens": describe("mtp", replace(SMALL, draft_vocab=9, modules=4)),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [({"modules": 0}, "has 0 modules"), ({"kind": "eagle"}, "has 3 modules, and is of a kind with one")],
)
def test_what_fits_nothing_is_refused(change, message):
    with pytest.raises(OutriderError, match=message):
        replace(describe("mtp", SMALL), **change)


@pytest.mark.parametrize("name", variants())
def test_training_sees_what_the_engine_will(name):
    """Every module's guess, against texts that grow beside each other and are read in pieces."""
    chance, description = random.Random(4), variants()[name]
    module = make_draft(description, seed=3)
    head = make_head_target(module, TABLES, slots=3, context=24)
    assert isinstance(head, MultiModuleTarget)
    lengths, size, modules = (14, 9, 14), 14, description.modules
    tokens, taps = torch.randint(0, 40, (3, size + 1)), torch.randn(3, size, 1, 64)
    learn = torch.arange(size) < torch.tensor(lengths)[:, None]
    laws = torch.rand(3, size, description.output_vocab)
    texts = Texts(tokens=tokens, aux_states=normed(taps, TABLES), target_probs=laws[learn], learn=learn)
    steps = list(unrolled(module, texts, modules))
    said, meant = ([spread(getattr(step, of), step.learn) for step in steps] for of in ("logits", "target"))
    assert len(steps) == modules
    rows = admit(head, [tokens[b, :5].tolist() for b in range(3)])
    tell(head, rows, taps, [4] * 3)
    for most in (2, 1):
        piece = replace(batch_of(head, rows, most=most), draft_budget=(0,) * 3)
        head.score(piece, tree.empty(3, CPU))
        commit(head, piece, tree.empty(3, CPU))
    compared = 0
    while rows:
        tell(head, rows, taps, [len(row.token_ids) - 1 for row in rows])
        batch, chain = batch_of(head, rows), tree.empty(len(rows), CPU)
        found = [head.score(batch, chain).logits[:, -1]]
        truth = [tokens[row.slot, len(row.token_ids) :].tolist() + [0] * modules for row in rows]
        for guess in range(1, modules):
            chain = tree.chain(torch.tensor([each[:guess] for each in truth]), (guess,) * len(rows))
            found.append(head.score(batch, chain, first=guess - 1).logits[:, -1])
        for b, row in enumerate(rows):
            column = len(row.token_ids) - 2
            for guess, step in enumerate(steps):
                assert step.learn.shape[1] == size - 1 - guess
                if column < step.learn.shape[1] and step.learn[row.slot, column]:
                    wanted = said[guess][row.slot, column]
                    assert (found[guess][b, module.ids] - wanted).abs().max() < 1e-3
                    assert torch.equal(meant[guess][row.slot, column], laws[row.slot, column + 1 + guess])
                    compared += 1
        commit(head, batch, chain)
        for row in rows:
            row.token_ids += tokens[row.slot, len(row.token_ids) :][: chance.randint(1, 3)].tolist()
        rows = [row for row in rows if len(row.token_ids) <= lengths[row.slot]]
        rows = rows if len(rows) < 2 or chance.random() < 0.5 else rows[1:]
    assert compared > 15


def test_a_node_is_answered_by_its_own_path():
    """Whatever stands beside it in the tree, level by level or all levels at once."""
    head = make_head_target(make_draft(describe("mtp", SMALL)), TABLES, slots=2, context=32)
    rows = admit(head, [[1, 2, 3, 4, 5], [6, 7, 8, 9]])
    tell(head, rows, torch.randn(2, 5, 1, 64), [4, 3])
    batch = batch_of(head, rows)
    draft = random_tree([8, 6], 40, random.Random(5))
    head.score(batch, tree.empty(2, CPU))
    whole = head.score(batch, draft, 0).logits
    shallow = [
        (b, node)
        for b, width in enumerate(draft.width)
        for node in range(width)
        if int(tree.depths(draft)[b, node]) < head.max_draft_tokens
    ]
    assert len(shallow) > 6
    for b, node in shallow:
        path = [node]
        while (above := int(draft.parent[b, path[0]])) >= 0:
            path.insert(0, above)
        head.score(batch, tree.empty(2, CPU))
        for guess in range(1, 1 + len(path)):
            chain = tree.chain(draft.tokens[:, path[:guess]], (guess,) * 2)
            alone = head.score(batch, chain, guess - 1).logits
        assert torch.allclose(alone[b, 0], whole[b, node], atol=1e-4)


def test_a_slot_forgets_the_text_before():
    head = make_head_target(make_draft(describe("mtp", SMALL)), TABLES, slots=1, context=32)
    none, taps = tree.empty(1, CPU), torch.randn(1, 12, 1, 64)
    found = []
    for text in ([3] * 12, [1, 2, 3, 4, 5, 6]):
        rows = admit(head, [text])
        tell(head, rows, taps, [len(text) - 1])
        for most in (4, 2):
            batch = batch_of(head, rows, most=most)
            found.append(head.score(batch, none).logits)
            commit(head, batch, none)
        head.cache.release(0)
        assert head.cache.length(0) == 0
    fresh = make_head_target(make_draft(describe("mtp", SMALL)), TABLES, slots=1, context=32)
    rows = admit(fresh, [[1, 2, 3, 4, 5, 6]])
    tell(fresh, rows, taps, [5])
    assert torch.allclose(fresh.score(batch_of(fresh, rows), none).logits, found[-1], atol=1e-4)


def test_training_lowers_the_loss_and_raises_what_is_kept(nano):
    target, prompts, samples = nano
    torch.manual_seed(0)
    description, tables = (
        describe("mtp", Sizes(hidden=128, layers=2, vocab=12288, epsilon=1e-5, modules=3)),
        target.share_weights(),
    )
    module = make_module(description)
    module.share_weights(tables.embedding.float(), tables.head.float())
    texts = Reader(description.aux_states, range(2), tables, module.ids).read(samples, everything=False)
    pupil = SimpleNamespace(module=module, ids=module.ids, unroll=lambda texts, steps: unrolled(module, texts, steps))
    trainer = Trainer(pupil, losses=parse("ce:0.1,tv:1.8"), steps=3, decay=0.8, lr=3e-3)
    before = measure(module, target, prompts)
    sums = [trainer.train([texts], progress=step / 60) for step in range(60)]
    assert sums[-1].loss < 0.6 * sums[0].loss
    assert len([each for each in sums if each.met][-1].acceptance) == 3
    assert measure(module, target, prompts) > before + 1


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
def test_options_that_do_not_fit(kind, options, message):
    house = train_setup.house()
    with pytest.raises(OutriderError, match=message):
        make_trainee(kind, make_settings(**options), make_setup(house), house.tables)


def test_all_modules_are_trained():
    house = train_setup.house()
    pupil = make_trainee("mtp", make_settings(mtp_modules=3), make_setup(house), house.tables)
    assert pupil.steps == 3
    trainer = Trainer(pupil, losses=parse("ce,length:0.5"), steps=3, decay=0.8, lr=1e-3)
    slopes = train_setup.watched(trainer)
    trainer.train([train_setup.make_texts()], progress=0.5)
    assert slopes[0].isfinite().all()
    assert all(weight.grad is None for weight in pupil.module.parameters())
