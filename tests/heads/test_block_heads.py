"""Drafts that fill in a block in one pass: descriptions, modules, what training must agree with, and what it brings."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Draw, Scores, SharedWeights
from outrider.errors import OutriderError
from outrider.heads.description import AuxStates, DraftBlock, FuseNorm, HeadDescription
from outrider.heads.store import make_module, read_head, write_head
from outrider.heads.targets.block import BlockTarget
from outrider.heads.targets.registry import make_head_target
from outrider.propose.draft_model import chain as model_of_proposing
from outrider.propose.draft_model.confidence import Confidence
from outrider.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_round, make_row, random_tree
from outrider.train.data.batches import Reader
from outrider.train.loss import blocks
from outrider.train.loss.losses import parse
from outrider.train.loss.steps import Texts
from outrider.train.loss.unroll import unrolled
from outrider.train.model.presets import Sizes, describe
from outrider.train.trainer import Trainer
from tests.helpers.engines import make_engine, run
from tests.helpers.heads import check_text
from tests.helpers.train_setup import spread

CPU = torch.device("cpu")
SMALL = Sizes(hidden=64, layers=8, vocab=40, epsilon=1e-5, depth=2, guesses=4)
MINI = Sizes(hidden=384, layers=8, vocab=12288, epsilon=1e-5, depth=2, guesses=4)
NANO = Sizes(hidden=128, layers=2, vocab=12288, epsilon=1e-5, depth=1, guesses=4)
KINDS = ["dflash", "dspark"]
TABLES = SharedWeights(
    embedding=torch.randn(40, 64, generator=torch.Generator().manual_seed(1)),
    head=torch.randn(40, 64, generator=torch.Generator().manual_seed(2)),
    norm=torch.ones(64),
    epsilon=1e-5,
)


def make_draft(description: HeadDescription, seed: int = 0):
    """A module whose every part says something."""
    torch.manual_seed(seed)
    module = make_module(description).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if "norm" in name or "markov" in name or "judge" in name:
            weight += 0.5 * torch.randn(weight.shape)
    return module


def variants(kind: str) -> dict[str, HeadDescription]:
    plain = describe(kind, SMALL)
    return {
        "as it is": plain,
        "of few tokens": describe(kind, replace(SMALL, draft_vocab=9)),
        "with tables of its own": replace(
            plain,
            own_embedding=True,
            own_lm_head=True,
            body=replace(plain.body, hidden=48, heads=4, attention_bias=True),
        ),
        "of one tap": replace(plain, aux_states=AuxStates(layers=(7,)), final_norm=False),
        "sparing": replace(plain, block=DraftBlock(size=3, sample_from_anchor=True, confidence=True)),
    }


EVERY = [(kind, name) for kind in KINDS for name in variants(kind)]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_descriptions_and_weights_survive_the_disk(kind, name, tmp_path):
    description = variants(kind)[name]
    assert HeadDescription.from_json(json.loads(json.dumps(description.to_json()))) == description
    module = make_draft(description)
    if description.draft_vocab:
        module.ids.copy_(torch.randperm(40)[:9].sort().values)
    write_head(tmp_path / "head", module, dtype=torch.float32)
    again = read_head(tmp_path / "head", dtype=torch.float32, device=CPU)
    assert again.description == description
    assert again.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())
    heads = [make_head_target(each, TABLES, slots=1, context=32) for each in (module, again)]
    texts, taps = [[3, 1, 4, 1, 5]], torch.randn(1, 4, len(description.aux_states.layers), 64)
    first, second = (score_behind(head, texts, taps) for head in heads)
    assert torch.allclose(first, second, atol=1e-4)
    assert isinstance(heads[0], BlockTarget)


def test_a_description_without_a_block_is_as_it_was():
    data = describe("mtp", SMALL).to_json()
    del data["block"]
    assert HeadDescription.from_json(data) == describe("mtp", SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body": None}, "neither"),
        ({"body": None, "stack": describe("medusa", SMALL).stack}, "fills in a block without decoder layers"),
        ({"input_fusion": describe("eagle3", SMALL).input_fusion}, "which a block reads apart"),
        (
            {"aux_states": AuxStates(layers=(1, 2), fused=True, norm=FuseNorm.EACH)},
            "norms what it taps before it is fused",
        ),
        ({"block": DraftBlock(size=1)}, "guesses nothing in a block of 1"),
        ({"block": DraftBlock(size=4, markov_rank=-1)}, "by a matrix of rank -1"),
        ({"target_hidden": 32}, "is 64 wide beside the target's tables of 32"),
    ],
)
def test_what_fits_nothing_is_refused(change, message):
    with pytest.raises(OutriderError, match=message):
        replace(describe("dflash", SMALL), **change)


def test_kinds_follow_the_papers_where_targets_are_large():
    shape = Sizes(hidden=4096, layers=36, vocab=151936, epsilon=1e-6, guesses=15)
    flash, spark = (describe(kind, shape) for kind in KINDS)
    assert flash.aux_states.layers == spark.aux_states.layers == (1, 9, 17, 25, 33)
    assert flash.block == DraftBlock(size=16)
    assert spark.block == DraftBlock(size=15, sample_from_anchor=True, markov_rank=256, confidence=True)
    assert describe("dflash", replace(shape, layers=1)).aux_states.layers == (0,)


def tell(head, rows, taps, ends):
    """Let a head know of the states [B, L, taps, H] of each row's tokens before `ends[b]`, as far as it lacks them."""
    layers, begins = head.description.aux_states.layers, [head.known[row.slot] for row in rows]
    feeds = [tuple(row.token_ids[begin:end]) for row, begin, end in zip(rows, begins, ends, strict=True)]
    fed = {
        layer: tuple(taps[row.slot, begin:end, i] for row, begin, end in zip(rows, begins, ends, strict=True))
        for i, layer in enumerate(layers)
    }
    nodes = {layer: torch.zeros(len(rows), 1, taps.shape[-1]) for layer in layers}
    batch = Batch(seqs=tuple(rows), start=tuple(begins), feed=tuple(feeds), draft_budget=(0,) * len(rows))
    scores = Scores(logits=torch.zeros(len(rows), 1, 1), hidden_states=nodes, feed_hidden_states=fed)
    none = [()] * len(rows)
    head.note(make_round(batch, tree.empty(len(rows), CPU), scores, none, none))
    head.known |= {row.slot: end for row, end in zip(rows, ends, strict=True)}


def admit(head, texts):
    rows = [make_row(list(text), slot) for slot, text in enumerate(texts)]
    head.known = {row.slot: 0 for row in rows}  # by slot, how many states it was told of
    for row in rows:
        head.cache.admit(row.slot, row.token_ids)
    return rows


def batch_of(head, rows, most=None):
    """What the head has not read of the rows' texts, or the first `most` tokens of it."""
    start = tuple(head.cache.length(row.slot) for row in rows)
    feed = tuple(tuple(row.token_ids[begin:][:most]) for row, begin in zip(rows, start, strict=True))
    return Batch(seqs=tuple(rows), start=start, feed=feed, draft_budget=(4,) * len(rows))


def commit(head, batch, draft):
    none = [()] * len(batch.seqs)
    head.cache.commit(make_round(batch, draft, Scores(logits=torch.empty(0)), none, none))


def score_behind(head, texts, taps):
    """Logits [B, V] behind texts, of which the head has just learned."""
    rows = admit(head, texts)
    tell(head, rows, taps, [len(text) - 1 for text in texts])
    return head.score(batch_of(head, rows), tree.empty(len(rows), CPU)).logits[:, 0]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_training_sees_what_the_engine_will(kind, name):
    """Every guess of every block of one masked pass, against texts that grow beside each other, block by block."""
    chance = random.Random(4)
    description = variants(kind)[name]
    module = make_draft(description, seed=3)
    head = make_head_target(module, TABLES, slots=3, context=32)
    lengths, size, guesses = (14, 9, 14), 14, module.block.draft_tokens
    tokens, taps = torch.randint(0, 40, (3, size + 1)), torch.randn(3, size, len(description.aux_states.layers), 64)
    learn = torch.arange(size) < torch.tensor(lengths)[:, None]
    laws = torch.rand(3, size, description.output_vocab)
    steps = list(unrolled(module, Texts(tokens=tokens, aux_states=taps, target_probs=laws[learn], learn=learn), 9))
    said = [spread(step.logits, step.learn) for step in steps]
    meant = [spread(step.target, step.learn) for step in steps]
    sure = [spread(step.confidence, step.learn) if module.block.confidence else None for step in steps]
    assert len(steps) == guesses
    rows = admit(head, [tokens[b, :5].tolist() for b in range(3)])
    tell(head, rows, taps, [4] * 3)
    piece = batch_of(head, rows, most=3)
    head.score(piece, tree.empty(3, CPU))
    commit(head, piece, tree.empty(3, CPU))
    compared = 0
    while rows:
        tell(head, rows, taps, [len(row.token_ids) - 1 for row in rows])
        batch = batch_of(head, rows)
        chain = tree.empty(len(rows), CPU)
        found = [head.score(batch, chain)]
        truth = [tokens[row.slot, len(row.token_ids) :].tolist() + [0] * guesses for row in rows]
        for guess in range(1, guesses):
            chain = tree.chain(torch.tensor([each[:guess] for each in truth]), (guess,) * len(rows))
            found.append(head.score(batch, chain, first=guess - 1))
        for b, row in enumerate(rows):
            place = len(row.token_ids) - 1
            for guess, step in enumerate(steps):
                assert bool(step.learn[row.slot, place - 1]) == (place + guess < lengths[row.slot])
                if step.learn[row.slot, place - 1]:
                    wanted = said[guess][row.slot, place - 1]
                    assert (found[guess].logits[b, -1, module.ids] - wanted).abs().max() < 1e-3
                    assert torch.equal(meant[guess][row.slot, place - 1], laws[row.slot, place + guess])
                    compared += 1
                    if module.block.confidence:
                        assert abs(found[guess].confidence[b, -1] - sure[guess][row.slot, place - 1]) < 1e-4
        commit(head, batch, chain)
        for row in rows:
            row.token_ids += tokens[row.slot, len(row.token_ids) :][: chance.randint(1, 3)].tolist()
        rows = [row for row in rows if len(row.token_ids) <= lengths[row.slot]]
        rows = rows if len(rows) < 2 or chance.random() < 0.5 else rows[1:]
    assert compared > 20


def test_what_is_kept_says_the_same_again_and_leaves_nothing_behind():
    """To a text that did not grow, beside another one, and to the next text in a slot."""
    head = make_head_target(make_draft(describe("dspark", SMALL)), TABLES, slots=2, context=32)
    none, taps = tree.empty(2, CPU), torch.randn(2, 20, 5, 64)
    texts = [torch.randint(0, 40, (length,)).tolist() for length in (20, 6)]
    rows = admit(head, texts)
    tell(head, rows, taps, [19, 5])
    batch = batch_of(head, rows)
    first = head.score(batch, none).logits
    commit(head, batch, none)
    assert [head.cache.length(slot) for slot in range(2)] == [19, 5]
    assert torch.allclose(head.score(batch_of(head, rows), none).logits, first, atol=1e-4)
    for row in rows:
        head.cache.release(row.slot)
    again = score_behind(head, [texts[0][:7], texts[1]], taps)
    fresh = make_head_target(make_draft(describe("dspark", SMALL)), TABLES, slots=2, context=32)
    assert torch.allclose(again, score_behind(fresh, [texts[0][:7], texts[1]], taps), atol=1e-4)
    assert torch.allclose(again[1], first[1, 0], atol=1e-4)


def test_blocks_begin_at_random_places_that_are_learned_from(monkeypatch):
    monkeypatch.setattr(blocks, "_MOST", 4)
    learn = torch.zeros(3, 12, dtype=torch.bool)
    learn[0, 2:], learn[1, 7:9] = True, True
    seen = set()
    for _ in range(40):
        places, live = blocks.anchors(learn, 1.0)
        assert places.shape == live.shape == (3, 4)
        assert live.sum(1).tolist() == [4, 2, 0]
        assert places[1, :2].tolist() == [7, 8]
        chosen = places[0].tolist()
        assert chosen == sorted(set(chosen))
        seen |= set(chosen)
    assert seen == set(range(2, 12))


def test_blocks_begin_at_the_share_of_places_that_is_asked_for():
    torch.manual_seed(3)
    counts = [int(blocks.anchors(torch.ones(2, 101, dtype=torch.bool), 0.25)[1].sum()) for _ in range(50)]
    assert 45 < sum(counts) / len(counts) < 55  # of 2 x 100 places
    assert max(counts) > min(counts)


def test_a_block_is_the_same_whatever_others_are_trained_beside_it(monkeypatch):
    module = make_draft(describe("dspark", SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    tokens, taps = torch.randint(0, 40, (2, 16)), torch.randn(2, 15, 5, 64)
    texts = Texts(
        tokens=tokens, aux_states=taps, target_probs=torch.rand(30, 40), learn=torch.ones(2, 15, dtype=torch.bool)
    )
    whole = list(unrolled(module, texts, 9))
    monkeypatch.setattr(blocks, "_MOST", 5)
    torch.manual_seed(8)
    places, _ = blocks.anchors(texts.learn, 1.0)
    torch.manual_seed(8)
    for step, every in zip(unrolled(module, texts, 9), whole, strict=True):
        at = places - 1  # all places but the first had a block of their own
        wanted = spread(every.logits, every.learn).gather(1, at[..., None].expand(-1, -1, 40))
        assert torch.allclose(spread(step.logits, step.learn), wanted, atol=1e-5, equal_nan=True)
        assert torch.equal(step.learn, every.learn.gather(1, at))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_one_token_teach_nothing_and_stop_nothing(kind):
    module = make_module(describe(kind, SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    texts = Texts(
        tokens=torch.tensor([[3, 1]]),
        aux_states=torch.randn(1, 1, 5, 64),
        target_probs=torch.rand(1, 40),
        learn=torch.ones(1, 1, dtype=torch.bool),
    )
    assert not any(bool(step.learn.any()) for step in unrolled(module, texts, 9))


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_is_answered_by_its_own_path(kind):
    """Whatever stands beside it in the tree, and however many nodes are asked for at once."""
    module = make_draft(describe(kind, SMALL))
    head = make_head_target(module, TABLES, slots=2, context=32)
    rows = admit(head, [[1, 2, 3, 4, 5], [6, 7, 8]])
    tell(head, rows, torch.randn(2, 5, 5, 64), [4, 2])
    batch, draft = batch_of(head, rows), random_tree([9, 6], 40, random.Random(5))
    root = head.score(batch, tree.empty(2, CPU)).logits
    whole = torch.cat([head.score(batch, draft, 0).logits[:, :4], head.score(batch, draft, 4).logits], 1)
    assert torch.allclose(head.score(batch, draft).logits, torch.cat([root, whole], 1), atol=1e-4)
    for b, width in enumerate(draft.width):
        for node in range(width):
            path = [node]
            while (above := int(draft.parent[b, path[0]])) >= 0:
                path.insert(0, above)
            tokens = draft.tokens[:, path]
            alone = head.score(batch, tree.chain(tokens, (len(path),) * 2), len(path) - 1).logits
            assert torch.allclose(alone[b, 0], whole[b, node], atol=1e-4)


def test_a_draft_that_judges_itself_knows_what_stands_above_a_guess_and_not_the_guess():
    head = make_head_target(make_draft(describe("dspark", SMALL)), TABLES, slots=1, context=32)
    rows = admit(head, [[1, 2, 3, 4, 5]])
    tell(head, rows, torch.randn(1, 4, 5, 64), [4])
    batch = batch_of(head, rows)
    head.score(batch, tree.empty(1, CPU))
    parent = torch.tensor([[-1, -1, 0, 0, 2]])
    tokens = torch.tensor([[7, 8, 9, 10, 11]])

    def below(tokens):
        """Log-odds [5] below each guess."""
        return head.score(batch, tree.one_hot_tree(tokens, parent, (5,)), first=0).confidence[0]

    sure = below(tokens)
    for node in range(5):
        other = tokens.clone()
        other[0, node] = 30
        assert (below(other) != sure).tolist() == [each == node for each in range(5)]
    plain = make_head_target(make_draft(describe("dflash", SMALL)), TABLES, slots=1, context=32)
    rows = admit(plain, [[1, 2, 3, 4, 5]])
    tell(plain, rows, torch.randn(1, 4, 5, 64), [4])
    assert plain.score(batch_of(plain, rows), tree.empty(1, CPU)).confidence is None


def test_the_planner_hears_how_sure_a_draft_is_of_itself():
    """Where its confidence head says never, a chain ends at the first guess; where it says always, at the budget."""
    module = make_draft(describe("dspark", SMALL))
    head = make_head_target(module, TABLES, slots=1, context=32)
    rows = admit(head, [[1, 2, 3, 4, 5]])
    tell(head, rows, torch.randn(1, 4, 5, 64), [4])
    batch = replace(batch_of(head, rows), draft_budget=(4,))
    trust = Confidence().trust(0.2, (0.0,), ())
    lengths = []
    torch.nn.init.zeros_(module.judge.weight)
    for log_odds in (-9.0, 9.0):
        torch.nn.init.constant_(module.judge.bias, log_odds)
        lengths.append(head.draft_greedy(batch, 40, trust).count[0])
    assert lengths == [0, 4]


@pytest.mark.parametrize("make", [HeadProposer, HeadTreeProposer])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets_own(kind, temperature, make, tmp_path, monkeypatch):
    """With more guesses wanted than a block has, and texts that are read in pieces."""
    monkeypatch.setattr(model_of_proposing, "_PIECE", 4)
    monkeypatch.setattr(model_of_proposing, "_NEAR", 4)
    write_head(tmp_path / "head", make_draft(describe(kind, MINI)), dtype=torch.float32)
    check_text(tmp_path / "head", make, temperature=temperature, k=6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", [HeadProposer, HeadTreeProposer])
@pytest.mark.parametrize(("kind", "least"), [("dflash", 4), ("dspark", 4), ("peagle", 3), ("mtp", 1)])
def test_no_guess_is_left_out_for_the_pass_that_it_would_take(kind, least, make, temperature):
    """For a block takes one pass, whatever it is asked; other drafts stop where the next pass is not worth it."""
    shape = replace(SMALL, own_lm_head=False)
    head = make_head_target(make_draft(describe(kind, shape)), TABLES, slots=1, context=32)
    proposer = make(replace(toy_setup(ToyTarget(vocab=40)), draw=Draw.ARGMAX), head)
    row = make_row([1, 2, 3, 4, 5], 0, SamplingParams(temperature=temperature))
    proposer.admit(0, row.request)
    head.known = {0: 0}
    tell(head, [row], torch.randn(1, 4, len(head.description.aux_states.layers), 64), [4])
    batch = Batch(seqs=(row,), start=(4,), feed=((5,),), draft_budget=(4,), min_draft_probs=(2.0,))
    depth = max(proposer.propose(batch).depth)
    assert depth == 1 if least == 1 else depth >= least


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_raises_what_is_kept(kind, nano):
    target, prompts, samples = nano
    torch.manual_seed(0)
    description, tables = describe(kind, NANO), target.share_weights()
    module = make_module(description)
    module.share_weights(tables.embedding.float(), tables.head.float())
    texts = Reader(description.aux_states, range(2), tables, module.ids).read(samples, everything=False)
    pupil = SimpleNamespace(module=module, ids=module.ids, unroll=lambda texts, steps: unrolled(module, texts, steps))
    trainer = Trainer(pupil, losses=parse("ce:0.1,tv:1.8"), steps=4, decay=0.8, lr=3e-3)
    before, misjudged = measure(module, target, prompts), misjudgement(module, texts)
    sums = [trainer.train([texts], progress=step / 60) for step in range(60)]
    assert sums[-1].loss < 0.6 * sums[0].loss
    assert min(seen := [each for each in sums if each.met][-1].acceptance) > 0.4
    assert len(seen) == 4
    assert measure(module, target, prompts) > before + 1
    if module.block.confidence:
        assert misjudgement(module, texts) < 0.7 * misjudged


def measure(module, target, prompts) -> float:
    """tau of greedy chains."""
    head = make_head_target(deepcopy(module).eval().requires_grad_(False), target.share_weights(), slots=2, context=96)
    engine = make_engine(target, lambda setup: HeadProposer(setup, head), k=4, rows=2)
    run(engine, prompts, SamplingParams(temperature=0.0), limit=40, ends=frozenset())
    return engine.stats.tau


@torch.no_grad()
def misjudgement(module, texts) -> float:
    """How far the confidence head is from what is kept, in the mean."""
    if not module.block.confidence:
        return 0.0
    far = []
    for step in unrolled(module, texts, 4):
        alpha = torch.minimum(step.target, step.logits.softmax(-1)).sum(-1)
        far.append((step.confidence.sigmoid() - alpha).abs())
    return float(torch.cat(far).mean())
