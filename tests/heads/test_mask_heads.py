"""Drafts that guess behind masks in one pass (P-EAGLE): descriptions, what training must agree with, what it brings."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.core import tree
from outrider.core.types import Batch
from outrider.errors import OutriderError
from outrider.heads.description import AuxStates, Feedback, FuseNorm, HeadDescription, Kind, MaskTokens
from outrider.heads.store import make_module, read_head, write_head
from outrider.heads.targets.masked import MaskedTarget
from outrider.heads.targets.registry import make_head_target
from outrider.testing.drive import random_tree
from outrider.train.data.batches import Reader
from outrider.train.loss import masks
from outrider.train.loss.losses import parse
from outrider.train.loss.steps import Chains, Texts
from outrider.train.loss.unroll import unrolled
from outrider.train.model.presets import Sizes, describe
from outrider.train.trainer import Trainer
from tests.heads.test_block_heads import CPU, TABLES, admit, batch_of, commit, measure, score_behind, tell
from tests.helpers.train_setup import spread

SMALL = Sizes(hidden=64, layers=8, vocab=40, epsilon=1e-5, depth=2, guesses=4)


def make_draft(description: HeadDescription, seed: int = 0):
    """A module whose every part says something."""
    torch.manual_seed(seed)
    module = make_module(description).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if "norm" in name:
            weight += 0.5 * torch.randn(weight.shape)
    if description.draft_vocab:
        module.ids.copy_(torch.randperm(40)[:9].sort().values)
    return module


def variants() -> dict[str, HeadDescription]:
    plain = describe("peagle", SMALL)
    return {
        "as it is": plain,
        "of few tokens": describe("peagle", replace(SMALL, draft_vocab=9, depth=1)),
        "with tables of its own": replace(
            plain, own_embedding=True, body=replace(plain.body, hidden=48, heads=4, head_norms=True)
        ),
        "with normed taps": replace(
            plain, aux_states=replace(plain.aux_states, norm=FuseNorm.EACH), masks=MaskTokens(draft_tokens=2, token=0)
        ),
    }


@pytest.mark.parametrize("name", variants())
def test_descriptions_and_weights_survive_the_disk(name, tmp_path):
    description = variants()[name]
    assert HeadDescription.from_json(json.loads(json.dumps(description.to_json()))) == description
    module = make_draft(description)
    write_head(tmp_path / "head", module, dtype=torch.float32)
    again = read_head(tmp_path / "head", dtype=torch.float32, device=CPU)
    assert again.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())
    assert isinstance(make_head_target(again, TABLES, slots=1, context=32), MaskedTarget)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masks": None}, "guesses behind masks and has none"),
        ({"masks": MaskTokens(draft_tokens=1, token=3)}, "makes 1 guesses with masks"),
        ({"masks": MaskTokens(draft_tokens=4, token=40)}, "the embedding of token 40 of 40"),
        ({"block": describe("dflash", SMALL).block, "input_fusion": None}, "a text that it does not follow"),
    ],
)
def test_what_fits_nothing_is_refused(change, message):
    with pytest.raises(OutriderError, match=message):
        replace(describe("peagle", SMALL), **change)
    with pytest.raises(OutriderError, match="use --draft-tokens 2 or more"):
        describe("peagle", replace(SMALL, guesses=1))


@pytest.mark.parametrize("name", variants())
def test_training_sees_what_the_engine_will(name):
    """Every guess of one pass, against texts that grow beside each other with budgets of their own."""
    chance, description = random.Random(4), variants()[name]
    module = make_draft(description, seed=3)
    head = make_head_target(module, TABLES, slots=3, context=24)
    lengths, size, guesses = (14, 9, 14), 14, description.masks.draft_tokens
    tokens, taps = torch.randint(0, 40, (3, size + 1)), torch.randn(3, size, 3, 64)
    learn = torch.arange(size) < torch.tensor(lengths)[:, None]
    laws = torch.rand(3, size, description.output_vocab)
    steps = list(unrolled(module, Texts(tokens=tokens, aux_states=taps, target_probs=laws[learn], learn=learn), 9))
    said, meant = ([spread(getattr(step, of), step.learn) for step in steps] for of in ("logits", "target"))
    assert len(steps) == guesses
    rows = admit(head, [tokens[b, :5].tolist() for b in range(3)])
    tell(head, rows, taps, [4] * 3)
    piece = replace(batch_of(head, rows, most=3), draft_budget=(0,) * 3)
    head.score(piece, tree.empty(3, CPU))
    commit(head, piece, tree.empty(3, CPU))
    compared = 0
    while rows:
        tell(head, rows, taps, [len(row.token_ids) - 1 for row in rows])
        budgets = [chance.randint(1, 6) for _ in rows]
        batch = replace(batch_of(head, rows), draft_budget=tuple(budgets))
        chain = tree.empty(len(rows), CPU)
        found = [head.score(batch, chain).logits[:, -1]]
        for guess in range(1, guesses):
            chain = tree.chain(torch.randint(0, 40, (len(rows), guess)), (guess,) * len(rows))
            found.append(head.score(batch, chain, first=guess - 1).logits[:, -1])
        for b, row in enumerate(rows):
            column = len(row.token_ids) - 2
            for guess, step in enumerate(steps[: budgets[b]]):
                assert bool(step.learn[row.slot, column]) == (column + 1 + guess < lengths[row.slot])
                if step.learn[row.slot, column]:
                    wanted = said[guess][row.slot, column]
                    assert (found[guess][b, module.ids] - wanted).abs().max() < 1e-3
                    assert torch.equal(meant[guess][row.slot, column], laws[row.slot, column + 1 + guess])
                    compared += 1
        commit(head, batch, chain)
        for row in rows:
            row.token_ids += tokens[row.slot, len(row.token_ids) :][: chance.randint(1, 3)].tolist()
        rows = [row for row in rows if len(row.token_ids) <= lengths[row.slot]]
        rows = rows if len(rows) < 2 or chance.random() < 0.5 else rows[1:]
    assert compared >= 20


def test_a_node_is_answered_by_its_depth():
    head = make_head_target(make_draft(describe("peagle", SMALL)), TABLES, slots=2, context=32)
    rows = admit(head, [[1, 2, 3, 4, 5], [6, 7, 8]])
    tell(head, rows, torch.randn(2, 5, 3, 64), [4, 2])
    batch, draft = replace(batch_of(head, rows), draft_budget=(9, 9)), random_tree([9, 6], 40, random.Random(5))
    whole, depths = head.score(batch, draft).logits, tree.depths(draft)
    chain = head.score(batch, tree.chain(torch.zeros(2, 3, dtype=torch.int64), (3, 3)), 0).logits
    for b, width in enumerate(draft.width):
        for node in range(width):
            assert torch.equal(whole[b, 1 + node], chain[b, min(int(depths[b, node]), 3) - 1])


def test_the_end_of_the_context_leaves_room_for_what_was_asked():
    """A row at its very end, beside one that has room for all masks."""
    head = make_head_target(make_draft(describe("peagle", SMALL)), TABLES, slots=2, context=12)
    texts, taps = [[3] * 11, [4] * 4], torch.randn(2, 11, 3, 64)
    rows = admit(head, texts)
    tell(head, rows, taps, [10, 3])
    none = tree.empty(2, CPU)
    both = head.score(replace(batch_of(head, rows), draft_budget=(1, 4)), none).logits[:, 0]
    alone = make_head_target(make_draft(describe("peagle", SMALL)), TABLES, slots=2, context=32)
    assert torch.allclose(both, score_behind(alone, texts, taps), atol=1e-4)


@pytest.mark.parametrize(("share", "most"), [(1.0, 5), (0.4, 512)])
def test_masks_are_the_same_whatever_others_are_trained_beside_them(share, most, monkeypatch):
    module = make_draft(describe("peagle", SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    tokens, taps = torch.randint(0, 40, (2, 16)), torch.randn(2, 15, 3, 64)
    texts = Texts(
        tokens=tokens, aux_states=taps, target_probs=torch.rand(30, 40), learn=torch.ones(2, 15, dtype=torch.bool)
    )
    whole = list(unrolled(module, texts, 9))
    monkeypatch.setattr(masks, "_MOST", most)
    torch.manual_seed(8)
    some = list(unrolled(module, texts, 9, share))
    assert torch.equal(some[0].learn, whole[0].learn)
    kept = [int(step.learn.sum()) for step in some]
    assert 0 < kept[1] < int(whole[1].learn.sum())
    chosen = some[1].learn
    for step, every in zip(some[1:], whole[1:], strict=True):
        assert torch.equal(step.learn, every.learn & chosen)
        assert step.weight > 1
        wanted = spread(every.logits, every.learn)[step.learn]
        assert torch.allclose(step.logits, wanted, atol=1e-5)
        chosen = step.learn | (chosen & ~every.learn)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_chain_keeps_its_column_where_a_share_goes_on(kind):
    """So that what is known of its guesses, step by step, is put together rightly (`--loss length`)."""
    module = make_draft(describe(kind, SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    learn = torch.zeros(2, 15, dtype=torch.bool)
    learn[0, 3:], learn[1, 6:12] = True, True
    laws = torch.rand(2, 15, 40)
    texts = Texts(
        tokens=torch.randint(0, 40, (2, 16)),
        aux_states=torch.randn(2, 15, 3, 64),
        target_probs=laws[learn],
        learn=learn,
    )
    torch.manual_seed(2)
    for guess, step in enumerate(unrolled(module, texts, 4, 0.5)):
        assert step.learn.shape == (2, 14)
        row, column = step.learn.nonzero(as_tuple=True)
        assert learn[row, column + 1].all()
        assert torch.equal(step.target, laws[row, column + 1 + guess])


def test_a_share_of_nothing_is_nothing():
    chains = Chains.of(torch.zeros(2, 5, dtype=torch.bool), 0.5, 9)
    assert not chains.live.any()
    assert chains.weight == 0


def test_training_lowers_the_loss_and_raises_what_is_kept(nano):
    target, prompts, samples = nano
    torch.manual_seed(0)
    plain = describe("eagle3", Sizes(hidden=128, layers=4, vocab=12288, epsilon=1e-5, own_lm_head=False))
    description = replace(
        plain,
        kind=Kind.PEAGLE,
        target_layers=2,
        aux_states=AuxStates(layers=(0, 1), fused=True),
        masks=MaskTokens(draft_tokens=4, token=12287),
        feedback=Feedback.RAW,
    )
    tables, module = target.share_weights(), make_module(description)
    module.share_weights(tables.embedding.float(), tables.head.float())
    texts = Reader(description.aux_states, range(2), tables, module.ids).read(samples, everything=False)
    pupil = SimpleNamespace(module=module, ids=module.ids, unroll=lambda texts, steps: unrolled(module, texts, steps))
    trainer = Trainer(pupil, losses=parse("ce:0.1,tv:1.8"), steps=4, decay=0.8, lr=3e-3)
    before, mask = measure(module, target, prompts), module.mask.detach().clone()
    sums = [trainer.train([texts], progress=step / 60) for step in range(60)]
    assert sums[-1].loss < 0.6 * sums[0].loss
    assert min(seen := [each for each in sums if each.met][-1].acceptance) > 0.4
    assert len(seen) == 4
    assert measure(module, target, prompts) > before + 1
    assert not torch.equal(module.mask, mask)


def test_texts_of_one_token_teach_nothing_and_stop_nothing():
    module = make_module(describe("peagle", SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    for length in (1, 2):
        texts = Texts(
            tokens=torch.ones(1, length + 1, dtype=torch.int64),
            aux_states=torch.randn(1, length, 3, 64),
            target_probs=torch.rand(length, 40),
            learn=torch.ones(1, length, dtype=torch.bool),
        )
        steps = list(unrolled(module, texts, 9))
        assert sum(int(step.learn.sum()) for step in steps) == length - 1


def test_a_batch_without_budgets_is_read():
    head = make_head_target(make_draft(describe("peagle", SMALL)), TABLES, slots=1, context=32)
    rows = admit(head, [[1, 2, 3]])
    tell(head, rows, torch.randn(1, 2, 3, 64), [2])
    batch = Batch(seqs=tuple(rows), start=(0,), feed=((1, 2, 3),), draft_budget=(0,))
    assert head.score(batch, tree.empty(1, CPU)).logits.shape == (1, 1, 40)
